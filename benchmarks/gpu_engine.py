"""The whole engine on a GPU: right ids first, then offline workloads.

    python -m benchmarks.gpu_engine --out DIR [--models …] [--work …] [--device cpu --tiny]

Ids of a random tiny fp32 model, with graphs and two steps under way, are compared with the plain
loop's and with the CPU reference's. Then the workloads run on random weights, with fresh random
prompts each time. Figures go to ``DIR/gpu_engine.json``; ``--device cpu --tiny`` is the dry run.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu_ids import TINY, compare_ids
from octavo.tools.bench.named import lengths_w1

MODELS = Path(__file__).parent / "models"


def workloads(tiny: bool) -> dict[str, tuple[list[int], list[int], dict[str, float]]]:
    """Name: prompt lengths, output lengths, sampling parameters."""
    scale = 16 if tiny else 1
    ins, outs = lengths_w1(256 // scale)
    ins, outs = [n // scale + 1 for n in ins], [n // scale + 1 for n in outs]
    if not tiny:
        ins, outs = lengths_w1(256)
    warm = 0.6
    return {
        "W1": (ins, outs, {"temperature": warm}),
        "W1 top_k top_p": (ins, outs, {"temperature": warm, "top_k": 50, "top_p": 0.95}),
        "W2": ([128], [256 // scale], {"temperature": 0.0}),
        "W3": ([4096 // scale] * (32 // scale), [1] * (32 // scale), {"temperature": 0.0}),
        "W4": (
            [32] * (512 // scale), [512 // scale] * (512 // scale), {"temperature": 0.0},
        ),
    }  # fmt: skip


class Bench:
    """One model, loaded once."""

    def __init__(self, name: str, device: str, tiny: bool, options: dict[str, Any]) -> None:
        from octavo import LLM

        self._draw = random.Random(7)
        self._top = 1000 if tiny else 10_000
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(TINY) if tiny else (MODELS / name / "config.json").read_text()
            Path(folder, "config.json").write_text(text)
            self.llm = LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, device=device,
                max_model_len=2048 if tiny else 4352, max_num_seqs=32 if tiny else 512,
                max_num_batched_tokens=512 if tiny else 16384,
                **({"kv_cache_tokens": 32768} if tiny else {}), **options,
            )  # fmt: skip
        self.start_s = time.perf_counter() - start

    def run(self, ins: list[int], outs: list[int], values: dict[str, float]) -> float:
        """Seconds of one call of ``generate`` with fresh prompts."""
        from octavo import SamplingParams

        prompts = [[self._draw.randrange(1, self._top) for _ in range(n)] for n in ins]
        params = [SamplingParams(max_tokens=n, ignore_eos=True, **values) for n in outs]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == outs
        return seconds

    def warm(self) -> float:
        draw = random.Random(7)
        scale = 8 if self._top == 1000 else 1
        start = time.perf_counter()
        ins = [draw.randint(16, 600 // scale) for _ in range(64 // scale)]
        self.run(ins, [draw.randint(4, 48) for _ in ins], {"temperature": 0.6})
        self.run([32], [16], {"temperature": 0.0})
        return time.perf_counter() - start

    def profile(self, ins: list[int], outs: list[int], values: dict[str, float]) -> dict[str, Any]:
        """Kernel time by name, in ms, of one run; and how much of its time the device was busy."""
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as record

        with record(activities=[ProfilerActivity.CUDA]) as found:
            seconds = self.run(ins, outs, values)
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in found.key_averages():
            times[event.key[:70]] += event.self_device_time_total / 1e3
            counts[event.key[:70]] += event.count
        return {
            "seconds": seconds,
            "kernel_s": sum(times.values()) / 1e3,
            "top": [(name, round(ms, 2), counts[name]) for name, ms in times.most_common(18)],
        }


def measure(bench: Bench, work: str, tiny: bool) -> dict[str, float]:
    """Seconds and rates of one run. W2 decodes from its second token on: a run that ends with the
    first one is taken off."""
    ins, outs, values = workloads(tiny)[work]
    seconds = bench.run(ins, outs, values)
    row = {
        "seconds": seconds,
        "output_tok_s": sum(outs) / seconds,
        "input_tok_s": sum(ins) / seconds,
    }
    if work == "W2":
        row["first_s"] = bench.run(ins, [1], values)
        row["decode_tok_s"] = (outs[0] - 1) / (seconds - row["first_s"])
    return row


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default="qwen3-0.6b,llama3-8b")
    parser.add_argument("--work", default="W2,W4,W3,W1,W1 top_k top_p")
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--profile", default="", help="workloads to profile, after all others")
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    parser.add_argument("--skip-ids", action="store_true")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds a model")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    report: dict[str, Any] = {"commit": commit.stdout.strip(), "rows": [], "profiles": []}
    if not args.skip_ids:
        report["ids"] = compare_ids(args.device)
        print(report["ids"], flush=True)
    path = args.out / "gpu_engine.json"
    for name in args.models.split(","):
        began = time.perf_counter()
        bench = Bench(name, args.device, args.tiny, args.options)
        row = {"model": name, "start_s": bench.start_s, "warm_s": bench.warm()}
        report["rows"].append(row)
        print(row, flush=True)
        for work in args.work.split(","):
            for _ in range(args.reps):
                if time.perf_counter() - began > args.budget:
                    break
                row = {"model": name, "work": work, **measure(bench, work, args.tiny)}
                report["rows"].append(row)
                print(row, flush=True)
        path.write_text(json.dumps(report, indent=1))
        for work in filter(None, args.profile.split(",")):
            found = bench.profile(*workloads(args.tiny)[work])
            report["profiles"].append({"model": name, "work": work, **found})
            print(name, work, found["seconds"], found["kernel_s"], *found["top"], sep="\n  ")
        path.write_text(json.dumps(report, indent=1))
        bench.llm.audit()
        bench.llm.close()


if __name__ == "__main__":
    main()
