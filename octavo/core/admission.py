"""Admission: may a newcomer start, given how much the running sequences will still grow?"""

from __future__ import annotations

from collections.abc import Iterable

FIRST_GUESS_TOKENS = 128  # output length expected before anything has ended
MEMORY = 32  # ended requests over which the mean output length is taken
MAX_CAUTION = 8.0


class GrowthEstimate:
    """Pages to keep free for growth, so that admission does not end in preemption.

    Each sequence is expected to grow by half the mean output length (on average it is half-way),
    but by no more than it may. A preemption shows that this was too little and doubles the
    reserve, up to ``MAX_CAUTION`` times; each running request that ends, in whatever way, takes a
    quarter of the excess back.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._mean_output = float(FIRST_GUESS_TOKENS)
        self._caution = 1.0

    def pages(self, remaining: Iterable[int]) -> int:
        """Reserve for sequences that may each grow by that many tokens."""
        page_size = self._page_size
        expected = int(self._mean_output / 2 * self._caution) + 1
        return sum([-(-min(tokens, expected) // page_size) for tokens in remaining])

    def ended(self, num_output: int) -> None:
        """A request came to its own end after ``num_output`` tokens."""
        self._mean_output += (num_output - self._mean_output) / MEMORY

    def relax(self) -> None:
        """A running request is gone."""
        self._caution -= (self._caution - 1.0) / 4

    def preempted(self) -> None:
        self._caution = min(MAX_CAUTION, self._caution * 2)
