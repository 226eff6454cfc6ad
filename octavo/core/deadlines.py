"""Deadlines: who has run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from octavo.core.sequence import Sequence

Limit = Literal["request_timeout", "queue_timeout"]


class Deadlines:
    """A heap over the moments at which requests must have ended, or must have been admitted.

    Asking costs O(1) while nobody is late. Entries of requests that ended in time are
    dropped when they come up, or when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Limit, str]] = []

    def add(self, seq: Sequence, now: float) -> None:
        request, number = seq.request, seq.key[1]
        if request.timeout is not None:
            heapq.heappush(self._heap, (now + request.timeout, number, "request_timeout", seq.id))
        if request.queue_timeout is not None:
            late = now + request.queue_timeout
            heapq.heappush(self._heap, (late, number, "queue_timeout", seq.id))

    def late(self, now: float, live: dict[str, Sequence]) -> Iterator[tuple[Sequence, Limit]]:
        """Those whose time is over; each is told once a limit."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            _, number, limit, request_id = heapq.heappop(heap)
            seq = live.get(request_id)
            if seq is None or seq.key[1] != number:
                continue
            if limit == "request_timeout" or (seq.slot < 0 and seq.lives == 1):
                yield seq, limit

    def prune(self, live: dict[str, Sequence]) -> None:
        if len(self._heap) > 4 * len(live) + 64:
            self._heap = [entry for entry in self._heap if entry[3] in live]
            heapq.heapify(self._heap)
