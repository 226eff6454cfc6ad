"""A start on a GPU: what it takes, what it refuses, and a step that runs out of memory.

    BEGIN=$(date +%s.%N) python -m benchmarks.gpu_start --out DIR [--model …] [--options …] [--tiny]

The first token comes first, timed from BEGIN (seconds since the epoch); then, in the same process,
a step that has no memory, and starts that cannot be. Figures go to ``DIR/gpu_start.json``.
``--tiny`` is the dry run, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import MODELS, TINY

GIB = 2**30
HOG = "import torch, time; x = torch.empty({size}, dtype=torch.uint8, device='cuda'); "
HOG += "print('held', flush=True); time.sleep(60)"


class Starts:
    """Engines of one model, and what there is to say of them."""

    def __init__(self, out: Path, model: str, options: dict[str, Any], *, tiny: bool) -> None:
        self._path = out / "gpu_start.json"
        self._model, self._options, self._tiny = model, options, tiny
        self.report: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        self.report[name] = value
        print(f"{name}: {value}", flush=True)
        self._path.write_text(json.dumps(self.report, indent=1))

    def start(self, **options: Any) -> Any:
        from octavo import LLM

        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(TINY)
            if not self._tiny:
                text = (MODELS / self._model / "config.json").read_text()
            Path(folder, "config.json").write_text(text)
            given: dict[str, Any] = {"max_model_len": 4352} | self._options
            if self._tiny:
                given = {"max_model_len": 1024, "device": "cpu", "max_num_batched_tokens": 256}
            return LLM(folder, load_format="dummy", skip_tokenizer_init=True, **given | options)

    def refusal(self, name: str, **options: Any) -> None:
        from octavo.core.errors import StartupError

        begin = time.perf_counter()
        try:
            self.start(**options).close()
            text = "was not refused"
        except StartupError as error:
            text = str(error)
        self.put(name, {"text": text, "seconds": time.perf_counter() - begin})


def generate(llm: Any, length: int, count: int = 1) -> str:
    """The end of the last answer: its finish reason, or the error's code."""
    from octavo import SamplingParams
    from octavo.core.errors import EngineFault

    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    try:
        (output,) = llm.generate([[7] * length], params, use_tqdm=False)
    except EngineFault as error:
        return f"{error.code}: {error.message}"
    return str(output.outputs[0].finish_reason)


def take_all_memory() -> list[Any]:
    import torch

    held = []
    size = torch.cuda.mem_get_info()[0]
    while size > 2**20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


@contextmanager
def other_process(size: int) -> Iterator[None]:
    command = [sys.executable, "-c", HOG.format(size=size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield
        child.kill()


def count_late_compilations() -> list[str]:
    """Kernels that this process compiles itself: a start leaves none to it."""
    from triton import knobs

    late: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            late.append(src.name)

    knobs.compilation.listener = note
    return late


def main() -> None:
    begin = float(os.environ.get("BEGIN", time.time()))
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="llama3-8b", help="a folder in benchmarks/models")
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only-start", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    starts = Starts(args.out, args.model, args.options, tiny=args.tiny)
    late = count_late_compilations()
    llm = starts.start()
    starts.put("engine was ready after s", time.time() - begin)
    generate(llm, 3)
    starts.put("first token after s", time.time() - begin)
    starts.put(
        "finish of 1,000 in, 8 out", generate(llm, min(1000, llm.info.max_model_len // 2), 8)
    )
    starts.put("info", {"kv_tokens": llm.info.kv_tokens, **llm.info.notes})
    starts.put("late compilations", late)
    if args.only_start:
        return
    if not args.tiny:
        held = take_all_memory()
        starts.put("without memory", generate(llm, 4000))
        held.clear()
        starts.put("with memory again", generate(llm, 4000))
    llm.audit()
    llm.close()
    starts.refusal("too many tokens", kv_cache_tokens=40_000_000)
    starts.refusal("too small a pool", kv_cache_memory="64MiB")
    if args.tiny:
        return
    with other_process(60 * GIB):
        starts.refusal("another process")
    starts.refusal("no room beside a step", gpu_memory_utilization=0.12)


if __name__ == "__main__":
    main()
