"""Scheduling policies: in which order requests wait.

A policy is a queue, the key that a request gets when it arrives, and who is preempted first. Keys
of sequences never change, so heaps stay valid.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from octavo.core.preemption import newest
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

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who of these must give pages up."""

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

    def victim(self, running: list[Sequence]) -> Sequence:
        return newest(running)


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


_Rank = tuple[float, tuple[float, int]]


class _Tenant:
    """What a tenant was served, and what it still waits for."""

    __slots__ = ("num_live", "queue", "rank", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.num_live = 0
        self.queue = WaitingQueue()
        self.rank: _Rank | None = None  # that of its entry among those that wait

    def next_rank(self) -> _Rank | None:
        seq = self.queue.head()
        return None if seq is None else (self.served, seq.key)


class FairShare:
    """Equal shares of computed tokens for tenants; within one, priority and then arrival.

    Next is the tenant that was served least (virtual token counter, Sheng et al., OSDI 2024). One
    for which nothing waited is lifted to the least of those that wait, when it comes: neither a
    pause nor modesty saves anything up. Output tokens count ``OUTPUT_WEIGHT`` times: they cost a
    step each. Preempted is the tenant that was served most.

    Heaps have an entry for each tenant. Service only grows, so an entry that is out of date comes
    up early, and is renewed then: a call costs O(log tenants), amortised over charges.
    """

    ordered = False
    preempts = False
    OUTPUT_WEIGHT = 2.0

    def __init__(self, ageing: float = 60.0) -> None:
        self._ageing = ageing
        self._tenants: dict[str, _Tenant] = {}
        self._known: list[tuple[float, str, _Tenant]] = []  # all of them, by service
        self._waiting: list[tuple[_Rank, _Tenant]] = []  # keys differ: no tenants are compared

    def key(self, request: Request, now: float) -> float:
        return request.priority * self._ageing + now

    def arrived(self, request: Request) -> None:
        least = self._least_served()  # may forget the tenant
        tenant = self._tenants.get(request.tenant) or self._meet(request.tenant)
        if tenant.queue.head() is None:
            tenant.served = max(tenant.served, least)
        tenant.num_live += 1

    def left(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_live -= 1
        tenant.queue.prune(tenant.num_live)
        if not tenant.num_live:
            tenant.queue.clear()
            self._forget_absent()

    def charge(self, request: Request, inputs: int, outputs: int) -> None:
        self._tenants[request.tenant].served += inputs + self.OUTPUT_WEIGHT * outputs

    def victim(self, running: list[Sequence]) -> Sequence:
        """The newest of the tenant that was served most."""
        tenants = self._tenants
        return max(running, key=lambda seq: (tenants[seq.request.tenant].served, seq.key))

    def push(self, seq: Sequence) -> None:
        tenant = self._tenants[seq.request.tenant]
        tenant.queue.push(seq)
        if tenant.rank is None or seq.key < tenant.rank[1]:
            self._enter(tenant)

    def head(self) -> Sequence | None:
        heap = self._waiting
        while heap:
            rank, tenant = heap[0]
            if rank is tenant.rank:
                if rank == tenant.next_rank():
                    return tenant.queue.head()
                heapq.heappop(heap)
                self._enter(tenant)
            else:
                heapq.heappop(heap)  # another entry has taken its place
        return None

    def pop(self) -> Sequence:
        return self._waiting[0][1].queue.pop()

    def prune(self, num_live: int) -> None:
        """Amortised O(1) an entry. Queues are pruned when one of theirs leaves."""
        if len(self._waiting) > 2 * len(self._tenants) + 64:
            self._waiting = [entry for entry in self._waiting if entry[0] is entry[1].rank]
            heapq.heapify(self._waiting)

    def clear(self) -> None:
        for entries in (self._tenants, self._known, self._waiting):
            entries.clear()

    def _meet(self, name: str) -> _Tenant:
        tenant = self._tenants[name] = _Tenant()
        heapq.heappush(self._known, (0.0, name, tenant))
        return tenant

    def _enter(self, tenant: _Tenant) -> None:
        """The tenant's place among those that wait, if it does."""
        tenant.rank = tenant.next_rank()
        if tenant.rank is not None:
            heapq.heappush(self._waiting, (tenant.rank, tenant))

    def _least_served(self) -> float:
        """Of those that wait; if nobody does, of those present."""
        if self.head() is not None:
            return self._waiting[0][1].served
        self._forget_absent()
        return self._known[0][2].served if self._known else 0.0

    def _forget_absent(self) -> None:
        """Drop absent tenants that have no debt (they would return at the same place), until
        the least served one is present."""
        heap = self._known
        while heap:
            served, name, tenant = heap[0]
            if served < tenant.served:
                heapq.heapreplace(heap, (tenant.served, name, tenant))
            elif tenant.num_live:
                break
            else:
                heapq.heappop(heap)
                del self._tenants[name]
