"""How long answers get: a running estimate of their hazard, the chance to end at each length."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PRIOR_WEIGHT = 2.0  # pages' worth of belief in the prior at each length
PRIOR_MEAN = 145.0  # pages: a first guess at the length of an answer …
PRIOR_TAIL = 1.0  # … with a heavy tail: at age a, a chance of at most PRIOR_TAIL / a
MEMORY = 200  # expected ends over which the estimate is taken
DRIFT_MEMORY = 48.0  # expected ends over which it is compared with what happens
DRIFT_WEIGHT = 6.0
MAX_DRIFT = 1.0
RATIO = 1.12  # of neighbouring bins' widths: long lengths are rare, so they are pooled


class LengthEstimate:
    """Life table of answers (Kaplan & Meier 1958), in pages of output, with exponential forgetting.

    An answer is at risk from the moment it reaches an age, and one that ends there has died. So
    those still running count, as censored ones, from their first page on. ``drift`` compares the
    ends of late with what the table expects: when answers get longer, ends stay away
    long before the first long answer has ended. Time is counted in expected ends: where they stay
    away, what was known of shorter answers is forgotten all the same.
    """

    def __init__(self, max_age: int) -> None:
        edges = [0]
        while edges[-1] < max_age + 1:
            edges.append(max(edges[-1] + 1, int(edges[-1] * RATIO)))
        self._bin = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
        self._bins: list[int] = self._bin.tolist()
        middle = (np.array(edges[:-1]) + np.array(edges[1:])) / 2
        self._prior = np.minimum(1 / PRIOR_MEAN, PRIOR_TAIL / middle)
        self._risk = [0.0] * len(middle)
        self._deaths = [0.0] * len(middle)
        self._hazard: list[float] = self._prior.tolist()
        self._weight = 1.0  # of an event now; grows, instead of all counts shrinking
        self._expected = 0.0
        self._happened = 0.0

    def entered(self, age: int) -> None:
        """A running answer has reached page ``age`` of its output, and may end there."""
        index = self._bins[age]
        self._risk[index] += self._weight
        expected = self._hazard[index]
        self._expected += expected
        self._weight *= 1 + expected / MEMORY

    def ended(self, age: int) -> None:
        """An answer has ended in page ``age`` of its output."""
        self._deaths[self._bins[age]] += self._weight
        self._happened += 1.0
        if self._weight > 1e9:
            self._rescale()

    def refresh(self) -> None:
        """Take what has happened into the estimate."""
        if self._expected > DRIFT_MEMORY:
            self._happened *= DRIFT_MEMORY / self._expected
            self._expected = DRIFT_MEMORY
        risk, deaths = np.array(self._risk), np.array(self._deaths)
        belief = PRIOR_WEIGHT * self._weight
        hazard = np.minimum((deaths + belief * self._prior) / (risk + belief), 0.95)
        self._hazard = hazard.tolist()

    @property
    def drift(self) -> float:
        """How many times as many answers end as the table expects, at most MAX_DRIFT."""
        drift = (self._happened + DRIFT_WEIGHT) / (self._expected + DRIFT_WEIGHT)
        return min(MAX_DRIFT, drift)

    def survival(self, ages: int) -> NDArray[np.float64]:
        """[ages]: the chance that an answer reaches each page of output."""
        hazard = np.minimum(np.array(self._hazard) * self.drift, 0.95)[self._bin[: ages - 1]]
        return np.concatenate([[1.0], np.cumprod(1 - hazard)])

    def _rescale(self) -> None:
        self._risk = [value / self._weight for value in self._risk]
        self._deaths = [value / self._weight for value in self._deaths]
        self._weight = 1.0
