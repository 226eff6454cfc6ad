"""What a GPU keeps of each slot, and how a step's inputs get there: one copy, one kernel.

The host stages what it knows into pinned memory; sampled ids never come back for the next step,
they wait in their slot. All places are fixed, so that captured graphs find their inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Join
from octavo.models.batch import Batch, Wanted
from octavo.ops.api import GroupMeta
from octavo.ops.sampling.reference import DrawParams
from octavo.ops.triton import steps
from octavo.runner.slots import NewPages

ON_DEVICE = -1  # in place of an id that only the device knows
_FIELDS = 6  # of a slot's record: seed, temperature, top_p, min_p, top_k, length of the prompt
_BLOCK = 256
_ALIGNED = 4  # words; Triton compiles another kernel for a pointer that is not 16 bytes aligned


def aligned(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED


class DeviceState:
    """Per slot: page tables, sampling record, last sampled id. One int32 tensor in all.

    There is one slot more than requests may have: padding rows belong to it. Its pages are the null
    page. The host's writes are collected and sent with the step.
    """

    def __init__(
        self, max_num_seqs: int, num_groups: int, max_pages: int, device: torch.device
    ) -> None:
        self.padding_slot = max_num_seqs
        slots = max_num_seqs + 1
        self.row_size = aligned(max_pages)
        records, last = 2 * _FIELDS * slots, aligned(slots)
        self.table_size = slots * self.row_size
        self._tables_at = aligned(records) + last
        self._state = torch.zeros(
            self._tables_at + num_groups * self.table_size, dtype=torch.int32, device=device
        )
        self.records = self._state[:records].view(torch.int64).view(slots, _FIELDS)
        self.last_ids = self._state[aligned(records) :][:slots]
        self.tables = self._state[self._tables_at :].view(num_groups, slots, self.row_size)
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    def join(self, joins: list[Join]) -> None:
        """Requests take their slots; their pages come with :meth:`add_pages`."""
        if not joins:
            return
        records = np.zeros((len(joins), _FIELDS), np.int64)
        asked = [join.sampling for join in joins]
        records[:, 0] = np.array([s.seed % 2**64 for s in asked], np.uint64).view(np.int64)
        floats = np.array([(s.temperature, s.top_p, s.min_p) for s in asked], np.float64)
        records[:, 1:4] = floats.view(np.int64)
        records[:, 4] = [max(s.top_k, 0) for s in asked]
        records[:, 5] = [join.prompt_len for join in joins]
        words = records.view(np.int32)
        slots = np.array([join.slot for join in joins], np.int64)
        places = slots[:, None] * words.shape[1] + np.arange(words.shape[1])
        self._write(places.ravel(), words.ravel())

    def add_pages(self, new: NewPages) -> None:
        table = self._tables_at + new.group * self.table_size
        self._write(table + new.slots * self.row_size + new.places, new.pages)

    def take_writes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Places and values collected since the last call; of two to one place, the last."""
        if not self._places:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        self._places, self._values = [], []
        _, last = np.unique(places[::-1], return_index=True)
        kept = len(places) - 1 - last
        return places[kept], values[kept]

    def apply(self, places: Tensor, values: Tensor) -> None:
        """Writes, int32 [W] both, that are on the device."""
        count = len(places)
        grid = (triton.cdiv(count, _BLOCK),)
        steps.write_kernel[grid](self._state, places, values, count, BLOCK=_BLOCK)

    def _write(self, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        self._places.append(places)
        self._values.append(values)


class StepInputs:
    """Stages one step after the other; at most ``depth`` of them may be under way.

    The device's buffer holds, in this order, the rows that sample (``max_num_seqs`` of each: slot,
    position of the new id, index of the token whose hidden state tells it), the rows of
    the step, and writes to the state.
    """

    def __init__(
        self,
        state: DeviceState,
        kv: tuple[Any, ...],
        windows: list[int],
        page_size: int,
        max_num_seqs: int,
        max_tokens: int,
        *,
        depth: int,
        device: torch.device,
    ) -> None:
        self.state = state
        self._kv, self._windows, self._page_size = kv, windows, page_size
        self._max_context = state.row_size * page_size
        self._device = device
        room = aligned(max_num_seqs)
        size = 6 * room + _ALIGNED + aligned(max_tokens)
        self._max_writes = max(size, 1 << 16)
        size += 2 * self._max_writes
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        pin = device.type == "cuda"
        self._ring = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(depth + 1)
        ]
        self._room = room
        self.sample_slots, self.sample_positions, self.sample_tokens = self._buffer[
            : 3 * room
        ].view(3, room)
        self._counting = torch.arange(room + 1, dtype=torch.int32, device=device)
        self._draws = torch.zeros(_FIELDS, room, dtype=torch.int64, device=device)

    # -- staging ------------------------------------------------------------------------------

    def stage(
        self,
        samples: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        rows: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        ids: NDArray[np.int32],
        num_rows: int,
        num_tokens: int,
    ) -> None:
        """Send a step, padded to ``num_rows`` and ``num_tokens``.

        ``samples``: slots, positions, tokens; ``rows``: slots, contexts, ends."""
        self._ring.append(self._ring.pop(0))
        host = self._ring[-1].numpy()
        room = self._room
        for field, values in enumerate(samples):
            host[field * room : field * room + len(values)] = values
        host[len(samples[0]) : room] = self.state.padding_slot
        host[room : 3 * room].reshape(2, room)[:, len(samples[0]) :] = 0
        at = self._places(num_rows, num_tokens)
        slots, contexts, ends = rows
        count = len(slots)
        host[at[0] : at[0] + num_rows] = self.state.padding_slot
        host[at[0] : at[0] + count] = slots
        host[at[1] : at[1] + num_rows] = 0
        host[at[1] : at[1] + count] = contexts
        host[at[2]] = 0
        host[at[2] + 1 : at[2] + 1 + num_rows] = ends[-1] if count else 0
        host[at[2] + 1 : at[2] + 1 + count] = ends
        host[at[3] : at[3] + len(ids)] = ids
        places, words = self.state.take_writes()
        end = at[4]
        fits = len(places) <= self._max_writes
        writes = aligned(len(places)) if fits else 0
        if fits:
            host[end : end + len(places)] = places
            host[end + writes : end + writes + len(places)] = words
        used = end + 2 * writes
        self._buffer[:used].copy_(self._ring[-1][:used], non_blocking=True)
        if not fits:
            sent = torch.from_numpy(np.stack([places, words]).astype(np.int32)).to(self._device)
            self.state.apply(sent[0].contiguous(), sent[1].contiguous())
        elif len(places):
            first = self._buffer[end : end + len(places)]
            self.state.apply(first, self._buffer[end + writes : end + writes + len(places)])

    def _places(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        """Where slots, contexts, query starts, ids and writes begin."""
        first, rows = 3 * self._room, aligned(num_rows)
        starts = first + 2 * rows
        ids = starts + aligned(num_rows + 1)
        return first, first + rows, starts, ids, ids + aligned(num_tokens)

    # -- what the device makes of it ----------------------------------------------------------

    def batch(self, num_rows: int, num_tokens: int, max_query: int) -> Batch:
        """The step that was staged for this many rows and tokens; launches a kernel."""
        at = self._places(num_rows, num_tokens)
        slots, contexts, query_start = (
            self._buffer[at[i] : at[i] + num_rows + (i == 2)] for i in range(3)
        )
        page_stride = aligned(num_tokens)
        groups = len(self._windows)
        memory = torch.empty(groups + 3, page_stride, dtype=torch.int64, device=self._device)
        ids, positions, offsets = memory[:3, :num_tokens]
        state = self.state
        steps.expand_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            slots, contexts, query_start, self._buffer[at[3] :], state.last_ids, state.tables,
            ids, positions, memory[3:], offsets, num_rows, num_tokens, page_stride,
            state.table_size, state.row_size, num_rows.bit_length(),
            GROUPS=groups, PAGE=self._page_size, BLOCK=_BLOCK,
        )  # fmt: skip
        metas = tuple(
            GroupMeta(
                query_start=query_start,
                context_len=contexts,
                page_table=state.tables[group],
                page=memory[3 + group, :num_tokens],
                offset=offsets,
                page_size=self._page_size,
                max_query=max_query,
                max_context=self._max_context,
                window=window,
                table_row=slots,
            )
            for group, window in enumerate(self._windows)
        )
        return Batch(ids=ids, positions=positions, groups=metas, kv=self._kv)

    def wanted(self, batch: Batch, count: int) -> Wanted:
        """The last tokens of the first ``count`` rows that sample, in a batch of this step."""
        groups = tuple(
            replace(
                group,
                query_start=self._counting[: count + 1],
                context_len=self.sample_positions[:count],
                table_row=self.sample_slots[:count],
                max_query=1,
                cache={},
            )
            for group in batch.groups
        )
        return Wanted(self.sample_tokens[:count], groups)

    def draw_params(self, count: int) -> DrawParams:
        """Of the first ``count`` rows that sample; launches a kernel."""
        steps.draws_kernel[(triton.cdiv(count, _BLOCK),)](
            self.state.records, self.sample_slots, self.sample_positions, self._draws, count,
            self._draws.shape[1], FIELDS=_FIELDS, BLOCK=_BLOCK,
        )  # fmt: skip
        seed, temperature, top_p, min_p, top_k, index = self._draws[:, :count]
        temperature, top_p, min_p = (x.view(torch.float64) for x in (temperature, top_p, min_p))
        return DrawParams(temperature, top_k, top_p, min_p, seed, index)

    def keep(self, ids: Tensor, status: Tensor, results: Tensor) -> None:
        """New ids int64 [N] to the slots that sample, and with their status to ``results`` int32
        [2, room]."""
        count = len(ids)
        steps.keep_kernel[(triton.cdiv(count, _BLOCK),)](
            ids, status, self.sample_slots, self.state.last_ids, results, count,
            results.shape[1], BLOCK=_BLOCK, EARLY=False,
        )  # fmt: skip
