"""Slots: what the runner remembers of each request between steps.

A request has one fixed row from its join to its leave. Rows are written by joins, by the
pages of a plan and by sampled ids; nothing is rebuilt from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import Join, StepPlan


@dataclass(frozen=True, slots=True)
class NewPages:
    """Of a layer group: ``pages[i]`` is page number ``places[i]`` of what runs in ``slots[i]``."""

    group: int
    slots: NDArray[np.int64]
    places: NDArray[np.int64]
    pages: NDArray[np.int32]


class Slots:
    """Known ids and page tables of up to ``max_num_seqs`` requests.

    ``tokens`` int32 [S, max_model_len + 1] and ``tables[g]`` int32 [S, pages of a full
    context] are reserved, not touched: memory follows what requests really use.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, page_size: int, num_groups: int
    ) -> None:
        max_pages = -(-max_model_len // page_size)
        self.page_size = page_size
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.tables: list[NDArray[np.int32]] = [
            np.zeros((max_num_seqs, max_pages), np.int32) for _ in range(num_groups)
        ]
        self.table_len = np.zeros((num_groups, max_num_seqs), np.int64)
        self.prompt_len = np.zeros(max_num_seqs, np.int64)
        self.joins = np.zeros(max_num_seqs, np.int64)  # how often each slot was taken

    def join(self, join: Join) -> None:
        self.tokens[join.slot, : len(join.tokens)] = join.tokens
        self.prompt_len[join.slot] = join.prompt_len
        self.table_len[:, join.slot] = 0
        self.joins[join.slot] += 1

    def append_pages(self, plan: StepPlan) -> list[NewPages]:
        """Add each row's new pages to its tables; those of each group that got some."""
        found = []
        for group, pages in enumerate(plan.pages):
            if not pages:
                continue
            counts = np.array(plan.page_counts[group], np.int64)
            rows = np.flatnonzero(counts)
            counts, slots = counts[rows], np.array(plan.slots, np.int64)[rows]
            first = self.table_len[group, slots] - (np.cumsum(counts) - counts)
            new = NewPages(
                group,
                np.repeat(slots, counts),
                np.repeat(first, counts) + np.arange(len(pages)),
                np.array(pages, np.int32),
            )
            self.tables[group][new.slots, new.places] = new.pages
            self.table_len[group, slots] += counts
            found.append(new)
        return found

    def put_ids(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], ids: NDArray[np.int64] | int
    ) -> None:
        """Remember sampled ids at the positions they will be computed at."""
        self.tokens[slots, positions] = ids
