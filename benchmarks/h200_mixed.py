"""W6: short requests that arrive at random beside long prompts that come like a clock."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.tools.bench.client import Load, Outcome, Record, run_load
from octavo.tools.bench.serve import Target
from octavo.tools.bench.summary import latencies, percentile
from octavo.tools.bench.workload import Task

FIRST_ID = 1000  # ids below may be special


@dataclass(frozen=True, slots=True)
class Mix:
    """``rate`` (1/s) of the short ones' Poisson arrivals; a long prompt every ``long_every_s``,
    the first one half of that after the start. (Prompt, output) tokens of each kind."""

    seconds: float = 60.0
    rate: float = 8.0
    long_every_s: float = 2.0
    short: tuple[int, int] = (512, 128)
    long: tuple[int, int] = (16_000, 32)
    vocab_size: int = 128_000

    def arrivals(self, draw: random.Random) -> list[tuple[float, bool]]:
        """(Seconds after the start, whether it is a long one), by time."""
        found, now = [], draw.expovariate(self.rate)
        while now < self.seconds:
            found.append((now, False))
            now += draw.expovariate(self.rate)
        now = self.long_every_s / 2
        while now < self.seconds:
            found.append((now, True))
            now += self.long_every_s
        return sorted(found)

    def task(self, is_long: bool, draw: random.Random) -> Task:
        num_input, num_output = self.long if is_long else self.short
        return Task(draw.choices(range(FIRST_ID, self.vocab_size), k=num_input), num_output)


def run_mix(target: Target, mix: Mix, seed: int) -> dict[str, Any]:
    """Latencies in ms of one run; RuntimeError if a request failed."""
    draw = random.Random(seed)
    arrivals = mix.arrivals(draw)
    load = Load(
        base_url=target.base_url,
        requests=[target.encode(mix.task(is_long, draw)) for _, is_long in arrivals],
        due_s=[due for due, _ in arrivals],
    )
    outcome = run_load(load, time.monotonic(), lambda: None)
    return summarise_mix(outcome, [is_long for _, is_long in arrivals])


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
