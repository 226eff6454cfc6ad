"""Outcome: what a simulated run did, as columns, and the figures that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.tools.simulate.cost import CostModel

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class Steps:
    """One entry a step. ``start`` and ``seconds`` are on the virtual clock.

    ``sampled`` counts new tokens, ``steady`` those whose request also got one in the step before;
    ``running`` requests hold ``referenced`` pages.
    """

    start: Floats
    seconds: Floats
    prefill_tokens: Ints
    decode_rows: Ints
    context_tokens: Ints
    sampled: Ints
    steady: Ints
    running: Ints
    referenced: Ints

    @property
    def end(self) -> Floats:
        return self.start + self.seconds

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class Outcome:
    """A run. Requests are numbered as in its trace; -1 stands for "never".

    ``first_step`` and ``last_step`` are the steps of a request's first and last token.
    ``pauses`` are pairs of steps between which a request waited for its next token: those
    of two tokens in consecutive steps are not listed but counted (``Steps.steady``).
    """

    steps: Steps
    arrival: Floats
    finish: list[str]  # reason; "" if it never ended
    num_output: Ints
    first_join: Ints  # step
    first_step: Ints
    last_step: Ints
    preemptions: Ints
    recomputed_tokens: int
    num_stalls: int  # steps in which the oldest request that had not ended computed nothing
    num_usable: int  # pages of the pool
    pauses: Ints  # [n, 2]

    @property
    def num_finished(self) -> int:
        return sum(reason in ("stop", "length") for reason in self.finish)

    @property
    def output_tokens(self) -> int:
        return int(self.steps.sampled.sum())

    @property
    def computed_tokens(self) -> int:
        return int(self.steps.prefill_tokens.sum() + self.steps.decode_rows.sum())

    @property
    def seconds(self) -> float:
        """From the first step's start to the last one's end."""
        return float(self.steps.end[-1] - self.steps.start[0]) if len(self.steps) else 0.0

    @property
    def output_rate(self) -> float:
        """Tokens a second over the whole run."""
        return self.output_tokens / self.seconds

    @property
    def mean_referenced(self) -> float:
        """Share of the pool that requests hold, averaged over the time of the steps."""
        steps = self.steps
        return float(np.average(steps.referenced, weights=steps.seconds)) / self.num_usable

    def gap_percentile(self, percent: float) -> float:
        """Seconds between two tokens of one request: the smallest gap that at least ``percent`` of
        all gaps do not exceed. NaN if no request has two tokens."""
        end = self.steps.end
        pauses = end[self.pauses[:, 1]] - end[self.pauses[:, 0]]
        gaps = np.concatenate([self.steps.seconds, pauses])
        weights = np.concatenate([self.steps.steady, np.ones(len(pauses), np.int64)])
        return weighted_percentile(gaps, weights, percent)

    def ttft(self) -> Floats:
        """Seconds from arrival to first token, of the requests that have one."""
        spoke = self.first_step >= 0
        return self.steps.end[self.first_step[spoke]] - self.arrival[spoke]

    def priced(self, model: CostModel) -> Outcome:
        """The same steps at another price. Holds only if the clock has had no part in what was
        scheduled: all requests arrived at once, and the policy reads no clock."""
        if self.arrival.any():
            raise ValueError("only a run whose requests all arrived at 0 can be priced anew")
        steps = self.steps
        seconds = np.array(
            [
                model.seconds(*step)
                for step in zip(
                    steps.prefill_tokens.tolist(),
                    steps.decode_rows.tolist(),
                    steps.context_tokens.tolist(),
                    strict=True,
                )
            ]
        )
        start = np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
        anew = Steps(start, seconds, *(getattr(steps, name) for name in _COUNTS))
        others = {name: getattr(self, name) for name in Outcome.__slots__ if name != "steps"}
        return Outcome(steps=anew, **others)


_COUNTS = Steps.__slots__[2:]


def weighted_percentile(values: Floats, weights: Ints, percent: float) -> float:
    """The smallest value such that at least ``percent`` of the weight is not above it."""
    kept = weights > 0
    values, weights = values[kept], weights[kept]
    if not len(values):
        return float("nan")
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    index = int(np.searchsorted(reached, reached[-1] * percent / 100))
    return float(values[order][min(index, len(values) - 1)])
