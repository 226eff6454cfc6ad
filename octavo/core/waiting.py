"""The waiting queue: a heap over keys that never change while a request waits."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from octavo.core.request import Request
from octavo.core.sequence import GONE, Sequence

Policy = Callable[[Request, float], tuple[float, float]]
"""Sort key of a request that arrived at a time; lower runs first, and is preempted last."""


def by_priority(request: Request, now: float) -> tuple[float, float]:
    """Strict priority, then arrival."""
    return (request.priority, now)


class WaitingQueue:
    """Sequences by key. One that ended while it waited is dropped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, float, int], Sequence]] = []

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.key, seq))

    def head(self) -> Sequence | None:
        heap = self._heap
        while heap:
            seq = heap[0][1]
            if seq.slot != GONE:
                return seq
            heapq.heappop(heap)
        return None

    def pop(self) -> Sequence:
        """Take the head off; :meth:`head` must have returned one."""
        return heapq.heappop(self._heap)[1]

    def prune(self, num_live: int) -> None:
        """Drop ended entries once they outnumber the live ones: amortised O(1) an entry."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[1].slot != GONE]
            heapq.heapify(self._heap)
