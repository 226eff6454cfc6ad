"""Scheduling policies: in which order requests wait.

A policy is a queue and the key that a request gets when it arrives. Keys never change, so heaps
stay valid; the running sequence with the highest key is preempted first.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from octavo.core.request import Request
from octavo.core.sequence import GONE, Sequence


class Policy(Protocol):
    """The waiting requests, and who is next."""

    ordered: bool
    """Whether keys alone say who is next. Then the lowest one of all advances in every step."""
    preempts: bool
    """Whether a waiting request may take the place of a running one with a higher key."""

    def key(self, request: Request, now: float) -> float:
        """Order of a request that arrives ``now``: lower runs first."""

    def arrived(self, request: Request) -> None:
        """A request was submitted."""

    def left(self, request: Request) -> None:
        """A request has ended."""

    def charge(self, request: Request, inputs: int, outputs: int) -> None:
        """So many tokens were computed for this request, for the first time."""

    def push(self, seq: Sequence) -> None: ...

    def head(self) -> Sequence | None:
        """Who is next, if anybody waits."""

    def pop(self) -> Sequence:
        """Take the head off; :meth:`head` must have returned one."""

    def prune(self, num_live: int) -> None:
        """Forget entries of ended requests, if they outnumber the live ones."""

    def clear(self) -> None:
        """Forget all that wait."""


class WaitingQueue:
    """Sequences by key. One that ended while it waited is dropped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []

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
        return heapq.heappop(self._heap)[1]

    def prune(self, num_live: int) -> None:
        """Amortised O(1) an entry."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[1].slot != GONE]
            heapq.heapify(self._heap)

    def clear(self) -> None:
        self._heap = []


class Fcfs(WaitingQueue):
    """First come, first served. Priorities are not looked at."""

    ordered = True
    preempts = False

    def key(self, request: Request, now: float) -> float:
        return now

    def arrived(self, request: Request) -> None: ...

    def left(self, request: Request) -> None: ...

    def charge(self, request: Request, inputs: int, outputs: int) -> None: ...


class AgedPriority(Fcfs):
    """Lower priority numbers first; each level is worth ``ageing`` seconds of waiting.

    So nobody starves: a request of priority p comes before all of priority q < p that arrive
    ``(p - q) * ageing`` seconds after it.
    """

    preempts = True

    def __init__(self, ageing: float = 60.0) -> None:
        super().__init__()
        self._ageing = ageing

    def key(self, request: Request, now: float) -> float:
        return request.priority * self._ageing + now


class _Tenant:
    """What a tenant was served, and what it still waits for."""

    __slots__ = ("num_live", "queue", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.num_live = 0
        self.queue = WaitingQueue()


class FairShare:
    """Equal shares of computed tokens for tenants; within one, priority and then arrival.

    Next is the tenant that was served least (virtual token counter, Sheng et al., OSDI 2024). One
    that returns after a pause is lifted to the least of those present: a pause saves nothing up.
    Output tokens count ``OUTPUT_WEIGHT`` times: they cost a step each.
    """

    ordered = False
    preempts = False
    OUTPUT_WEIGHT = 2.0

    def __init__(self, ageing: float = 60.0) -> None:
        self._ageing = ageing
        self._tenants: dict[str, _Tenant] = {}
        self._next: _Tenant | None = None  # whose head was looked at last

    def key(self, request: Request, now: float) -> float:
        return request.priority * self._ageing + now

    def arrived(self, request: Request) -> None:
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        if not tenant.num_live:
            present = [t.served for t in self._tenants.values() if t.num_live]
            tenant.served = max(tenant.served, min(present, default=0.0))
        tenant.num_live += 1

    def left(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_live -= 1
        if not tenant.num_live:
            self._forget_absent()

    def charge(self, request: Request, inputs: int, outputs: int) -> None:
        self._tenants[request.tenant].served += inputs + self.OUTPUT_WEIGHT * outputs

    def push(self, seq: Sequence) -> None:
        self._tenants[seq.request.tenant].queue.push(seq)

    def head(self) -> Sequence | None:
        heads = [(t.served, seq.key, t, seq) for t, seq in self._waiting()]
        if not heads:
            return None
        _, _, self._next, seq = min(heads, key=lambda head: head[:2])
        return seq

    def pop(self) -> Sequence:
        assert self._next is not None
        return self._next.queue.pop()

    def prune(self, num_live: int) -> None:
        for tenant in self._tenants.values():
            tenant.queue.prune(tenant.num_live)

    def clear(self) -> None:
        self._tenants = {}

    def _waiting(self) -> list[tuple[_Tenant, Sequence]]:
        found = ((tenant, tenant.queue.head()) for tenant in self._tenants.values())
        return [(tenant, seq) for tenant, seq in found if seq is not None]

    def _forget_absent(self) -> None:
        """Drop absent tenants that have no debt: they would return at the same place."""
        present = [t.served for t in self._tenants.values() if t.num_live]
        least = min(present, default=0.0)
        for name, tenant in list(self._tenants.items()):
            if not tenant.num_live and (not present or tenant.served <= least):
                del self._tenants[name]
