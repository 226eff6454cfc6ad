"""One cell of the storm check: a pool, a load and a seed, served by each policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.checks._storm_load import make_trace, mean_tokens, shifted_at
from benchmarks.checks._storm_policies import MAX_SEQS_RATIOS, Setting
from octavo.core.scheduler import Scheduler
from octavo.tools.simulate.cost import COST_MODELS, GPU
from octavo.tools.simulate.outcome import Outcome
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace

# Five turnovers of the largest pool, a hundred of the smallest.
NUM_REQUESTS = {8: 800, 32: 1000, 128: 1500, 1000: 5000}
AFTER_SHIFT = 500  # ended requests of those after the shift
MIN_SHIFTED = 700  # requests after the shift, so that so many end while others wait
FACTORS = (0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
FIRST_FACTORS = (0.7, 1.0, 1.4)

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    held: int
    shape: str
    prompts: str = "50-500"
    count: int = 0  # requests; 0: as many as suit the pool

    @property
    def num_requests(self) -> int:
        count = self.count or NUM_REQUESTS[self.held]
        return max(count, 2 * MIN_SHIFTED) if self.shape == "shift" else count


def measure(cell: Cell, seeds: Sequence[int]) -> list[Figures]:
    """Figures for each seed, ``max_num_seqs`` and cost model; the control only with the first
    seed. The search for the best fixed value goes on where the previous seed's has ended."""
    tokens = mean_tokens(cell.shape, cell.prompts, cell.held)
    settings = {ratio: Setting(cell.held, tokens, ratio) for ratio in MAX_SEQS_RATIOS}
    first = settings[MAX_SEQS_RATIOS[0]]
    figures: list[Figures] = []
    factors = FIRST_FACTORS
    for seed in seeds:
        trace = make_trace(cell.shape, cell.prompts, cell.num_requests, seed, cell.held)
        octavo = _at_each_ceiling(settings, trace, Setting.octavo)
        baseline = _at_each_ceiling(settings, trace, Setting.baseline)
        control = _run(first.control(seed), trace) if seed == seeds[0] else None
        fixed = _fixed_runs(cell, first, trace, factors)
        factors = tuple({_best(fixed, cost) for cost in COST_MODELS})
        figures += [
            _figures(cell, octavo[ratio], baseline[ratio], control, fixed, cost)
            | {"ratio": ratio, "cost": cost, "seed": seed}
            for ratio in MAX_SEQS_RATIOS
            for cost in COST_MODELS
        ]
    return figures


def _run(scheduler: Scheduler, trace: Trace) -> Outcome:
    outcome = Simulator(scheduler, GPU).run(trace)
    scheduler.audit()
    return outcome


def _at_each_ceiling(
    settings: dict[int, Setting], trace: Trace, policy: Callable[[Setting], Scheduler]
) -> dict[int, Outcome]:
    """A run by ``max_num_seqs``. One that has not come up to its ceiling is also that of a higher
    one, and is not repeated."""
    outcomes: dict[int, Outcome] = {}
    for ratio, setting in settings.items():
        below = [run for lower, run in outcomes.items() if peak(run) < lower * setting.held]
        outcomes[ratio] = below[0] if below else _run(policy(setting), trace)
    return outcomes


def peak(outcome: Outcome) -> int:
    """Most requests at once."""
    return int(outcome.steps.running.max())


def _fixed_runs(
    cell: Cell, setting: Setting, trace: Trace, factors: Sequence[float]
) -> dict[float, Outcome]:
    """Runs with a fixed number of requests, from ``factors`` on until, around the best one of each
    cost model, none of the two neighbouring factors is better."""
    runs = {factor: _run(setting.fixed(factor), trace) for factor in factors}
    for cost in COST_MODELS:
        while missing := [f for f in _around(_best(runs, cost)) if f not in runs]:
            runs |= {factor: _run(setting.fixed(factor), trace) for factor in missing}
    return runs


def _around(factor: float) -> tuple[float, ...]:
    index = FACTORS.index(factor)
    return FACTORS[max(0, index - 1) : index + 2]


def _best(runs: dict[float, Outcome], cost: str) -> float:
    return max(runs, key=lambda factor: _priced(runs[factor], cost).output_rate)


def _priced(outcome: Outcome, cost: str) -> Outcome:
    """The steps of a run do not depend on their price: all requests are there from the start, and
    no policy here reads the clock."""
    return outcome.priced(COST_MODELS[cost])


def _figures(
    cell: Cell,
    octavo: Outcome,
    baseline: Outcome,
    control: Outcome | None,
    fixed: dict[float, Outcome],
    cost: str,
) -> Figures:
    factor = _best(fixed, cost)
    best = _priced(fixed[factor], cost)
    octavo, baseline = _priced(octavo, cost), _priced(baseline, cost)
    figures = {
        "rate": octavo.output_rate / best.output_rate,
        "gap": octavo.gap_percentile(99.9) / baseline.gap_percentile(99.9),
        "referenced": mean_referenced(octavo),
        "best_factor": factor,
        "ended": octavo.num_finished / len(octavo.finish),
        "most_preemptions": int(octavo.preemptions.max()),
        "stalls": octavo.num_stalls,
    }
    if cell.shape == "shift":
        figures["rate_after_shift"] = shift_rate(cell, octavo) / shift_rate(cell, best)
    for name, outcome in (("", octavo), ("baseline_", baseline), ("control_", control)):
        if outcome is None:
            continue
        figures[name + "preemptions"] = float(outcome.preemptions.sum() / outcome.num_finished)
        figures[name + "recomputed"] = outcome.recomputed_tokens / outcome.computed_tokens
    return figures


def shift_rate(cell: Cell, outcome: Outcome) -> float:
    """Tokens a second from the first long request's admission until so many of them have ended.

    (The next so many to end, of whatever length, would tell of a large pool no more than how many
    prompts it takes in at that moment.)
    """
    shifted = shifted_at(cell.num_requests)
    first = int(outcome.first_join[shifted])
    last = int(np.sort(outcome.last_step[shifted:])[AFTER_SHIFT - 1])
    return _rate(outcome, slice(first, last + 1))


def mean_referenced(outcome: Outcome) -> float:
    """Share of the pool that requests hold, averaged over time, as long as anybody waits."""
    steps, saturated = outcome.steps, slice(0, int(outcome.first_join.max()) + 1)
    held = np.average(steps.referenced[saturated], weights=steps.seconds[saturated])
    return float(held / outcome.num_usable)


def _rate(outcome: Outcome, window: slice) -> float:
    steps = outcome.steps
    return float(steps.sampled[window].sum() / steps.seconds[window].sum())
