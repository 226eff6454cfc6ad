"""FakeWorker: a strict runner without a model.

It executes plans as a real runner would, checks that each plan keeps the rules of
:mod:`octavo.core.plan`, and takes its new ids from a script. Its KV cache holds, for each token, a
fingerprint of the ids up to that token; so a page that was overwritten, shared too early or
matched to the wrong prefix is found when it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.pages import BlockSpec
from octavo.core.plan import Fault, Join, PromptLogprobs, StepPlan, StepResult, TokenLogprobs

Script = Callable[[Sequence[int], int], int]
"""Next id, from all ids known so far and the length of the prompt."""


class BrokenPlan(AssertionError):
    """The plan breaks a rule that a runner relies on."""


def hash_script(vocab_size: int = 509) -> Script:
    """Ids that depend on every id before them, and on nothing else."""

    def next_id(tokens: Sequence[int], prompt_len: int) -> int:
        return fingerprint(tokens, 7) % vocab_size

    return next_id


def scripted(outputs: Mapping[tuple[int, ...], Sequence[int]], then: int = 0) -> Script:
    """Fixed outputs by prompt; ``then`` after an output's end and for unknown prompts."""

    def next_id(tokens: Sequence[int], prompt_len: int) -> int:
        output = outputs.get(tuple(tokens[:prompt_len]), ())
        index = len(tokens) - prompt_len
        return output[index] if index < len(output) else then

    return next_id


def fingerprint(tokens: Sequence[int], value: int = 1) -> int:
    """Rolling hash; ``fingerprint(a + b) == fingerprint(b, fingerprint(a))``."""
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value


@dataclass(slots=True)
class _Row:
    """What a slot knows: ids, how many of them are computed, and the page tables."""

    tokens: list[int]
    prompt_len: int
    join: Join
    tables: list[list[int]]
    computed: int | None = None  # None until the first slice says where it starts
    prints: list[int] = field(default_factory=list)  # fingerprint up to each token

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.prints.append(fingerprint([token], self.prints[-1] if self.prints else 1))


class FakeWorker:
    """A :class:`octavo.distributed.executor.Worker`. Raises :class:`BrokenPlan` on a bad plan.

    Steps are counted from 1 as they are executed (not by ``plan.step``). ``raise_at`` raises that
    error at a step, ``delay_at`` calls ``sleep`` with seconds first, ``nan_at`` holds (step, row)
    pairs whose row, in the order of the plan's slices, ends in a "non_finite_logits" fault.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        num_pages: int,
        page_size: int = 16,
        blocks: tuple[BlockSpec, ...] = (BlockSpec(),),
        max_num_seqs: int = 256,
        host_pages: int = 0,
        raise_at: Mapping[int, BaseException] | None = None,
        delay_at: Mapping[int, float] | None = None,
        nan_at: Collection[tuple[int, int]] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.script = script or hash_script()
        self.page_size = page_size
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.raise_at = dict(raise_at or {})
        self.delay_at = dict(delay_at or {})
        self.nan_at = set(nan_at)
        self.sleep = sleep
        self.steps = 0
        self.tokens_computed = 0
        self.closed = False
        self.rows: dict[int, _Row] = {}
        self.host_pages = host_pages
        self.swapped_out = 0
        self._host: dict[int, list[list[int]]] = {}
        self._kv = [[[0] * page_size for _ in range(num_pages)] for _ in blocks]
        self._last_step = -1

    # ---- Worker

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if (seconds := self.delay_at.get(self.steps)) is not None:
            self.sleep(seconds)
        if (error := self.raise_at.get(self.steps)) is not None:
            raise error
        self._check(plan.step > self._last_step, f"step {plan.step} after {self._last_step}")
        self._last_step = plan.step
        self._check_columns(plan)
        self._swap(plan)
        for slot in plan.leaves:
            self._check(self.rows.pop(slot, None) is not None, f"slot {slot} left, but is empty")
        for join in plan.joins:
            self._join(join)
        self._take_pages(plan)
        result = StepResult(plan.step)
        for index in range(len(plan.slots)):
            self._run(plan, index, result)
        return result

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        if name != "stats":
            raise KeyError(name)
        return {"steps": self.steps, "tokens_computed": self.tokens_computed}

    def reset(self) -> None:
        self.rows.clear()

    def close(self) -> None:
        self.closed = True

    # ---- the rules

    def _check(self, holds: bool, message: str) -> None:
        if not holds:
            raise BrokenPlan(f"execution {self.steps}: {message}")

    def _check_columns(self, plan: StepPlan) -> None:
        rows = len(plan.slots)
        columns = [plan.starts, plan.counts, plan.samples, *plan.page_counts]
        self._check(all(len(column) == rows for column in columns), "ragged columns")
        self._check(len(set(plan.slots)) == rows, "a slot has two slices")
        self._check(len(plan.page_counts) == len(plan.pages) == len(self.blocks), "layer groups")
        for counts, pages in zip(plan.page_counts, plan.pages, strict=True):
            self._check(sum(counts) == len(pages), "page counts do not add up")
        self._check({j.slot for j in plan.joins} <= set(plan.slots), "a join without a slice")

    def _swap(self, plan: StepPlan) -> None:
        """Pages out to the host, then back. A host page is used by one sequence at a time."""
        outs, ins = plan.swap_out_hosts, plan.swap_in_hosts
        self._check(len(set(outs)) == len(outs) and len(set(ins)) == len(ins), "a host page twice")
        self._check(all(0 < host <= self.host_pages for host in outs), "no such host page")
        for page, host in zip(plan.swap_out_pages, outs, strict=True):
            self.swapped_out += 1
            self._host[host] = [list(kv[page]) for kv in self._kv]
        for host, page in zip(ins, plan.swap_in_pages, strict=True):
            self._check(host in self._host, f"host page {host} holds nothing")
            for kv, kept in zip(self._kv, self._host.pop(host), strict=True):
                kv[page] = kept

    def _join(self, join: Join) -> None:
        self._check(0 <= join.slot < self.max_num_seqs, f"slot {join.slot} does not exist")
        self._check(join.slot not in self.rows, f"slot {join.slot} joined twice")
        self._check(0 < join.prompt_len <= len(join.tokens), "a join's prompt_len")
        row = _Row([], join.prompt_len, join, [[] for _ in self.blocks])
        for token in join.tokens:
            row.append(token)
        self.rows[join.slot] = row

    def _take_pages(self, plan: StepPlan) -> None:
        for group, (counts, pages) in enumerate(zip(plan.page_counts, plan.pages, strict=True)):
            taken = iter(pages)
            for slot, count in zip(plan.slots, counts, strict=True):
                self._check(slot in self.rows, f"a slice of empty slot {slot}")
                self.rows[slot].tables[group].extend(next(taken) for _ in range(count))

    def _run(self, plan: StepPlan, index: int, result: StepResult) -> None:
        slot, start, count = plan.slots[index], plan.starts[index], plan.counts[index]
        row = self.rows[slot]
        end = start + count
        if row.computed is None:  # a join starts where its prefix hit ends
            row.computed = start
        self._check(start == row.computed, f"slot {slot}: slice at {start}, not {row.computed}")
        self._check(count > 0 and end <= len(row.tokens), f"slot {slot}: {count} tokens at {start}")
        self._check(plan.samples[index] == (end == len(row.tokens)), f"slot {slot}: samples")
        for group, block in enumerate(self.blocks):
            if block.kind == "paged":
                self._read(slot, row, group, start)
                self._write(slot, row, group, start, end)
        row.computed = end
        self.tokens_computed += count
        self._report_prompt(row, start, end, result)
        if (self.steps, index) in self.nan_at:
            message = f"slot {slot} has logits that are not finite"
            result.faults.append(Fault(slot, "non_finite_logits", message))
        elif plan.samples[index]:
            self._sample(slot, row, result)

    def _read(self, slot: int, row: _Row, group: int, start: int) -> None:
        """All tokens that the slice's first query sees must be in their pages."""
        window = self.blocks[group].window
        for position in range(max(0, start - window + 1) if window else 0, start):
            page, offset = self._place(slot, row, group, position)
            self._check(
                self._kv[group][page][offset] == row.prints[position],
                f"slot {slot}: page {page} does not hold its token {position}",
            )

    def _write(self, slot: int, row: _Row, group: int, start: int, end: int) -> None:
        first = start // self.page_size
        written = set(row.tables[group][first : (end - 1) // self.page_size + 1])
        for other, page in self._visible(slot):
            self._check(page not in written, f"slot {slot} writes page {page} that {other} sees")
        for position in range(start, end):
            page, offset = self._place(slot, row, group, position)
            self._kv[group][page][offset] = row.prints[position]

    def _place(self, slot: int, row: _Row, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.page_size)
        table = row.tables[group]
        self._check(index < len(table), f"slot {slot}: no page for token {position}")
        self._check(table[index] != 0, f"slot {slot}: token {position} is in the null page")
        return table[index], offset

    def _visible(self, slot: int) -> Iterator[tuple[int, int]]:
        """(slot, page) of every page that another slot may still read, or has yet to write."""
        for other, row in self.rows.items():
            for group, block in enumerate(self.blocks):
                first = 0
                if block.window:
                    first = max(0, (row.computed or 0) - block.window + 1) // self.page_size
                if other != slot:
                    yield from ((other, page) for page in row.tables[group][first:] if page)

    # ---- news

    def _sample(self, slot: int, row: _Row, result: StepResult) -> None:
        token = self.script(row.tokens, row.prompt_len)
        row.append(token)
        result.slots.append(slot)
        result.num_ids.append(1)
        result.ids.append(token)
        if (top := row.join.sampling.logprobs) is not None:
            result.logprobs[slot] = [fake_logprobs(token, top)]

    def _report_prompt(self, row: _Row, start: int, end: int, result: StepResult) -> None:
        top = row.join.sampling.prompt_logprobs
        positions = range(start + 1, min(end, row.prompt_len - 1) + 1)
        if top is not None and positions:
            entries = [fake_logprobs(row.tokens[p], top) for p in positions]
            result.prompt_logprobs.append(PromptLogprobs(row.join.slot, start + 1, entries))


def fake_logprobs(token: int, top: int) -> TokenLogprobs:
    """The token as the most probable one, then its successors."""
    ids = [token, *(token + i for i in range(top))]
    return TokenLogprobs(ids, [-0.5, *(-0.5 - i for i in range(top))], rank=1)
