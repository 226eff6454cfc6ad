"""The scheduler: which tokens of which requests the next step computes, and in which pages.

Three calls drive it: ``plan`` hands out tokens and pages, someone executes the plan, and ``apply``
takes in the result. Several plans may be under way between the two. There is no clock, no
thread and no I/O here; the caller passes the time in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from operator import attrgetter

from octavo.core.admission import Admission, PoolState
from octavo.core.deadlines import Deadlines, Limit
from octavo.core.errors import AuditError, InvalidRequest
from octavo.core.flight import Flight
from octavo.core.forecast import Forecast
from octavo.core.histogram import LATENCY_BOUNDS, Histogram
from octavo.core.kvcache import KVCache, Quote
from octavo.core.news import add_logprobs
from octavo.core.pacing import PrefillPace, Prompt
from octavo.core.pages import PagePool
from octavo.core.plan import AbortReason, Delta, FinishReason, StepOutput, StepPlan, StepResult
from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.sequence import GONE, NOT_SHORT, Sequence
from octavo.core.stats import SchedulerStats
from octavo.core.waiting import Fcfs, Policy

RETRY_STEPS = 8  # a head of the queue that was refused is looked at again after so many steps
PRESSURE_STEPS = 64  # after a refusal, the pool counts as full
SPENT_LIVES = 10  # from this one on a request comes before all others, whatever its priority
_by_key = attrgetter("key")


def _may_go(seq: Sequence) -> bool:
    """Whether it would wait at its own place in the order if it were preempted."""
    return seq.lives + 1 < SPENT_LIVES


class Scheduler:
    """Continuous batching over one page pool.

    ``max_num_batched_tokens`` bounds the tokens of a step, ``max_num_seqs`` the sequences that run.
    The first must be at least the second: each running sequence can always get its next token.
    ``policy`` says in which order requests wait, ``admission`` whether the next one may join,
    ``preemption`` who must go when pages are short, and what becomes of its pages, and ``pace``
    how much of a step prompts may take; ``long_prefill_token_threshold``, if not 0, how
    much of one prompt. ``choose`` names the victim among the running ones, if not ``policy``.
    """

    def __init__(
        self,
        *,
        pool: PagePool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        prefix_caching: bool = True,
        policy: Policy | None = None,
        admission: Admission | None = None,
        preemption: Preemption | None = None,
        choose: Callable[[list[Sequence]], Sequence] | None = None,
        pace: PrefillPace | None = None,
        long_prefill_token_threshold: int = 0,
        host_pages: int = 0,
    ) -> None:
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({max_num_seqs}), and that at least 1"
            )
        self.cache = KVCache(pool, prefix_caching=prefix_caching, host_pages=host_pages)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_len = max_model_len
        if pool.layout.num_paged:
            largest = pool.layout.largest_sequence(pool.num_usable, max_num_batched_tokens)
            self.max_len = min(max_model_len, largest)
        self.pace = pace or PrefillPace()
        self._longest_slice = long_prefill_token_threshold or max_num_batched_tokens
        self._policy = policy or Fcfs()
        self._admission = admission or Forecast(
            self.cache.page_size, self.max_len, growing=pool.layout.num_growing
        )
        self._preemption = preemption or Preemption()
        self._choose = choose or self._policy.victim
        self._step = 0
        self._num_submitted = 0
        self._queue_times = Histogram(LATENCY_BOUNDS)
        self._stats = SchedulerStats(pages_total=pool.num_usable, host_pages_total=host_pages)
        self._clear()

    def _clear(self) -> None:
        self._live: dict[str, Sequence] = {}
        self._running: list[Sequence] = []
        self._deadlines = Deadlines()
        self._blocked: Sequence | None = None  # head that was refused …
        self._retry = 0  # … and is not looked at before this step, unless pages come back
        self._pressed_until = 0
        self._is_short = False  # somebody lacks a page in the step that is being planned
        self._ends: tuple[Sequence, Sequence] | None = None  # see _ends_of_order
        self._flights: deque[Flight] = deque()
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._leaves: list[int] = []  # slots given up that no plan has told yet
        self._applied = 0.0  # when

    @property
    def pool(self) -> PagePool:
        return self.cache.pool

    @property
    def prefix_caching(self) -> bool:
        return self.cache.prefix_caching

    # ---- requests come and go

    def submit(self, request: Request, now: float) -> Delta | None:
        """Take a request. Returns its terminal delta if there is nothing left to compute
        (no room for a single new token, or a resumed request that was complete), else None.

        Raises :class:`InvalidRequest` if a request of that id is still here.
        """
        if request.id in self._live:
            raise InvalidRequest(f"a request with id {request.id!r} is already running.")
        key = (self._policy.key(request, now), self._num_submitted)
        self._num_submitted += 1
        limit = min(len(request.prompt) + request.max_tokens, self.max_len)
        seq = Sequence(request, key, limit, now)
        self._live[seq.id] = seq
        self._policy.arrived(request)
        last = request.generated[-1] if request.generated else None
        if last in seq.stop_ids:
            return self._end(seq, "stop", stop_id=last)
        if len(seq.tokens) >= limit:
            return self._end(seq, "length")
        self._deadlines.add(seq, now)
        parent = self._live.get(request.parent) if request.parent else None
        if parent is not None and self._waits_for(parent, seq):
            parent.children.append(seq)
        else:
            self._policy.push(seq)
        return None

    def abort(self, request_id: str, now: float, *, reason: AbortReason = "abort") -> Delta | None:
        """End a request; its terminal delta, or None if there is no such request (any more).

        "stop" says that it came to its own end, by a stop string that only its front can see.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return None
        delta = self._end(seq, reason)
        self._tidy()
        return delta

    def expire(self, now: float) -> list[Delta]:
        """End the requests whose time is over. O(1) while there are none."""
        deltas = [
            self._time_out(seq, limit) for seq, limit in self._deadlines.late(now, self._live)
        ]
        if deltas:
            self._tidy()
        return deltas

    def forget_all(self) -> None:
        """Start afresh, whatever state a call or a step that did not come to its end has left.

        No request, slot or page is in use afterwards and nothing is cached; the workers must
        forget their slots too. Who waits for a request must be told by the caller.
        """
        counts = self._stats.finished
        counts["error"] = counts.get("error", 0) + len(self._live)
        self._admission.reset()
        self.cache.reset()
        self._policy.clear()
        self._clear()

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self._live)

    # ---- the step

    def plan(self, now: float) -> StepPlan:
        """The next step. An empty plan (nothing can be computed before a result is applied, or at
        all) carries nothing and need not be executed."""
        flight = Flight(self._step, now, len(self.pool.layout.blocks))
        self._step += 1
        self._admission.begin_step()
        self._is_short, self._ends = False, None
        others = flight.add_decodes(self._running)
        catching_up = self._extend(flight, others) if others else []
        budget = self._prefill_budget(flight, catching_up, now)
        is_full = self._is_short or not budget
        if self._head_precedes(self._running if is_full else catching_up):
            budget -= self._admit_head(flight, max(1, budget))  # without budget: in another's place
        if catching_up:
            budget = self._catch_up(flight, catching_up, budget)
        if not self._is_short:
            self._admit(flight, budget)
        plan = flight.plan
        if plan.slots:
            plan.leaves, self._leaves = self._leaves, []
            self.cache.take_swaps(plan)
            self._flights.append(flight)
        else:
            self._step -= 1  # nothing will be executed under that number
        return plan

    def apply(self, result: StepResult, now: float) -> StepOutput:
        """Take in the result of the oldest plan under way; the news of each request that has any.

        Raises RuntimeError if the result is not that plan's.
        """
        flight = self._claim(result)
        if flight is None:
            return StepOutput()
        rows = flight.sampled(result)
        deltas = self._apply_faults(flight, result) if result.faults else []
        for seq, end in flight.unsampled():
            if seq.slot >= 0:
                self.cache.set_room(seq)
                self._settle(seq, end)
        ids: list[str] = []
        tokens: list[int] = []
        for seq, token in zip(rows, result.ids, strict=True):
            if seq.slot < 0:  # ended or preempted meanwhile
                continue
            news = seq.news
            news.append(token)
            if len(news) >= seq.due or token in seq.stop_ids:
                delta = self._look(seq, token)
                if delta is not None:
                    deltas.append(delta)
                    continue
            ids.append(seq.id)
            tokens.append(token)
        self._stats.generation_tokens += len(ids) + sum([len(delta.ids) for delta in deltas])
        output = StepOutput(ids, tokens, deltas)
        if result.logprobs or result.prompt_logprobs:
            add_logprobs(flight, result, output)
        self._observe(flight, now)
        self._sweep()
        self._deadlines.prune(self._live)
        return output

    def stats(self) -> SchedulerStats:
        pool, host, running = self.pool, self.cache.host, len(self._running)
        return replace(
            self._stats,
            waiting=len(self._live) - running,
            swapped=sum(bool(seq.parked) for seq in self._live.values()) if host.num_pages else 0,
            running=running,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_referenced=pool.num_referenced,
            host_pages_free=host.num_free,
            preemption_reasons=dict(self._stats.preemption_reasons),
            finished=dict(self._stats.finished),
            timeouts=dict(self._stats.timeouts),
            queue_times=list(self._queue_times.counts),
            queue_time_sum=self._queue_times.sum,
        )

    def reset_prefix_cache(self) -> None:
        """Forget every cached page. What runs goes on, but publishes nothing computed so far."""
        self.pool.reset_cache()
        for seq in self._live.values():
            if seq.slot >= 0 or seq.parked:
                seq.published = None
                self._release_children(seq)

    def audit(self) -> None:
        """Recount pages and slots. Raises :class:`AuditError`."""
        waiting = (seq for seq in self._live.values() if seq.slot < 0)
        self.cache.audit(self._running, waiting)
        slots = sorted([*self._free_slots, *(seq.slot for seq in self._running)])
        if slots != list(range(self.max_num_seqs)):
            raise AuditError(f"slots free and in use are {slots}, not 0 to {self.max_num_seqs - 1}")
        if any(self._live.get(seq.id) is not seq for seq in self._running):
            raise AuditError("a running sequence is not, or no longer, that of a live request")

    # ---- planning

    def _extend(self, flight: Flight, others: list[Sequence]) -> list[Sequence]:
        """Rows for those that need a page for their next token (prompts do not starve them).
        Returns those with more than one token to catch up, in order."""
        others.sort(key=_by_key)
        catching_up = []
        for seq in others:
            if seq.slot < 0 or seq.total >= seq.limit or not seq.room:
                continue  # preempted just now; complete, or a slice is under way: results first
            if seq.scheduled + 1 < seq.total:
                catching_up.append(seq)
            elif (pages := self._grow(flight, seq, seq.total, "decode")) is not None:
                flight.add(seq, 1, pages)
        return catching_up

    def _catch_up(self, flight: Flight, seqs: list[Sequence], budget: int) -> int:
        """Slices of prompts (or what a preemption lost). Returns what is left of the budget."""
        for index, seq in enumerate(seqs, start=1):
            if budget <= 0:
                break
            if seq.slot < 0:
                continue
            is_last = index == len(seqs) and self._refuses_head()
            count = min(self._share(budget, is_last), seq.total - seq.scheduled)
            pages = self._grow(flight, seq, seq.scheduled + count, "prefill")
            if pages is not None:
                self._add_slice(flight, seq, count, pages)
                budget -= count
        return budget

    def _share(self, budget: int, is_last: bool) -> int:
        """Tokens that one prompt may take. Where the length of slices is bounded, so that short
        prompts pass long ones, none takes all that is left while there are others."""
        if self._longest_slice < self.max_num_batched_tokens and not is_last:
            budget -= budget // 2
        return min(budget, self._longest_slice)

    def _refuses_head(self) -> bool:
        """Nobody waits, or whoever is next was refused and is not looked at yet: as long as others
        run, whose ends it waits for."""
        head = self._policy.head()
        if head is None:
            return True
        return head is self._blocked and self._step < self._retry and bool(self._running)

    def _add_slice(self, flight: Flight, seq: Sequence, count: int, pages: list[list[int]]) -> None:
        start = seq.scheduled
        self._stats.recomputed_tokens += max(0, min(start + count, seq.reached) - start)
        flight.add(seq, count, pages)

    def _prefill_budget(self, flight: Flight, catching_up: list[Sequence], now: float) -> int:
        """Tokens that prompts may take of this step."""
        rows = len(flight.seqs)
        budget = self.max_num_batched_tokens - rows
        oldest = catching_up[0] if catching_up else self._policy.head()
        if oldest is None:
            return budget
        pressed = self._step < self._pressed_until and self._policy.head() is not None
        if pressed and catching_up:  # until all have caught up, nobody else is looked at
            self._pressed_until = self._step + PRESSURE_STEPS
        context = sum(flight.plan.starts) + oldest.scheduled  # a slice reads its own prompt too
        prompts = (
            Prompt(seq.id, now - seq.arrival, seq.total - seq.scheduled)
            for seq in catching_up
            if not seq.num_output
        )
        return self.pace.tokens(budget, rows, context, pressed, next(prompts, None))

    def _grow(self, flight: Flight, seq: Sequence, end: int, reason: str) -> list[list[int]] | None:
        """Pages up to ``end`` tokens, preempting from the end of the order until there is room;
        None if that was ``seq`` itself, or if it had better wait a few steps for somebody to end.
        Alone, a sequence always fits: see ``max_len``."""
        if (pages := self.cache.grow(seq, end)) is not None:
            return pages
        self._is_short = True
        while pages is None:
            victim, first = self._ends_of_order()
            if seq is not first and self._has_patience(seq, victim):
                return None
            if victim is first and self._flights:
                return None  # what is under way for it will give pages back
            self._preempt(flight, victim, reason)
            if victim is seq:
                return None
            pages = self.cache.grow(seq, end)
        seq.short_since = NOT_SHORT
        return pages

    def _has_patience(self, seq: Sequence, victim: Sequence) -> bool:
        """Whether ``seq`` may wait some more for a page. Not while the victim computes its prompt:
        such steps are long, and nobody hears it stop."""
        if seq.short_since == NOT_SHORT:
            seq.short_since = self._step
        short_for = self._step - seq.short_since
        return short_for < self._preemption.patience and victim.scheduled + 1 >= victim.total

    def _ends_of_order(self) -> tuple[Sequence, Sequence]:
        """The next victim, and the one that must advance whatever happens; found once a plan,
        unless somebody joins or leaves."""
        if self._ends is None:
            first = min(self._running, key=_by_key)
            others = [seq for seq in self._running if seq is not first] or self._running
            self._ends = self._choose(list(filter(_may_go, others)) or others), first
        return self._ends

    def _head_precedes(self, rivals: list[Sequence]) -> bool:
        """Whether the head of the queue must not wait for any of these to go on."""
        head = self._policy.head() if rivals else None
        return head is not None and self._precedes(head, rivals)

    def _precedes(self, seq: Sequence, rivals: list[Sequence]) -> bool:
        return self._policy.ordered and all(seq.key < rival.key for rival in rivals)

    def _preempt(self, flight: Flight, seq: Sequence, reason: str) -> None:
        """Take slot and pages; the request waits again, ahead of those that came after it, and
        in the end ahead of all."""
        had_joined = flight.take_out(seq)
        seq.take_news()
        if reason != "priority":
            self._admission.preempted(seq)
        heir = seq.successor()
        self._live[seq.id] = heir
        swap = (
            had_joined  # else what it had on the host is not back yet
            and self._preemption.swaps(seq, self.pace.step_time)
            and self.cache.park(seq, heir)
        )
        self._vacate(seq)
        if not had_joined:
            self._leaves.pop()  # nobody was told that it came
        self._sweep()
        if heir.lives >= SPENT_LIVES:  # the head, which must not take back at once what it lost
            heir.key = (-inf, heir.key[1])
            self._blocked, self._retry = heir, self._step + 1
        self._policy.push(heir)
        self._pressed_until = self._step + PRESSURE_STEPS
        stats = self._stats
        stats.preemptions += 1
        if swap:
            stats.preemptions_swap += 1
        else:
            stats.preemptions_recompute += 1
        stats.preemption_reasons[reason] = stats.preemption_reasons.get(reason, 0) + 1

    def _admit(self, flight: Flight, budget: int) -> None:
        """Let waiting requests join, in order, while tokens, slots and pages last."""
        while budget > 0 and (count := self._admit_head(flight, budget)):
            budget -= count

    def _admit_head(self, flight: Flight, budget: int) -> int:
        """Let the head of the queue join. Returns the tokens of its first slice; 0: it cannot."""
        seq = self._policy.head()
        if seq is None or self._refuses_head():
            return 0
        quote = self.cache.quote(seq, min(budget, self._longest_slice))
        if not self._make_room(flight, seq, quote):
            self._blocked, self._retry = seq, self._step + RETRY_STEPS
            self._pressed_until = self._step + PRESSURE_STEPS
            return 0
        if seq is self._blocked:
            self._blocked = None
        self._policy.pop()
        self._enter(seq, quote, flight.planned)
        self._release_served_children(seq)
        flight.plan.joins.append(seq.join())
        self._add_slice(flight, seq, quote.end - quote.start, seq.tables)
        return quote.end - quote.start

    def _make_room(self, flight: Flight, seq: Sequence, quote: Quote) -> bool:
        """Whether ``seq`` may join and has its pages now, taking those of sequences that it
        comes before if the policy wants that."""
        while not (self._free_slots and self._may_join(seq, quote)):
            if not self._displaces(seq):
                return False
            victim, _ = self._ends_of_order()
            self._preempt(flight, victim, "priority")
        return True

    def _displaces(self, seq: Sequence) -> bool:
        """Whether ``seq`` may take the place of the next victim."""
        if not (self._running and (self._policy.preempts or self._precedes(seq, self._running))):
            return False
        victim, _ = self._ends_of_order()
        return victim.key > seq.key and _may_go(victim)

    def _may_join(self, seq: Sequence, quote: Quote) -> bool:
        """Whether ``seq`` has joined as far as its pages go. Who may displace others needs no
        forecast, but pages for all its known tokens: it would take them from others anyway."""
        if self._running:
            state = PoolState(self.pool.num_usable, self.cache.num_held)
            claims = quote.claims + quote.promised
            if self._displaces(seq):
                if state.held + claims > state.usable:
                    return False
            elif not (
                self._precedes(seq, self._running) or self._admission.admits(seq, claims, state)
            ):
                return False
        return self.cache.begin(seq, quote)

    def _enter(self, seq: Sequence, quote: Quote, now: float) -> None:
        """A slot for a sequence that has its pages."""
        seq.slot = self._free_slots.pop()
        self._running.append(seq)
        self._ends = None
        self._admission.joined(seq, quote.claims + quote.promised)
        if seq.lives > 1:
            return
        stats = self._stats
        seq.charged = min(seq.scheduled, seq.prompt_len)  # what is cached costs nothing …
        self._charge(seq, seq.prompt_len)  # … and the rest is paid at once: later is too late
        self._queue_times.observe(now - seq.arrival)
        stats.prompt_tokens += seq.prompt_len
        if self.prefix_caching and seq.reads_cache:
            stats.prefix_query_tokens += len(seq.tokens)
            stats.prefix_hit_tokens += seq.scheduled
        page_size = self.cache.page_size
        seq.cached_tokens = min(seq.scheduled, seq.shareable_pages(page_size) * page_size)

    # ---- applying

    def _claim(self, result: StepResult) -> Flight | None:
        """The flight that ``result`` belongs to; None if there is nothing to take in."""
        if self._flights and self._flights[0].plan.step == result.step:
            return self._flights.popleft()
        if not (result.slots or result.faults):
            return None
        raise RuntimeError(f"got the result of step {result.step}, which is not the oldest one")

    def _observe(self, flight: Flight, now: float) -> None:
        """What the step has computed, and how long it took."""
        prefill, rows, context = flight.plan.size()
        self._stats.computed_tokens += prefill + rows
        self.pace.observe(prefill, rows, context, now - max(flight.planned, self._applied))
        self._applied = now

    def _apply_faults(self, flight: Flight, result: StepResult) -> list[Delta]:
        by_slot = {seq.slot: seq for seq in flight.seqs if seq.slot >= 0}
        return [
            self._fail(by_slot[fault.slot], fault.code, fault.message)
            for fault in result.faults
            if fault.slot in by_slot
        ]

    def _look(self, seq: Sequence, token: int) -> Delta | None:
        """A request may be complete, may have filled a page, or starts to speak: its news, if
        there is more than the token."""
        num_tokens = seq.take_news()
        self._settle(seq, num_tokens - 1)
        if token in seq.stop_ids:
            return self._end(seq, "stop", [token], stop_id=token)
        if num_tokens >= seq.limit:
            return self._end(seq, "length", [token])
        page_size = self.cache.page_size
        page_end = -(-num_tokens // page_size) * page_size
        seq.due = min(seq.limit - 1, page_end) - num_tokens + 1
        self._admission.grew(seq)
        self._charge(seq, num_tokens)
        return seq.delta([token]) if seq.cached_tokens is not None else None

    def _settle(self, seq: Sequence, computed: int) -> None:
        """``computed`` tokens of the sequence are final: others may share their pages."""
        if self.cache.settle(seq, computed):
            self._retry = 0
        if seq.children:
            self._release_served_children(seq)

    def _charge(self, seq: Sequence, reached: int) -> None:
        """Its tenant was served all tokens up to ``reached``; cached ones cost nothing."""
        first, prompt_len = seq.charged, seq.prompt_len
        inputs = max(0, min(reached, prompt_len) - first)
        if reached > first:
            seq.charged = reached
            if seq.slot >= 0:
                self._policy.charge(seq.request, inputs, reached - first - inputs)

    # ---- ends

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        ids: list[int] | None = None,
        stop_id: int | None = None,
    ) -> Delta:
        """The terminal delta; slot and pages are free again, siblings need not wait."""
        self._charge(seq, seq.take_news())
        if seq.slot >= 0:
            self._vacate(seq, ended=True)
        self.cache.discard(seq)
        seq.slot = GONE
        del self._live[seq.id]
        self._policy.left(seq.request)
        self._release_children(seq)
        counts = self._stats.finished
        counts[finish] = counts.get(finish, 0) + 1
        return seq.delta(ids or [], finish, stop_id)

    def _fail(self, seq: Sequence, code: str, message: str) -> Delta:
        delta = self._end(seq, "error")
        delta.error_code, delta.error = code, message
        return delta

    def _time_out(self, seq: Sequence, limit: Limit) -> Delta:
        request = seq.request
        if limit == "queue_timeout":
            message = f"The request waited for its start for {request.queue_timeout:g} s."
        else:
            message = f"The request did not end within {request.timeout:g} s."
        delta = self._end(seq, "timeout")
        delta.error_code, delta.error = limit, message
        counts = self._stats.timeouts
        counts[limit] = counts.get(limit, 0) + 1
        return delta

    def _vacate(self, seq: Sequence, ended: bool = False) -> None:
        """Give slot and pages back. Later plans may use them at once: plans run in order."""
        self._admission.left(seq, ended)
        self.cache.release(seq)
        self._free_slots.append(seq.slot)
        self._leaves.append(seq.slot)
        seq.slot = GONE
        self._retry = 0

    def _tidy(self) -> None:
        """After requests have ended outside of a step."""
        self._sweep()
        self._policy.prune(len(self._live) - len(self._running))
        self._deadlines.prune(self._live)

    def _sweep(self) -> None:
        """Drop from the running ones those that have given up their slot."""
        self._ends = None
        if len(self._running) + len(self._free_slots) != self.max_num_seqs:
            self._running = [seq for seq in self._running if seq.slot >= 0]

    def _release_served_children(self, seq: Sequence) -> None:
        """Let siblings go once every page of the prompt that they could hit can be found."""
        if seq.children and not self._lacks_pages(seq):
            self._release_children(seq)

    def _release_children(self, seq: Sequence) -> None:
        for child in seq.children:
            if child.slot != GONE:
                self._policy.push(child)
        seq.children = []

    def _waits_for(self, parent: Sequence, seq: Sequence) -> bool:
        """Whether a sibling had better wait until the parent has published the prompt's pages."""
        return self.prefix_caching and seq.reads_cache and self._lacks_pages(parent)

    def _lacks_pages(self, parent: Sequence) -> bool:
        """Whether it has yet to publish pages that a sibling could hit."""
        if parent.published is None:
            return False
        return parent.published < parent.shareable_pages(self.cache.page_size)
