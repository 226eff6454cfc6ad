"""Ledger: what each step of a simulated run did to its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from octavo.core.plan import Join, StepPlan, StepResult
from octavo.tools.simulate.outcome import Outcome, Steps
from octavo.tools.simulate.trace import Trace

TOKEN, STOP = 0, 1
NEVER = -1


@dataclass(slots=True)
class _Columns:
    """One entry a step."""

    start: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    prefill_tokens: list[int] = field(default_factory=list)
    decode_rows: list[int] = field(default_factory=list)
    context_tokens: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    steady: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    referenced: list[int] = field(default_factory=list)


class Ledger:
    """Answers plans with tokens, and keeps account of every request by its slot.

    It reads nothing but plans: the first id of a prompt is the request's number in the trace, so a
    join tells whose a slot is. The common step (each row decodes, and is a row of the step
    before) costs a few list operations.
    """

    def __init__(self, trace: Trace, num_slots: int) -> None:
        count = len(trace)
        self._prompt_len: list[int] = trace.prompt.tolist()
        # Position of the stop; what reaches max_tokens comes to none.
        stop = np.where(trace.output < trace.max_tokens, trace.prompt + trace.output - 1, NEVER)
        self._last: list[int] = stop.tolist()
        self._arrival = trace.arrival
        self._owner = [NEVER] * num_slots
        self._end = [0] * num_slots  # position of the owner's stop id
        self._known = [0] * num_slots  # tokens that the owner has had computed before
        self._prefilled = [0] * count  # tokens of the prompt that were computed
        self._catching_up: set[int] = set()  # slots without a token since their owner joined
        self._speaking: set[int] = set()  # slots that got a token in the step before
        self._sampled: list[int] | None = None  # the same in order; None: an owner has changed
        self._since = [0] * count  # step of a request's first token after its latest pause
        self._first_join = [NEVER] * count
        self._first_step = [NEVER] * count
        self._last_step = [NEVER] * count
        self._finish = [""] * count
        self._num_output = [0] * count
        self._lives = [0] * count
        self._pauses: list[tuple[int, int]] = []
        self._columns = _Columns()
        self._num_running = 0
        self._slot = [NEVER] * count  # where each request runs, or ran last
        self._oldest = 0  # the first request that has not ended
        self._num_stalls = 0
        self.recomputed_tokens = 0
        self.num_ended = 0

    def answer(self, plan: StepPlan) -> StepResult:
        """The result of executing ``plan``."""
        slots, starts, counts = plan.slots, plan.starts, plan.counts
        for join in plan.joins:
            self._join(join)
        num_tokens = sum(counts)
        self._watch_oldest(slots)
        if self._catching_up:
            self._catch_up(plan)
        sampled, ends = slots, starts
        if num_tokens > len(slots):
            ends = [start + count - 1 for start, count in zip(starts, counts, strict=True)]
        if not all(plan.samples):
            sampled, ends = list(compress(slots, plan.samples)), list(compress(ends, plan.samples))
        last = self._end
        ids = [
            STOP if end + 1 == last[slot] else TOKEN
            for slot, end in zip(sampled, ends, strict=True)
        ]
        self._columns.steady.append(self._count_steady(sampled))
        self._columns.sampled.append(len(sampled))
        return StepResult(plan.step, sampled, [1] * len(sampled), ids)

    def charge(self, plan: StepPlan) -> tuple[int, int, int]:
        """Prefill tokens, decode rows and context tokens of ``plan``, for a cost model."""
        prefill, rows, context = size = plan.size()
        columns = self._columns
        columns.prefill_tokens.append(prefill)
        columns.decode_rows.append(rows)
        columns.context_tokens.append(context)
        self._num_running += len(plan.joins) - len(plan.leaves)
        columns.running.append(self._num_running)
        return size

    def clock(self, start: float, seconds: float, referenced: int) -> None:
        columns = self._columns
        columns.start.append(start)
        columns.seconds.append(seconds)
        columns.referenced.append(referenced)

    def ended(self, request: int, reason: str) -> None:
        self._finish[request] = reason
        self.num_ended += 1

    def outcome(self, num_usable: int) -> Outcome:
        columns = self._columns
        floats = (np.array(columns.start, np.float64), np.array(columns.seconds, np.float64))
        ints = [np.array(getattr(columns, name), np.int64) for name in _Columns.__slots__[2:]]
        self._hush(self._speaking)
        return Outcome(
            steps=Steps(*floats, *ints),
            arrival=self._arrival,
            finish=self._finish,
            num_output=np.array(self._num_output, np.int64),
            first_join=np.array(self._first_join, np.int64),
            first_step=np.array(self._first_step, np.int64),
            last_step=np.array(self._last_step, np.int64),
            preemptions=np.maximum(np.array(self._lives, np.int64) - 1, 0),
            recomputed_tokens=self.recomputed_tokens,
            num_stalls=self._num_stalls,
            num_usable=num_usable,
            pauses=np.array(self._pauses, np.int64).reshape(-1, 2),
        )

    # ---- one request

    def _join(self, join: Join) -> None:
        slot, request = join.slot, join.tokens[0]
        if slot in self._speaking:  # of the slot's former owner
            self._hush({slot})
            self._speaking.discard(slot)
            self._sampled = None
        self._owner[slot], self._slot[request] = request, slot
        self._end[slot] = self._last[request]
        known, prompt_len = len(join.tokens), self._prompt_len[request]
        self._known[slot] = known - 1 if known > prompt_len else self._prefilled[request]
        self._catching_up.add(slot)
        self._lives[request] += 1
        if self._first_join[request] == NEVER:
            self._first_join[request] = len(self._columns.sampled)

    def _watch_oldest(self, slots: list[int]) -> None:
        while self._finish[self._oldest]:
            self._oldest += 1
        slot = self._slot[self._oldest]
        if slot not in slots or self._owner[slot] != self._oldest:
            self._num_stalls += 1

    def _catch_up(self, plan: StepPlan) -> None:
        """Rows of requests that have joined and not spoken since: is what they compute new?"""
        known, prefilled, behind = self._known, self._prefilled, self._catching_up
        rows = zip(plan.slots, plan.starts, plan.counts, plan.samples, strict=True)
        for slot, start, count, samples in rows:
            if slot not in behind:
                continue
            end, request = start + count, self._owner[slot]
            self.recomputed_tokens += max(0, min(end, known[slot]) - start)
            prefilled[request] = max(prefilled[request], end)
            if samples:
                behind.discard(slot)

    def _count_steady(self, sampled: list[int]) -> int:
        """Rows whose request got a token in the step before; the others are looked into."""
        if sampled == self._sampled:
            return len(sampled)
        before, now = self._speaking, set(sampled)
        self._hush(before - now)
        step = len(self._columns.sampled)
        for slot in now - before:
            request = self._owner[slot]
            self._since[request] = step
            if self._first_step[request] == NEVER:
                self._first_step[request] = step
            else:
                self._pauses.append((self._last_step[request], step))
        self._speaking, self._sampled = now, sampled
        return len(now & before)

    def _hush(self, slots: set[int]) -> None:
        """The requests in ``slots`` had their latest token in the step before."""
        step = len(self._columns.sampled) - 1
        for slot in slots:
            request = self._owner[slot]
            self._last_step[request] = step
            self._num_output[request] += step + 1 - self._since[request]
