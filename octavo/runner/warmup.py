"""Warm-up: run every kind of step once, so that no request pays for a compilation."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from octavo.core.plan import Join, StepPlan
from octavo.core.request import Sampling
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler

WARM_ROWS = 4


def warm_up(
    runner: Runner,
    sampler: Sampler,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    progress: Callable[[str, float], None],
) -> float:
    """Seconds it took. The KV pages are only touched where the null page is."""
    start = time.perf_counter()
    progress("Warming up", 0.0)
    sampler.warm_up()
    rows = min(WARM_ROWS, max_num_seqs)
    plans = _plans(rows, max_num_batched_tokens)
    if runner.overlaps:
        plans += _largest_step(len(plans), max_num_batched_tokens)
    for done, plan in enumerate(plans, 1):
        runner.execute(plan)
        progress("Warming up", done / len(plans))
    runner.capture(partial(progress, "Capturing graphs"))
    return time.perf_counter() - start


def _plans(rows: int, max_tokens: int) -> list[StepPlan]:
    """A prompt a row, a mixed step, decodes, then everybody leaves.

    All pages are the null page: its contents are never read by a request.
    """
    slots = list(range(rows))
    prompt = max(1, min(16, max_tokens // rows))
    samplings = [Sampling(temperature=0.0), Sampling(top_p=0.9, top_k=20), Sampling(), Sampling()]
    joins = [Join(slot, [0] * prompt, prompt, samplings[slot % len(samplings)]) for slot in slots]

    def decode(step: int, start: int) -> StepPlan:
        return StepPlan(step, slots, [start] * rows, [1] * rows, [True] * rows)

    return [
        StepPlan(0, slots, [0] * rows, [prompt] * rows, [True] * rows, joins=joins),
        StepPlan(1, slots, [prompt] * rows, [1] * rows, [True] * rows),
        decode(2, prompt + 1),
        StepPlan(3, leaves=slots),
    ]


def _largest_step(step: int, tokens: int) -> list[StepPlan]:
    """One prompt of as many tokens as a step may have: other kernels than those of short ones, and
    all the memory that a step takes."""
    join = Join(0, [0] * tokens, tokens, Sampling(temperature=0.0))
    return [
        StepPlan(step, [0], [0], [tokens], [True], joins=[join]),
        StepPlan(step + 1, leaves=[0]),
    ]
