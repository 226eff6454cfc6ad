"""From nothing to a token: ``python -m benchmarks.first_token MODEL [--tiny]``.

Says so when the first token is there. Whoever started the command knows when that was.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import MODELS, TINY

SAID = "The first token is there."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder in benchmarks/models")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU instead")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    from octavo import LLM, SamplingParams

    more: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": 4096} if args.tiny else {}
    config = json.dumps(TINY) if args.tiny else (MODELS / args.model / "config.json").read_text()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        length = 1024 if args.tiny else 4352
        with LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=length, **more
        ) as llm:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
            print(SAID, flush=True)


if __name__ == "__main__":
    main()
