"""What captured graphs of mixed steps are worth: ``python -m benchmarks.gpu_mixed --out DIR``.

For each model and each ``--max-graph-tokens``: milliseconds to the first token of one prompt alone,
and the rate of a load in which nearly every step decodes many requests and computes the prompt of
another: SEQS at once, as many more as there are tokens in an answer. ``--device cpu --tiny`` is the
dry run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import MODELS, TINY

SEQS, PROMPT, ANSWER = 64, 256, 64
ALONE = (32, 128, 512)


def open_engine(name: str, device: str, tiny: bool, max_graph_tokens: int) -> Any:
    from octavo import LLM

    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(TINY) if tiny else (MODELS / name / "config.json").read_text()
        Path(folder, "config.json").write_text(text)
        return LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, device=device,
            max_model_len=2048, max_num_seqs=SEQS, max_num_batched_tokens=4096,
            kv_cache_tokens=131072 if not tiny else 65536, max_graph_tokens=max_graph_tokens,
        )  # fmt: skip


def generate(llm: Any, draw: random.Random, ins: list[int], outs: list[int]) -> float:
    """Seconds."""
    from octavo import SamplingParams

    prompts = [[draw.randrange(1, 1000) for _ in range(n)] for n in ins]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, temperature=0.0) for n in outs]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def measure(llm: Any, tiny: bool) -> dict[str, Any]:
    draw = random.Random(3)
    row: dict[str, Any] = {}
    for length in ALONE[:1] if tiny else ALONE:
        times = [generate(llm, draw, [length], [1]) * 1e3 for _ in range(3 if tiny else 8)]
        row[f"first token of {length} alone, ms"] = statistics.median(times[1:])
    count = SEQS if tiny else 5 * SEQS
    # Of the first ones, some end in each step: from then on one joins in nearly every step.
    outs = [1 + i * ANSWER // SEQS for i in range(SEQS)] + [ANSWER] * (count - SEQS)
    rates = []
    for _ in range(1 if tiny else 3):
        seconds = generate(llm, draw, [PROMPT] * count, outs)
        rates.append(sum(outs) / seconds)
    return {**row, "mixed load, output tok/s": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default="qwen3-0.6b,llama3-8b")
    args = parser.parse_args()
    rows = []
    for name in args.models.split(","):
        for max_graph_tokens in (0, 1024):
            start = time.perf_counter()
            with open_engine(name, args.device, args.tiny, max_graph_tokens) as llm:
                row = {
                    "model": name, "max_graph_tokens": max_graph_tokens,
                    "start_s": time.perf_counter() - start, **measure(llm, args.tiny),
                }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
            (args.out / "gpu_mixed.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
