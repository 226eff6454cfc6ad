"""From a StepPlan and the slots to the Batch that a model runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.models.batch import Batch
from octavo.ops.api import GroupMeta
from octavo.runner.slots import Slots


@dataclass(slots=True)
class Rows:
    """The plan's columns as arrays: one entry a row, in plan order."""

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    ends: NDArray[np.int64]  # index one past the row's last token in the step
    samples: NDArray[np.bool_]


def plan_rows(plan: StepPlan) -> Rows:
    counts = np.array(plan.counts, np.int64)
    return Rows(
        slots=np.array(plan.slots, np.int64),
        starts=np.array(plan.starts, np.int64),
        counts=counts,
        ends=np.cumsum(counts),
        samples=np.array(plan.samples, np.bool_),
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """The rows of a step that sample: slot, position of the new id, index of the last token."""

    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Rows) -> Samples:
        contexts = rows.starts + rows.counts
        if rows.samples.all():
            return cls(rows.slots, contexts, rows.ends - 1)
        chosen = rows.samples
        return cls(rows.slots[chosen], contexts[chosen], rows.ends[chosen] - 1)


class PageRows:
    """The page tables of a step's rows, in plan order, kept from step to step.

    A row that still belongs to the same request gets its new pages only; another one is copied as
    far as its request goes. So a step costs what has changed, not rows times the longest context.
    """

    def __init__(self, slots: Slots, group: int) -> None:
        self._slots = slots
        self._table = slots.tables[group]
        self._lengths = slots.table_len[group]
        self._rows = np.zeros_like(self._table)  # reserved, not touched
        self._owner = np.full(len(self._table), -1, np.int64)  # slot and join whose pages these are
        self._filled = np.zeros(len(self._table), np.int64)

    def take(self, slots: NDArray[np.int64], max_pages: int) -> NDArray[np.int32]:
        """int32 [R, max_pages], a view that is good until the next call. Entries past the end of a
        row are pages of requests before it."""
        count = len(slots)
        owner = self._slots.joins[slots] * len(self._owner) + slots
        lengths = self._lengths[slots]
        moved = self._owner[:count] != owner
        for row in np.flatnonzero(moved | (self._filled[:count] != lengths)).tolist():
            start, end = 0 if moved[row] else self._filled[row], lengths[row]
            self._owner[row] = -1  # until the copy is whole
            self._rows[row, start:end] = self._table[slots[row], start:end]
            self._filled[row], self._owner[row] = end, owner[row]
        return self._rows[:count, :max_pages]


class InputBuilder:
    """Builds batches; all work is vectorised over the tokens and rows of the step."""

    def __init__(
        self, slots: Slots, windows: Sequence[int], kv: tuple[Tensor, ...], device: torch.device
    ) -> None:
        self._slots = slots
        self._windows = windows
        self._page_rows = [PageRows(slots, group) for group in range(len(windows))]
        self._kv = kv
        self._device = device

    def build(self, rows: Rows) -> Batch:
        row_slots, positions = self.expand(rows)
        page_size = self._slots.page_size
        page_index, offset = positions // page_size, positions % page_size
        query_start = np.zeros(len(rows.ends) + 1, np.int32)
        query_start[1:] = rows.ends
        context = rows.starts + rows.counts
        max_context = int(context.max())
        max_pages = -(-max_context // page_size)
        shared = partial(
            GroupMeta,
            query_start=self._put(query_start),
            context_len=self._put(context.astype(np.int32)),
            offset=self._put(offset),
            page_size=page_size,
            max_query=int(rows.counts.max()),
            max_context=max_context,
        )
        groups = tuple(
            shared(
                page_table=self._put(page_rows.take(rows.slots, max_pages)),
                page=self._put(table[row_slots, page_index].astype(np.int64)),
                window=window,
            )
            for table, page_rows, window in zip(
                self._slots.tables, self._page_rows, self._windows, strict=True
            )
        )
        ids = self._slots.tokens[row_slots, positions].astype(np.int64)
        return Batch(ids=self._put(ids), positions=self._put(positions), groups=groups, kv=self._kv)

    def expand(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slot and position of each token of the step."""
        if len(rows.counts) == rows.ends[-1]:  # one token a row: nothing to expand
            return rows.slots, rows.starts
        first = rows.starts - (rows.ends - rows.counts)
        positions = np.arange(rows.ends[-1]) + np.repeat(first, rows.counts)
        return np.repeat(rows.slots, rows.counts), positions

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
