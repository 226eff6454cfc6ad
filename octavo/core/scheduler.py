"""The scheduler: which tokens of which requests the next step computes, and in which pages.

Three calls drive it: ``plan`` hands out tokens and pages, someone executes the plan, and ``apply``
takes in the result. Several plans may be under way between the two. There is no clock, no
thread and no I/O here; the caller passes the time in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from operator import attrgetter

from octavo.core.admission import GrowthEstimate
from octavo.core.errors import AuditError, InvalidRequest
from octavo.core.flight import Flight
from octavo.core.pages import NULL_PAGE, PagePool
from octavo.core.plan import AbortReason, Delta, FinishReason, StepPlan, StepResult
from octavo.core.prefix import group_key, longest_hit
from octavo.core.request import Request
from octavo.core.sequence import GONE, Sequence
from octavo.core.waiting import Policy, WaitingQueue, by_priority

_by_key = attrgetter("key")


@dataclass(slots=True)
class SchedulerStats:
    """Gauges of this moment, and counters that only ever grow."""

    waiting: int = 0
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_referenced: int = 0
    prefix_query_tokens: int = 0  # tokens of admitted requests that asked the prefix cache
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted requests, each counted once
    generation_tokens: int = 0  # accepted
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason


class Scheduler:
    """Continuous batching over one page pool.

    ``max_num_batched_tokens`` bounds the tokens of a step, ``max_num_seqs`` the sequences that run.
    The first must be at least the second: each running sequence can always get its next token.
    ``policy`` gives the key by which requests wait and, from the other end, are preempted.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        policy: Policy = by_priority,
        admission: GrowthEstimate | None = None,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}), and that at least 1"
            )
        layout = pool.layout
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_len = max_model_len
        if layout.num_paged:
            self.max_len = min(max_model_len, pool.largest_sequence)
        self.prefix_caching = prefix_caching and layout.num_paged == len(layout.blocks)
        self._windows = [(g, b.window) for g, b in enumerate(layout.blocks) if b.window]
        self._policy = policy
        self._admission = admission or GrowthEstimate(layout.page_size)
        self._step = 0
        self._num_submitted = 0
        self._stats = SchedulerStats(pages_total=pool.num_usable)
        self._clear()

    def _clear(self) -> None:
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._waiting = WaitingQueue()
        self._blocked: Sequence | None = None  # head that will not fit before pages come back
        self._flights: deque[Flight] = deque()
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._leaves: list[int] = []  # slots given up that no plan has told yet

    # ---- requests come and go

    def submit(self, request: Request, now: float) -> Delta | None:
        """Take a request. Returns its terminal delta if there is nothing left to compute
        (no room for a single new token, or a resumed request that was complete), else None.

        Raises :class:`InvalidRequest` if a request of that id is still here.
        """
        if request.id in self._live:
            raise InvalidRequest(f"a request with id {request.id!r} is already running.")
        key = (*self._policy(request, now), self._num_submitted)
        self._num_submitted += 1
        limit = min(len(request.prompt) + request.max_tokens, self.max_len)
        seq = Sequence(request, key, limit)
        self._live[seq.id] = seq
        last = request.generated[-1] if request.generated else None
        if last in seq.stop_ids:
            return self._end(seq, "stop", stop_id=last)
        if len(seq.tokens) >= limit:
            return self._end(seq, "length")
        parent = self._live.get(request.parent) if request.parent else None
        if parent is not None and self._waits_for(parent, seq):
            parent.children.append(seq)
        else:
            self._waiting.push(seq)
        return None

    def abort(self, request_id: str, now: float, *, reason: AbortReason = "abort") -> Delta | None:
        """End a request; its terminal delta, or None if there is no such request (any more).

        "stop" says that it came to its own end, by a stop string that only its front can see.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return None
        delta = self._end(seq, reason)
        self._sweep()
        self._waiting.prune(len(self._live) - len(self._running))
        return delta

    def forget_all(self) -> None:
        """Start afresh, whatever state a call or a step that did not come to its end has left.

        No request, slot or page is in use afterwards and nothing is cached; the workers must
        forget their slots too. Who waits for a request must be told by the caller.
        """
        counts = self._stats.finished
        counts["error"] = counts.get("error", 0) + len(self._live)
        layout = self.pool.layout
        self.pool = PagePool(self.pool.num_pages, layout.page_size, layout.blocks)
        self._clear()

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._live)

    # ---- the step

    def plan(self, now: float) -> StepPlan:
        """The next step. An empty plan (nothing can be computed before a result is applied, or at
        all) carries nothing and need not be executed."""
        flight = Flight(self._step, len(self.pool.layout.blocks))
        self._step += 1
        preemptions = self._stats.preemptions
        others = flight.add_decodes(self._running)
        if others:
            self._extend(flight, others)
        if self._stats.preemptions == preemptions:  # else there is no room for newcomers
            self._admit(flight)
        plan = flight.plan
        if plan.slots:
            plan.leaves, self._leaves = self._leaves, []
            self._flights.append(flight)
        return plan

    def apply(self, result: StepResult, now: float) -> list[Delta]:
        """Take in the result of the oldest plan under way: one delta for each request with news.

        Raises RuntimeError if the result is not that plan's.
        """
        flight = self._claim(result)
        if flight is None:
            return []
        rows = flight.sampled(result)
        deltas = self._apply_faults(flight, result) if result.faults else []
        for seq, end in flight.unsampled():
            if seq.slot >= 0:
                self._set_room(seq)
                self._settle(seq, end)
        accepted = 0
        for seq, token in zip(rows, result.ids, strict=True):
            if seq.slot < 0:  # ended or preempted meanwhile
                continue
            tokens = seq.tokens
            tokens.append(token)
            accepted += 1
            if len(tokens) > seq.due or token in seq.stop_ids:
                deltas.append(self._look(seq, token))
            else:
                deltas.append(Delta(seq.id, [token], None, None, None, None, None, [], []))
        self._stats.generation_tokens += accepted
        if result.logprobs or result.prompt_logprobs:
            self._add_logprobs(flight, result, deltas)
        self._sweep()
        return deltas

    def stats(self) -> SchedulerStats:
        pool, running = self.pool, len(self._running)
        return replace(
            self._stats,
            waiting=len(self._live) - running,
            running=running,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_referenced=pool.num_referenced,
            finished=dict(self._stats.finished),
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached page. What runs goes on, but publishes nothing computed so far."""
        self.pool.reset_cache()
        for seq in self._running:
            seq.published = None
            self._release_children(seq)

    def audit(self) -> None:
        """Recount pages and slots. Raises :class:`AuditError`."""
        self.pool.audit(table for seq in self._running for table in seq.tables)
        slots = sorted([*self._free_slots, *(seq.slot for seq in self._running)])
        if slots != list(range(self.max_num_seqs)):
            raise AuditError(f"slots free and in use are {slots}, not 0 to {self.max_num_seqs - 1}")
        if any(self._live.get(seq.id) is not seq for seq in self._running):
            raise AuditError("a running sequence is not, or no longer, that of a live request")
        for seq in self._running:
            for group, window in self._windows:
                seen = max(0, seq.scheduled + 1 - window) // self.pool.layout.page_size
                if NULL_PAGE in seq.tables[group][seen:]:
                    raise AuditError(f"a page that {seq.id!r} still sees was dropped")

    # ---- planning

    def _extend(self, flight: Flight, others: list[Sequence]) -> None:
        """Rows for what is not a plain decode: first those that need a page for their next
        token (prompts do not starve them), then those with more than one token to catch up."""
        others.sort(key=_by_key)
        catching_up = []
        for seq in others:
            if seq.slot < 0 or seq.total >= seq.limit or not seq.room:
                continue  # preempted just now; complete, or a slice is under way: results first
            if seq.scheduled + 1 < seq.total:
                catching_up.append(seq)
            elif (pages := self._grow(seq)) is not None:
                flight.add(seq, 1, pages)
        flight.drop_gone()
        budget = self.max_num_batched_tokens - len(flight.seqs)
        for seq in catching_up:
            if budget and seq.slot >= 0:
                count = min(budget, seq.total - seq.scheduled)
                flight.add(seq, count, [[] for _ in seq.tables])
                budget -= count

    def _grow(self, seq: Sequence) -> list[list[int]] | None:
        """One more page in each paged group, preempting from the end of the order until there is
        room; None if that was ``seq`` itself. Alone, a sequence always fits: see ``max_len``."""
        blocks = self.pool.layout.blocks
        num_paged = self.pool.layout.num_paged
        while (grant := self.pool.reserve((), num_paged)) is None:
            victim = max(self._running, key=_by_key)
            self._preempt(victim)
            if victim is seq:
                return None
        fresh = iter(grant.fresh)
        pages = [[next(fresh)] if block.kind == "paged" else [] for block in blocks]
        for table, new in zip(seq.tables, pages, strict=True):
            table.extend(new)
        self._set_room(seq)
        return pages

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and pages; the request waits again, ahead of those that came after it."""
        heir = seq.successor()
        self._live[seq.id] = heir
        self._vacate(seq)
        self._sweep()
        self._waiting.push(heir)
        self._admission.preempted()
        self._stats.preemptions += 1

    def _admit(self, flight: Flight) -> None:
        """Let waiting requests join, in order, while tokens, slots and pages last."""
        budget = self.max_num_batched_tokens - sum(flight.plan.counts)
        growth: int | None = None
        while budget > 0 and self._free_slots:
            seq = self._waiting.head()
            if seq is None or seq is self._blocked:
                return
            if growth is None:
                growth = self._expected_growth(self._running)
            growth += self._expected_growth([seq])
            if not self._join(seq, growth if self._running else 0):
                self._blocked = seq
                return
            self._waiting.pop()
            self._release_served_children(seq)
            flight.plan.joins.append(seq.join())
            count = min(budget, seq.total - seq.scheduled)
            flight.add(seq, count, seq.tables)
            budget -= count

    def _expected_growth(self, seqs: list[Sequence]) -> int:
        """Pages, over all groups, to keep free for the growth of ``seqs``."""
        remaining = [seq.limit - seq.total for seq in seqs]
        return self._admission.pages(remaining) * self.pool.layout.num_paged

    def _join(self, seq: Sequence, growth: int) -> bool:
        """Pages for all known tokens and a slot, or nothing. Cached pages count as computed."""
        layout, pool = self.pool.layout, self.pool
        known = len(seq.tokens)
        asks = self.prefix_caching and seq.reads_cache
        shareable = (known - 1) // layout.page_size if asks else 0
        hashes = seq.extend_hashes(shareable, layout.page_size)
        hits = longest_hit(pool, hashes[:shareable])
        needs = [n - len(hit) for n, hit in zip(layout.group_pages(known), hits, strict=True)]
        cached = [page for hit in hits for page in hit if page != NULL_PAGE]
        grant = pool.reserve(cached, sum(needs), spare=growth)
        if grant is None:
            return False
        fresh = iter(grant.fresh)
        seq.tables = [
            hit + [next(fresh) for _ in range(need)] for hit, need in zip(hits, needs, strict=True)
        ]
        num_hit = max(map(len, hits))
        seq.scheduled = num_hit * layout.page_size
        seq.published = num_hit if self.prefix_caching else None
        seq.slot = self._free_slots.pop()
        self._set_room(seq)
        self._running.append(seq)
        if seq.lives == 1:
            self._count_first_join(seq, asks)
        return True

    def _count_first_join(self, seq: Sequence, asks: bool) -> None:
        stats, page_size = self._stats, self.pool.layout.page_size
        stats.prompt_tokens += seq.prompt_len
        if asks:
            stats.prefix_query_tokens += len(seq.tokens)
            stats.prefix_hit_tokens += seq.scheduled
        seq.cached_tokens = min(seq.scheduled, seq.shareable_pages(page_size) * page_size)

    def _set_room(self, seq: Sequence) -> None:
        """Let the sequence go on to the end of its pages, or to its last token but one."""
        room = seq.limit - 1
        for table, block in zip(seq.tables, self.pool.layout.blocks, strict=True):
            if block.kind == "paged":
                room = min(room, len(table) * self.pool.layout.page_size)
        seq.room = room

    # ---- applying

    def _claim(self, result: StepResult) -> Flight | None:
        """The flight that ``result`` belongs to; None if there is nothing to take in."""
        if self._flights and self._flights[0].plan.step == result.step:
            return self._flights.popleft()
        if not (result.slots or result.faults):
            return None
        raise RuntimeError(f"got the result of step {result.step}, which is not the oldest one")

    def _apply_faults(self, flight: Flight, result: StepResult) -> list[Delta]:
        by_slot = {seq.slot: seq for seq in flight.seqs if seq.slot >= 0}
        return [
            self._fail(by_slot[fault.slot], fault.code, fault.message)
            for fault in result.faults
            if fault.slot in by_slot
        ]

    def _look(self, seq: Sequence, token: int) -> Delta:
        """News of a request that may be complete, may have filled a page, or starts to speak."""
        num_tokens = len(seq.tokens)
        self._settle(seq, num_tokens - 1)
        if token in seq.stop_ids:
            return self._end(seq, "stop", [token], stop_id=token)
        if num_tokens >= seq.limit:
            return self._end(seq, "length", [token])
        page_size = self.pool.layout.page_size
        seq.due = min(seq.limit - 1, -(-num_tokens // page_size) * page_size)
        return seq.delta([token])

    def _settle(self, seq: Sequence, computed: int) -> None:
        """Publish the pages that ``computed`` accepted tokens fill; drop those no window shows."""
        pool = self.pool
        page_size = pool.layout.page_size
        full = computed // page_size
        if seq.published is not None and full > seq.published:
            first, seq.published = seq.published, full
            hashes = seq.extend_hashes(full, page_size)
            for group, table in enumerate(seq.tables):
                for index in range(first, full):
                    pool.publish(table[index], group_key(hashes[index], group))
            if first < seq.shareable_pages(page_size) <= full:
                self._blocked = None  # it may hit these pages
            self._release_served_children(seq)
        for group, window in self._windows:
            table = seq.tables[group]
            index = (computed + 1 - window) // page_size - 1
            while index >= 0 and table[index] != NULL_PAGE:
                pool.release([table[index]])
                self._blocked = None
                table[index] = NULL_PAGE
                index -= 1

    def _add_logprobs(self, flight: Flight, result: StepResult, deltas: list[Delta]) -> None:
        by_id = {delta.id: delta for delta in deltas}
        by_slot = dict(zip(flight.plan.slots, flight.seqs, strict=True))
        for slot, logprobs in result.logprobs.items():
            delta = by_id.get(by_slot[slot].id)
            if delta is not None:
                delta.logprobs = logprobs
        for part in result.prompt_logprobs:
            seq = by_slot[part.slot]
            entries = part.entries[max(0, seq.next_prompt_logprob - part.start) :]
            if not entries or (seq.slot < 0 and seq.id not in by_id):
                continue
            if seq.id not in by_id:
                by_id[seq.id] = seq.delta([])
                deltas.append(by_id[seq.id])
            by_id[seq.id].prompt_logprobs.extend(entries)
            seq.next_prompt_logprob += len(entries)

    # ---- ends

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        ids: list[int] | None = None,
        stop_id: int | None = None,
    ) -> Delta:
        """The terminal delta; slot and pages are free again, siblings need not wait."""
        if seq.slot >= 0:
            self._vacate(seq)
            self._admission.relax()
        seq.slot = GONE
        del self._live[seq.id]
        self._release_children(seq)
        if finish in ("stop", "length"):
            self._admission.ended(seq.num_output)
        counts = self._stats.finished
        counts[finish] = counts.get(finish, 0) + 1
        return seq.delta(ids or [], finish, stop_id)

    def _fail(self, seq: Sequence, code: str, message: str) -> Delta:
        delta = self._end(seq, "error")
        delta.error_code, delta.error = code, message
        return delta

    def _vacate(self, seq: Sequence) -> None:
        """Give slot and pages back. Later plans may use them at once: plans run in order."""
        for table in seq.tables:
            self.pool.release(table)
        self._free_slots.append(seq.slot)
        self._leaves.append(seq.slot)
        seq.slot = GONE
        self._blocked = None

    def _sweep(self) -> None:
        """Drop from the running ones those that have given up their slot."""
        if len(self._running) + len(self._free_slots) != self.max_num_seqs:
            self._running = [seq for seq in self._running if seq.slot >= 0]

    def _release_served_children(self, seq: Sequence) -> None:
        """Let siblings go once every page of the prompt that they could hit can be found."""
        if seq.children and not self._lacks_pages(seq):
            self._release_children(seq)

    def _release_children(self, seq: Sequence) -> None:
        for child in seq.children:
            if child.slot != GONE:
                self._waiting.push(child)
        seq.children = []

    def _waits_for(self, parent: Sequence, seq: Sequence) -> bool:
        """Whether a sibling had better wait until the parent has published the prompt's pages."""
        return self.prefix_caching and seq.reads_cache and self._lacks_pages(parent)

    def _lacks_pages(self, parent: Sequence) -> bool:
        """Whether it has yet to publish pages that a sibling could hit."""
        if parent.published is None:
            return False
        return parent.published < parent.shareable_pages(self.pool.layout.page_size)
