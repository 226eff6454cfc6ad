"""Admission: may a newcomer start, given how much the running sequences will still grow?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PoolState:
    """Pages at the moment of a decision."""

    usable: int
    held: int  # referenced, or promised to known tokens of running sequences


class Admission(Protocol):
    """Decides who joins. It hears of everything that changes what running sequences hold.

    A sequence has its slot in every call but :meth:`admits`.
    """

    def begin_step(self) -> None:
        """A step is being planned."""

    def admits(self, seq: Sequence, claims: int, pool: PoolState) -> bool:
        """Whether ``seq`` may join: its known tokens add ``claims`` pages to ``pool.held``."""

    def joined(self, seq: Sequence, claims: int) -> None:
        """It has."""

    def grew(self, seq: Sequence) -> None:
        """A running sequence has filled another page."""

    def left(self, seq: Sequence, ended: bool) -> None:
        """It gives its pages back; ``ended``: because its request is over, for whatever
        reason: what counts is when pages come back."""

    def preempted(self, seq: Sequence) -> None:
        """A sequence is about to lose its pages to another one that runs."""

    def reset(self) -> None:
        """Nothing runs any more, whatever was told before. What was learnt is kept."""


class AdmitWhatFits:
    """Keeps ``watermark`` of the pool free, and looks no further: what Octavo is compared with."""

    def __init__(self, watermark: float = 0.01, limit: int | None = None) -> None:
        self._watermark = watermark
        self._limit = limit
        self._num_running = 0

    def begin_step(self) -> None: ...

    def admits(self, seq: Sequence, claims: int, pool: PoolState) -> bool:
        if self._limit is not None and self._num_running >= self._limit:
            return False
        return pool.held + claims <= pool.usable * (1 - self._watermark)

    def joined(self, seq: Sequence, claims: int) -> None:
        self._num_running += 1

    def grew(self, seq: Sequence) -> None: ...

    def left(self, seq: Sequence, ended: bool) -> None:
        self._num_running -= 1

    def preempted(self, seq: Sequence) -> None: ...

    def reset(self) -> None:
        self._num_running = 0
