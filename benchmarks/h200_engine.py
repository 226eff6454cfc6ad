"""Rows of the H200 benchmark that need an engine in this process."""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.gpu_engine import Bench, measure, workloads
from benchmarks.gpu_ids import compare_ids
from benchmarks.gpu_probes import (
    PlanRecorder,
    SyncCounter,
    both_loops,
    closed_loop,
    probed,
    replay,
)
from benchmarks.h200_results import Session
from benchmarks.h200_table import OFFLINE_W5
from octavo.core.request import Request, Sampling
from octavo.tools.bench.steps import StepMeter, cuda_mark, device_seconds

RATE = {"W1": "output_tok_s", "W2": "decode_tok_s", "W3": "input_tok_s", "W4": "output_tok_s"}
TRUNCATED = "W1 top_k top_p"
GROWTH_RUNS = 40
IN_SHARE, OUT_SHARE = 4, 16  # of W1's tokens, in a short run of it


def large(session: Session) -> None:
    bench = _open("llama3-8b", session)
    w1 = _rates(session, bench, "8B", ("W1",))["W1"]
    for work in ("W4", "W2"):
        _metered(session, bench, work)
    _rates(session, bench, "8B", ("W3",))
    if w1:
        session.repeat(
            "8B W1 with top_p and top_k",
            lambda: _rate(session, bench, TRUNCATED, "W1") / statistics.median(w1),
        )
    if session.wants("8B W5 over offline"):
        with session.guard(OFFLINE_W5):
            rate, how = _offline_w5(session, bench)
            session.put(OFFLINE_W5, [rate], unit="output tok/s", **how)
    bench.llm.audit()


def large_fp8(session: Session) -> None:
    bench = _open("llama3-8b", session, kv_cache_dtype="fp8")
    session.repeat("8B W1 fp8", lambda: _rate(session, bench, "W1"))
    bench.llm.audit()


def small(session: Session) -> None:
    bench = _open("qwen3-0.6b", session)
    _rates(session, bench, "0.6B", ("W1", "W2", "W3", "W4"))
    _host_waits(session, bench)
    if session.wants("0.6B W1 replayed"):
        with session.guard("0.6B W1 replayed"):
            _replay(session, bench)
    if session.wants("0.6B memory growth over 40 runs") and not session.tiny:
        with session.guard("0.6B memory growth over 40 runs"):
            _growth(session, bench)
    bench.llm.audit()


def ids(session: Session) -> None:
    with session.guard("fp32 ids, card = CPU"):
        report = compare_ids(session.device, 2 if session.tiny else 8)
        for row, key in (
            ("fp32 ids, card = CPU", "overlapped = cpu"),
            ("fp32 ids, overlapped = plain", "overlapped = plain"),
        ):
            session.put(row, [report[key]], forgiven=report[f"{key}, forgiven"])


def _open(model: str, session: Session, **options: str) -> Bench:
    bench = Bench(model, session.device, session.tiny, options)
    print(f"{model}: started in {bench.start_s:.1f} s, warm in {bench.warm():.1f} s", flush=True)
    return bench


def _rates(
    session: Session, bench: Bench, model: str, works: tuple[str, ...]
) -> dict[str, list[float]]:
    return {
        work: session.repeat(f"{model} {work}", lambda work=work: _rate(session, bench, work))  # type: ignore[misc]
        for work in works
    }


def _rate(session: Session, bench: Bench, work: str, like: str | None = None) -> float:
    return measure(bench, work, session.tiny)[RATE[like or work]]


def _metered(session: Session, bench: Bench, work: str) -> None:
    """The rate, and the share of the same time in which the device had no work."""
    idle: list[float] = []

    def rate() -> float:
        meter = StepMeter(bench.llm._loop.executor, None if session.tiny else cuda_mark)
        with probed(bench.llm._loop, meter):
            row = measure(bench, work, session.tiny)
        busy = device_seconds(meter.take())
        if busy is not None:  # a CPU has no stream to put marks on
            idle.append(1 - busy / (row["seconds"] + row.get("first_s", 0.0)))
        return row[RATE[work]]

    if session.repeat(f"8B {work}", rate) and idle:
        session.put(f"8B {work} idle", idle)


def _host_waits(session: Session, bench: Bench) -> None:
    """Over a short W1: joins, mixed steps, decodes."""
    name = "host waits in a step"
    if not session.wants(name):
        return
    with session.guard(name):
        counter = SyncCounter(bench.llm._loop.executor)
        with probed(bench.llm._loop, counter):
            _short_w1(session, bench)
        session.put(name, [max(counter.counts)], steps=len(counter.counts), first=counter.first)


def _short_w1(session: Session, bench: Bench) -> float:
    """W1 with a quarter of its prompts' tokens and a sixteenth of its output tokens."""
    ins, outs, values = workloads(session.tiny)["W1"]
    ins, outs = [n // IN_SHARE + 1 for n in ins], [n // OUT_SHARE + 1 for n in outs]
    return bench.run(ins, outs, values)


def _offline_w5(session: Session, bench: Bench) -> tuple[float, dict[str, int]]:
    """Output tokens a second of W5's requests without a server, as many of them at a time; and how
    many they were. Half of them tell as much: they come and go in waves."""
    count, streams, num_input, num_output = w5_shape(session)
    count = max(streams, count // 2)
    draw = random.Random(time.time_ns())
    requests = [
        Request(
            f"w5-{number}",
            [draw.randrange(1, 1000) for _ in range(num_input)],
            num_output,
            Sampling(temperature=0.0),
        )
        for number in range(count)
    ]
    start = time.perf_counter()
    tokens = closed_loop(bench.llm._loop, requests, streams)
    seconds = time.perf_counter() - start
    return tokens / seconds, {"requests": count, "streams": streams}


def w5_shape(session: Session) -> tuple[int, int, int, int]:
    """Requests, streams, and tokens in and out of each."""
    if session.tiny:
        return 12, 4, 32, 8
    return 256 if session.short else 1024, 256, 512, 256


def _replay(session: Session, bench: Bench) -> None:
    """W1's plans once more, in both loops, from an empty cache."""
    scheduler, executor = bench.llm._loop.scheduler, bench.llm._loop.executor
    scheduler.reset_prefix_cache()
    recorder = PlanRecorder(executor)
    with probed(bench.llm._loop, recorder):
        bench.run(*workloads(session.tiny)["W1"])
    differing = {
        name: sum(a != b for a, b in zip(recorder.ids, replay(loop, recorder.plans), strict=True))
        for name, loop in both_loops(executor).items()
    }
    scheduler.reset_prefix_cache()  # its pages hold what the replays wrote
    steps, most = len(recorder.plans), float(max(differing.values()))
    session.put("0.6B W1 replayed", [most], steps=steps, differing=differing)


def _growth(session: Session, bench: Bench) -> None:
    """MiB in use on the device after each of 40 runs: the most of the last twenty less the most of
    the first twenty. Each run is a short W1."""
    import torch

    used = []
    for _ in range(GROWTH_RUNS):
        _short_w1(session, bench)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append((total - free) / 2**20)
    half = GROWTH_RUNS // 2
    session.put(
        "0.6B memory growth over 40 runs",
        [max(used[half:]) - max(used[:half])],
        used_mib=used,
        runs=f"W1 with 1/{IN_SHARE} of its tokens in and 1/{OUT_SHARE} out",
    )
