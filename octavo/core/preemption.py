"""Preemption: who must give pages up, and whether they are kept on the host or computed again."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal

from octavo.core.pages import NULL_PAGE
from octavo.core.sequence import Sequence
from octavo.core.steptime import StepTimeFit

PreemptionMode = Literal["auto", "recompute", "swap"]
PATIENCE_STEPS = 4  # that sequences short of a page wait for another one to end
_by_key = attrgetter("key")


def newest(running: list[Sequence]) -> Sequence:
    """The one that comes last in the policy's order."""
    return max(running, key=_by_key)


class Preemption:
    """``auto`` swaps where moving the pages out and back takes less time than computing them again.

    ``page_seconds`` is the measured time of one copy of one page. What a token costs to compute
    comes from the running fit of step times; before that is known, nothing is swapped.
    """

    def __init__(
        self,
        mode: PreemptionMode = "recompute",
        page_seconds: float = 0.0,
        patience: int = PATIENCE_STEPS,
    ) -> None:
        self.patience = patience
        self._mode = mode
        self._page_seconds = page_seconds

    def swaps(self, seq: Sequence, step_time: StepTimeFit) -> bool:
        """Whether the pages of ``seq`` had better be parked on the host."""
        if self._mode == "recompute" or not seq.reads_cache:
            return False  # prompt log-probabilities under way would be lost with the slice
        if self._mode == "swap":
            return True
        num_pages = sum(page != NULL_PAGE for table in seq.tables for page in table)
        copies = 2 * num_pages * self._page_seconds
        return step_time.ready and copies < seq.scheduled * step_time.model.per_token
