"""One cell of the storm check: a pool, a load and a seed, served by each policy."""

from __future__ import annotations

from collections.abc import Callable
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

# Six turnovers of the largest pool, a hundred of the smallest.
NUM_REQUESTS = {8: 800, 32: 1000, 128: 1500, 1000: 6000}
AFTER_SHIFT = 500  # ended requests
MIN_SHIFTED = 700  # requests after the shift, so that so many end while others wait
LEFT_OUT = 1.5  # times what the pool holds: the last requests, that end without others behind them
FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.8, 2.0)
FIRST_FACTORS = (0.7, 1.0, 1.4)

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    held: int
    shape: str
    prompts: str = "50-500"
    seed: int = 0
    count: int = 0  # requests; 0: as many as suit the pool

    @property
    def num_requests(self) -> int:
        count = self.count or NUM_REQUESTS[self.held]
        return max(count, 2 * MIN_SHIFTED) if self.shape == "shift" else count


def measure(cell: Cell) -> list[Figures]:
    """Figures for each max_num_seqs and cost model."""
    trace = make_trace(cell.shape, cell.prompts, cell.num_requests, cell.seed)
    tokens = mean_tokens(cell.shape, cell.prompts)
    settings = {ratio: Setting(cell.held, tokens, ratio) for ratio in MAX_SEQS_RATIOS}
    first = settings[MAX_SEQS_RATIOS[0]]
    octavo = _at_each_ceiling(settings, trace, Setting.octavo)
    baseline = _at_each_ceiling(settings, trace, Setting.baseline)
    control = _run(first.control(cell.seed), trace)
    fixed = _fixed_runs(cell, first, trace)
    return [
        _figures(cell, octavo[ratio], baseline[ratio], control, fixed, cost)
        | {"ratio": ratio, "cost": cost, "seed": cell.seed}
        for ratio in MAX_SEQS_RATIOS
        for cost in COST_MODELS
    ]


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


def _fixed_runs(cell: Cell, setting: Setting, trace: Trace) -> dict[float, Outcome]:
    """Runs with a fixed number of requests: around the best one of each cost model, none of the
    two neighbouring factors is better."""
    runs = {factor: _run(setting.fixed(factor), trace) for factor in FIRST_FACTORS}
    for cost in COST_MODELS:
        while missing := [f for f in _around(_best(cell, runs, cost)) if f not in runs]:
            runs |= {factor: _run(setting.fixed(factor), trace) for factor in missing}
    return runs


def _around(factor: float) -> tuple[float, ...]:
    index = FACTORS.index(factor)
    return FACTORS[max(0, index - 1) : index + 2]


def _best(cell: Cell, runs: dict[float, Outcome], cost: str) -> float:
    return max(runs, key=lambda factor: output_rate(cell, _priced(runs[factor], cost)))


def _priced(outcome: Outcome, cost: str) -> Outcome:
    """The steps of a run do not depend on their price: all requests are there from the start, and
    no policy here reads the clock."""
    return outcome.priced(COST_MODELS[cost])


def _figures(
    cell: Cell,
    octavo: Outcome,
    baseline: Outcome,
    control: Outcome,
    fixed: dict[float, Outcome],
    cost: str,
) -> Figures:
    factor = _best(cell, fixed, cost)
    best = _priced(fixed[factor], cost)
    octavo, baseline = _priced(octavo, cost), _priced(baseline, cost)
    figures = {
        "rate": output_rate(cell, octavo) / output_rate(cell, best),
        "gap": octavo.gap_percentile(99.9) / baseline.gap_percentile(99.9),
        "referenced": mean_referenced(cell, octavo),
        "best_factor": factor,
        "ended": octavo.num_finished / len(octavo.finish),
        "most_preemptions": int(octavo.preemptions.max()),
        "stalls": octavo.num_stalls,
    }
    if cell.shape == "shift":
        figures["rate_after_shift"] = shift_rate(cell, octavo) / shift_rate(cell, best)
    for name, outcome in (("", octavo), ("baseline_", baseline), ("control_", control)):
        figures[name + "preemptions"] = float(outcome.preemptions.sum() / outcome.num_finished)
        figures[name + "recomputed"] = outcome.recomputed_tokens / outcome.computed_tokens
    return figures


def loaded_steps(cell: Cell, outcome: Outcome) -> int:
    """Steps until only the last requests are left."""
    left = int(LEFT_OUT * cell.held)
    return int(np.sort(outcome.last_step)[max(0, cell.num_requests - left - 1)]) + 1


def output_rate(cell: Cell, outcome: Outcome) -> float:
    """Tokens a second as long as there is load."""
    return _rate(outcome, 0, loaded_steps(cell, outcome))


def shift_rate(cell: Cell, outcome: Outcome) -> float:
    """Tokens a second from the first long request's admission until so many have ended."""
    first = int(outcome.first_join[shifted_at(cell.num_requests)])
    ends = np.sort(outcome.last_step[outcome.last_step >= first])
    return _rate(outcome, first, int(ends[AFTER_SHIFT - 1]) + 1)


def mean_referenced(cell: Cell, outcome: Outcome) -> float:
    """Share of the pool that requests hold, averaged over time, as long as there is load."""
    end = loaded_steps(cell, outcome)
    steps = outcome.steps
    return float(
        np.average(steps.referenced[:end], weights=steps.seconds[:end]) / outcome.num_usable
    )


def _rate(outcome: Outcome, first: int, end: int) -> float:
    steps = outcome.steps
    return float(steps.sampled[first:end].sum() / steps.seconds[first:end].sum())
