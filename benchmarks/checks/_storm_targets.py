"""Targets: with a prompt now and then that takes many steps' time, answers keep their rhythm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.check import Check
from octavo.core.pacing import PrefillPace
from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.tools.simulate.cost import COST_MODELS
from octavo.tools.simulate.outcome import Outcome
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace

MAX_OVER_TARGET = 1.2
NUM_REQUESTS = 600


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second, and tokens of their prompts; a pool that holds them all."""

    rate: float
    prompts: tuple[int, int]
    target_itl: float
    target_ttft: float


# About 60 % of what the machine can do.
LOADS = {
    "gpu": Load(rate=9.0, prompts=(500, 4000), target_itl=0.015, target_ttft=1.0),
    "cpu": Load(rate=1.0, prompts=(200, 800), target_itl=0.1, target_ttft=20.0),
}


def lines(check: Check, num_requests: int = NUM_REQUESTS) -> None:
    for cost, load in LOADS.items():
        with_target = _run(cost, load, num_requests, PrefillPace(target_itl=load.target_itl))
        without = _run(cost, load, num_requests, PrefillPace())
        itl = f"{cost}_itl_p95_over_target"
        check.line(itl, _p95(with_target, load), "<=", MAX_OVER_TARGET)
        check.line(f"{itl}_without_one", _p95(without, load), ">", MAX_OVER_TARGET)
        check.line(f"{cost}_ended", with_target.num_finished, "==", num_requests)


def _p95(outcome: Outcome, load: Load) -> float:
    return outcome.gap_percentile(95) / load.target_itl


def _run(cost: str, load: Load, num_requests: int, pace: PrefillPace) -> Outcome:
    scheduler = Scheduler(
        pool=PagePool(1 << 14),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        pace=pace,
    )
    return Simulator(scheduler, COST_MODELS[cost]).run(_trace(load, num_requests))


def _trace(load: Load, count: int) -> Trace:
    """Poisson arrivals; answers of 150 tokens in the mean."""
    draw = np.random.default_rng(count)
    return Trace(
        arrival=np.cumsum(draw.exponential(1 / load.rate, count)),
        prompt=draw.integers(*load.prompts, count, endpoint=True),
        output=draw.integers(50, 250, count, endpoint=True),
        max_tokens=np.full(count, 512),
    )
