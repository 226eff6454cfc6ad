"""Flight: a plan under way, and whom its rows belong to."""

from __future__ import annotations

from itertools import compress

from octavo.core.plan import StepPlan, StepResult
from octavo.core.sequence import Sequence


class Flight:
    """A plan and the sequence of each of its rows.

    Slots are reused while plans are under way, so a result is matched by row, never by slot.
    """

    __slots__ = ("plan", "planned", "seqs")

    def __init__(self, step: int, now: float, num_groups: int) -> None:
        self.planned = now
        self.plan = StepPlan(
            step,
            page_counts=[[] for _ in range(num_groups)],
            pages=[[] for _ in range(num_groups)],
        )
        self.seqs: list[Sequence] = []

    def add_decodes(self, running: list[Sequence]) -> list[Sequence]:
        """Give one token to each sequence that lacks one and has room; return the others.

        The hot loop of planning: a few integer operations a running sequence.
        """
        plan, seqs = self.plan, self.seqs
        slots, starts = plan.slots, plan.starts
        others = []
        for seq in running:
            total = seq.total
            start = seq.scheduled
            if start + 1 != total or total > seq.room:
                others.append(seq)
                continue
            seqs.append(seq)
            slots.append(seq.slot)
            starts.append(start)
            seq.scheduled = total
            seq.total = total + 1
        count = len(seqs)
        plan.counts = [1] * count
        plan.samples = [True] * count
        plan.page_counts = [[0] * count for _ in plan.page_counts]
        return others

    def add(self, seq: Sequence, count: int, new_pages: list[list[int]]) -> None:
        """One row: the next ``count`` tokens of ``seq``, and its new pages in each group."""
        plan = self.plan
        start = seq.scheduled
        end = seq.scheduled = start + count
        samples = end == seq.total
        if samples:
            seq.total += 1
        else:
            seq.room = 0
        self.seqs.append(seq)
        plan.slots.append(seq.slot)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.samples.append(samples)
        for group, pages in enumerate(new_pages):
            plan.page_counts[group].append(len(pages))
            plan.pages[group].extend(pages)

    def take_out(self, seq: Sequence) -> bool:
        """Undo the row of a sequence that must go, if it has one: nothing of it was computed.
        False if with it goes its join, so that no worker will have heard of it."""
        if seq not in self.seqs:
            return True
        plan, row = self.plan, self.seqs.index(seq)
        seq.scheduled = plan.starts[row]
        seq.total -= plan.samples[row]
        for counts, pages in zip(plan.page_counts, plan.pages, strict=True):
            first = sum(counts[:row])
            del pages[first : first + counts[row]], counts[row]
        del self.seqs[row]
        del plan.slots[row], plan.starts[row], plan.counts[row], plan.samples[row]
        num_joins = len(plan.joins)
        plan.joins = [join for join in plan.joins if join.slot != seq.slot]
        return len(plan.joins) == num_joins

    def unsampled(self) -> list[tuple[Sequence, int]]:
        """Sequences of the rows that sample nothing, and where their slices end."""
        plan = self.plan
        if all(plan.samples):
            return []
        return [
            (seq, start + count)
            for seq, start, count, samples in zip(
                self.seqs, plan.starts, plan.counts, plan.samples, strict=True
            )
            if not samples
        ]

    def sampled(self, result: StepResult) -> list[Sequence]:
        """The sequence of each row of ``result``. Raises RuntimeError if the rows do not fit."""
        plan = self.plan
        slots, seqs = plan.slots, self.seqs
        if not all(plan.samples):
            slots, seqs = list(compress(slots, plan.samples)), list(compress(seqs, plan.samples))
        if result.faults:
            failed = {fault.slot for fault in result.faults}
            kept = [slot not in failed for slot in slots]
            slots, seqs = list(compress(slots, kept)), list(compress(seqs, kept))
        if result.slots != slots or len(result.ids) != len(slots):
            raise RuntimeError(
                f"the result of step {plan.step} has rows {result.slots} with {len(result.ids)} "
                f"ids; the plan asked for one id of each of {slots}"
            )
        return seqs
