"""Forecast: admit a request if the pool will hold it and all that run, now and later."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from octavo.core.admission import PoolState
from octavo.core.lengths import LengthEstimate
from octavo.core.sequence import Sequence

WATERMARK = 0.01  # of the pool, kept free
FRESH_STEPS = 8  # a forecast is renewed after so many steps
HORIZONS = np.array(
    [1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 181, 256]
)  # pages of output
EARLIER = np.concatenate([[0], HORIZONS[:-1]])  # who must end after it counts at the next one
FARTHEST = int(HORIZONS[-1])
# [pages that an answer may still take, at most FARTHEST; horizon]: those taken by then, and whether
# it may live until then.
GROWN = np.minimum(HORIZONS, np.arange(FARTHEST + 1)[:, None])
MAY_LIVE = (np.arange(FARTHEST + 1)[:, None] > EARLIER).astype(float)
FIRST_CAUTION = 1.0
MIN_CAUTION, MAX_CAUTION = -2.0, 2.5
MORE_CAUTION = 0.08  # for each request's worth of tokens that preemptions have lost
# So many requests' worth of tokens may be lost while all that run are replaced once. What few
# requests hold fluctuates more, so that caution costs a small pool more than a large one.
SOUGHT_LOSS = 0.95
MIN_TURNOVER = 6
MEMORY = 100  # ended requests over which their mean number of tokens is taken

Vector = NDArray[np.float64]


class Forecast:
    """An :class:`~octavo.core.admission.Admission` that looks ahead.

    A running sequence holds its pages and grows by one a page of output, for as long as it lives;
    how long that is, is told by a running estimate of answers' lengths and bounded by its own
    ``max_tokens``. So the pages held at a horizon have a mean and a standard deviation σ, and
    a newcomer joins if mean + k·σ fits the pool at every horizon. k, the *caution*, rises with
    each preemption and falls a little with each departure (additive increase and decrease).

    It costs what changes: a few numbers a page of output, and a table of running sequences ×
    horizons every ``FRESH_STEPS`` steps while somebody waits.
    """

    def __init__(self, page_size: int, max_len: int = 1 << 17, growing: int = 1) -> None:
        """``growing`` layer groups take another page for each page of tokens."""
        self._page_size = page_size
        self._growing = growing
        self._grown = growing * GROWN.astype(float)
        self._lengths = LengthEstimate(max_len // page_size + 2 + FARTHEST)
        self._caution = FIRST_CAUTION
        self._mean_tokens = 256.0  # of a request, prompt included
        self._step = 0
        self.reset()

    def reset(self) -> None:
        # One entry a slot; own pages are those that leave with the sequence.
        # (Arrays: a step changes numbers of many slots, and objects would lie all over the memory.)
        self._age, self._own, self._left = array("q"), array("q"), array("q")
        self._active: list[bool] = []
        self._num_active = 0
        self._sum_own = 0
        self._fresh_until = -1
        self._mean = self._variance = np.zeros(len(HORIZONS))
        self._rows: dict[int, tuple[Vector, Vector]] = {}  # of slots that joined since
        self._means = self._variances = np.zeros((0, len(HORIZONS)))
        self._survival = np.ones(1)
        self._chances: dict[tuple[int, int], Vector] = {}  # of late, by age and pages left
        self._quoted_for: tuple[int, int, int] | None = None  # whose row is kept for joined()
        self._quoted = self._mean, self._variance

    def begin_step(self) -> None:
        self._step += 1

    def admits(self, seq: Sequence, claims: int, pool: PoolState) -> bool:
        usable = pool.usable * (1 - WATERMARK)
        if pool.held + claims > usable:
            return False
        if self._step >= self._fresh_until:
            self._renew()
        outlook = self._outlook(seq, claims)
        mean, variance = self._quoted = self._row(*outlook)
        self._quoted_for = outlook
        shared = max(0, pool.held - self._sum_own)
        projected = self._mean + mean + self._caution * np.sqrt(self._variance + variance)
        return bool(max(projected.tolist()) + shared <= usable)

    def joined(self, seq: Sequence, claims: int) -> None:
        slot = seq.slot
        while len(self._age) <= slot:
            for column in (self._age, self._own, self._left):
                column.append(0)
            self._active.append(False)
        outlook = self._outlook(seq, claims)
        self._age[slot], self._own[slot], self._left[slot] = outlook
        self._sum_own += claims
        self._active[slot] = True
        self._num_active += 1
        if seq.lives == 1:
            self._lengths.entered(outlook[0])
        row = self._quoted if outlook == self._quoted_for else self._row(*outlook)
        mean, variance = self._rows[slot] = row
        self._mean = self._mean + mean
        self._variance = self._variance + variance

    def grew(self, seq: Sequence) -> None:
        slot, age = seq.slot, seq.num_output // self._page_size
        if age > self._age[slot]:
            self._enter(slot, age)
            self._own[slot] += self._growing
            self._sum_own += self._growing
            self._left[slot] -= 1

    def left(self, seq: Sequence, ended: bool) -> None:
        slot = seq.slot
        if ended:
            age = seq.num_output // self._page_size
            self._enter(slot, age)
            self._lengths.ended(age)
            self._mean_tokens += (len(seq.tokens) - self._mean_tokens) / MEMORY
        less = MORE_CAUTION * SOUGHT_LOSS / max(MIN_TURNOVER, self._num_active)
        self._caution = max(MIN_CAUTION, self._caution - less)
        self._num_active -= 1
        self._active[slot] = False
        self._sum_own -= self._own[slot]
        self._own[slot] = 0
        mean, variance = self._rows.pop(slot, None) or (self._means[slot], self._variances[slot])
        self._mean = self._mean - mean
        self._variance = np.maximum(self._variance - variance, 0.0)

    def _enter(self, slot: int, age: int) -> None:
        for reached in range(self._age[slot] + 1, age + 1):
            self._lengths.entered(reached)
        self._age[slot] = max(age, self._age[slot])

    @property
    def caution(self) -> float:
        return self._caution

    def preempted(self, seq: Sequence) -> None:
        lost = seq.scheduled / self._mean_tokens
        self._caution = min(MAX_CAUTION, self._caution + MORE_CAUTION * lost)

    def _outlook(self, seq: Sequence, claims: int) -> tuple[int, int, int]:
        """Age, own pages, and pages that the answer may still take."""
        page_size = self._page_size
        left = -(-(seq.limit - len(seq.tokens)) // page_size)
        return seq.num_output // page_size, claims, left

    def _renew(self) -> None:
        """The outlook of all running sequences, as of now."""
        self._lengths.refresh()
        self._quoted_for = None
        self._fresh_until = self._step + FRESH_STEPS
        age, own, left = (np.array(c, int) for c in (self._age, self._own, self._left))
        oldest = int(age.max(initial=0))
        self._survival = self._lengths.survival(oldest + FARTHEST + 2)
        grown = np.minimum(HORIZONS, left[:, None])
        chance = self._survival[age[:, None] + grown] / self._survival[age][:, None]
        chance *= (left[:, None] > EARLIER) * np.array(self._active, bool)[:, None]
        pages = own[:, None] + self._growing * grown
        self._means = chance * pages
        self._variances = self._means * (pages - self._means)
        self._mean, self._variance = self._means.sum(0), self._variances.sum(0)
        self._rows.clear()
        self._chances.clear()

    def _row(self, age: int, own: int, left: int) -> tuple[Vector, Vector]:
        """Mean and variance of one sequence's pages at each horizon."""
        left = min(left, FARTHEST)
        chance = self._chances.get((age, left))
        if chance is None:
            chance = self._chances[age, left] = self._chance(age, left)
        pages = self._grown[left] + float(own)
        mean = chance * pages
        return mean, mean * (pages - mean)

    def _chance(self, age: int, left: int) -> Vector:
        """That an answer of ``age`` pages lives on until each horizon."""
        now = self._survival.item(min(age, len(self._survival) - 1))
        reached = self._survival.take(GROWN[left] + age, mode="clip")
        chance: Vector = reached / now * MAY_LIVE[left]
        return chance
