"""W6: short requests that arrive at random beside long prompts that come like a clock."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

from octavo.tools.bench.client import Load, Outcome, Record, run_load
from octavo.tools.bench.named import Mix
from octavo.tools.bench.serve import Target
from octavo.tools.bench.summary import latencies, percentile
from octavo.tools.bench.workload import Task

FIRST_ID = 1000  # ids below may be special


def run_mix(target: Target, mix: Mix, seed: int, vocab_size: int) -> dict[str, Any]:
    """Latencies in ms of one run; RuntimeError if a request failed."""
    draw = random.Random(seed)
    arrivals = mix.arrivals(draw)
    ids = range(FIRST_ID, vocab_size)
    tasks = [Task(draw.choices(ids, k=prompt), output) for _, (prompt, output) in arrivals]
    load = Load(
        base_url=target.base_url,
        requests=[target.encode(task) for task in tasks],
        due_s=[due for due, _ in arrivals],
    )
    outcome = run_load(load, time.monotonic(), lambda: None)
    return summarise_mix(outcome, [lengths == mix.long for _, lengths in arrivals])


def summarise_mix(outcome: Outcome, is_long: Sequence[bool]) -> dict[str, Any]:
    """``outcome``'s records are in the order of ``is_long``."""
    if errors := [record.error for record in outcome.records if record.error is not None]:
        raise RuntimeError(f"{len(errors)} of {len(is_long)} requests failed: {errors[0]}")
    kinds: dict[bool, list[Record]] = {False: [], True: []}
    for record, long in zip(outcome.records, is_long, strict=True):
        kinds[long].append(record)
    short = [latencies(record) for record in kinds[False]]
    ttft = sorted(value for each in short for value in each["ttft_ms"])
    itl = sorted(value for each in short for value in each["itl_ms"])
    long_ttft = sorted(value for r in kinds[True] for value in latencies(r)["ttft_ms"])
    return {
        "ttft_ms": {f"p{q:g}": percentile(ttft, q) for q in (50, 90, 99)},
        "itl_ms": {f"p{q:g}": percentile(itl, q) for q in (50, 99, 99.9, 100)},
        "long_ttft_ms": {f"p{q:g}": percentile(long_ttft, q) for q in (50, 100)},
        "requests": {"short": len(kinds[False]), "long": len(kinds[True])},
        "late_ms": max(1e3 * (r.sent_at - r.due_at) for r in outcome.records),
        "client_cpu_share": outcome.cpu_share,
    }
