"""Where the time of a workload goes: host calls of its steps, then the device's wall by kernel.

    python -m benchmarks.gpu_timeline --out DIR [--models …] [--work W4,W1] [--device cpu --tiny]

The first runs of a workload time the calls of every step on the host; the last one profiles a few
spans of steps. A kernel that starts early waits for its predecessor, so durations overlap: its
*wall* is the time in which it is, of all that run, the first to end. Walls and gaps add up to the
span. Figures go to ``DIR/gpu_timeline.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from benchmarks.gpu_engine import Bench, workloads

SPANS = {"W1": ((0, 14), (100, 108), (500, 508)), "W4": ((0, 6), (256, 264)), "W2": ((100, 104),)}
TINY_SPANS = ((0, 3), (8, 10))
GAPS_US = (2, 10, 100, 1000)
Kernel = tuple[float, float, str]  # start and end in us, name


def walls(kernels: Iterable[Kernel]) -> tuple[Counter[str], list[tuple[float, str, str]]]:
    """Microseconds of the wall by name; gaps with what ended before and what came after."""
    by_name: Counter[str] = Counter()
    gaps = []
    running: list[tuple[float, str]] = []  # by end: each moment is that of whoever ends first
    now, before = None, ""
    for start, end, name in [*sorted(kernels), (math.inf, math.inf, "")]:
        while running and now is not None and now < start:
            until, before = running[0]
            by_name[before] += max(0.0, min(until, start) - now)
            now = max(now, min(until, start))
            if until <= now:
                heappop(running)
        if now is not None and now < start < math.inf:
            gaps.append((start - now, before, name))
        now = start if now is None else max(now, start)
        heappush(running, (end, name))
    return by_name, gaps


def describe(kernels: list[Kernel], steps: int) -> dict[str, Any]:
    """Of a profiled span: milliseconds a step by kernel, and its gaps."""
    by_name, gaps = walls(kernels)
    counts = Counter(name for _, _, name in kernels)
    durations: Counter[str] = Counter()
    for start, end, name in kernels:
        durations[name] += end - start
    busy, idle = sum(by_name.values()), sum(gap for gap, _, _ in gaps)
    sizes = {
        f"over {least} us": [
            sum(gap >= least for gap, _, _ in gaps),
            round(sum(gap for gap, _, _ in gaps if gap >= least) / 1e3, 3),
        ]
        for least in GAPS_US
    }
    return {
        "span_ms": (busy + idle) / 1e3,
        "idle_share": idle / max(busy + idle, 1e-9),
        "gaps": {"count and ms": sizes, "largest": sorted(gaps, reverse=True)[:8]},
        "kernels": [
            {
                "name": name[:60],
                "wall_ms_a_step": us / 1e3 / steps,
                "duration_us": durations[name] / counts[name],
                "a_step": counts[name] / steps,
            }
            for name, us in by_name.most_common(24)
        ],
    }


class Marks:
    """Start and length in seconds of each call of the engine's loop, by name and in order."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextmanager
    def watch(self, llm: Any) -> Any:
        """Until its end, the calls are timed."""
        scheduler, executor = llm._loop.scheduler, llm._loop.executor
        watched = {
            "generate": (llm, "generate"), "enqueue": (scheduler, "submit"),
            "plan": (scheduler, "plan"), "launch": (executor, "submit"),
            "wait": (executor, "result"), "apply": (scheduler, "apply"),
        }  # fmt: skip
        for title, (owner, name) in watched.items():
            setattr(owner, name, self._timed(title, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in watched.values():
                delattr(owner, name)

    def _timed(self, title: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            value = call(*args, **kwargs)
            self.calls[title].append((start, time.perf_counter() - start))
            return value

        return timed

    def summary(self) -> dict[str, Any]:
        """Milliseconds; ``until_launched``: from the call of ``generate`` to the first step."""
        begun, (start, seconds) = self.calls["generate"][0][0], self.calls["launch"][0]
        found: dict[str, Any] = {"until_launched": (start + seconds - begun) * 1e3}
        for title, calls in self.calls.items():
            ms = [seconds * 1e3 for _, seconds in calls]
            found[title] = {
                "calls": len(ms), "sum": sum(ms), "median": statistics.median(ms),
                "largest": max(ms), "first": [round(x, 3) for x in ms[:8]],
            }  # fmt: skip
        return found


class Spans:
    """Profiles the steps [first, last) of each span while a loop runs."""

    def __init__(self, spans: Iterable[tuple[int, int]], on_gpu: bool) -> None:
        self._starts = dict(spans)
        self._on_gpu, self._step = on_gpu, 0
        self._profiler: Any = None
        self._until = 0
        self.found: dict[str, dict[str, Any]] = {}

    @contextmanager
    def watch(self, loop: Any) -> Any:
        step = loop.step

        def watched(now: float) -> Any:
            if self._step in self._starts:
                self._begin()
            output = step(now)
            self._step += 1
            if self._profiler is not None and (self._step == self._until or not loop.has_work):
                self._end()
            return output

        loop.step = watched
        try:
            yield
        finally:
            del loop.step

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._first, self._until = self._step, self._starts[self._step]
        kind = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        self._profiler = profile(activities=[kind])
        self._profiler.start()

    def _end(self) -> None:
        self._profiler.stop()
        device = "CUDA" if self._on_gpu else "CPU"
        kernels = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in self._profiler.events()
            if event.device_type.name == device
        ]
        title = f"steps {self._first} to {self._step - 1}"
        self.found[title] = describe(kernels, self._step - self._first)
        self._profiler = None


def show(title: str, span: dict[str, Any]) -> None:
    print(f"{title}: {span['span_ms']:.1f} ms, idle {span['idle_share']:.1%}, {span['gaps']}")
    for k in span["kernels"]:
        print(
            f"  {k['name']:60s} {k['a_step']:7.1f} a step, {k['duration_us']:8.1f} us each, "
            f"wall {k['wall_ms_a_step']:7.3f} ms a step"
        )
    print(flush=True)


def measure(bench: Bench, work: str, tiny: bool) -> dict[str, Any]:
    ins, outs, values = workloads(tiny)[work]
    marks = Marks()
    with marks.watch(bench.llm):
        seconds = bench.run(ins, outs, values)
    row = {"seconds": seconds, "output_tok_s": sum(outs) / seconds, "host": marks.summary()}
    print(work, json.dumps(row), flush=True)
    return row


def profile(bench: Bench, work: str, tiny: bool, on_gpu: bool) -> dict[str, Any]:
    ins, outs, values = workloads(tiny)[work]
    spans = Spans(TINY_SPANS if tiny else SPANS.get(work, ((0, 8),)), on_gpu)
    with spans.watch(bench.llm._loop):
        seconds = bench.run(ins, outs, values)
    for title, span in spans.found.items():
        show(f"{work}, {title}", span)
    return {"profiled_seconds": seconds, "spans": spans.found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", default="llama3-8b")
    parser.add_argument("--work", default="W4,W1")
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--skip-profile", action="store_true")
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {}
    for name in args.models.split(","):
        bench = Bench(name, args.device, args.tiny, args.options)
        report[name] = {"start_s": bench.start_s, "warm_s": bench.warm()}
        print(name, report[name], flush=True)
        for work in args.work.split(","):
            report[name][work] = [measure(bench, work, args.tiny) for _ in range(args.reps)]
            if not args.skip_profile:
                found = profile(bench, work, args.tiny, args.device == "cuda")
                report[name][f"{work} profiled"] = found
            (args.out / "gpu_timeline.json").write_text(json.dumps(report, indent=1))
        bench.llm.close()


if __name__ == "__main__":
    main()
