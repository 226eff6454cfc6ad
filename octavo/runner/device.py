"""What a GPU keeps of each slot, and how a step's inputs get there and its ids come back.

The host stages what it knows into pinned memory, which one kernel reads; another one writes the ids
to pinned memory. No copy engine is waited for. Sampled ids never come back for the next step, they
wait in their slot. All places are fixed, so that captured graphs find their inputs.
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

    def stage(self, host: Tensor, staged: Tensor, used: int, writes: tuple[int, int, int]) -> None:
        """``host[:used]`` to ``staged``, and the writes: their count, and where in ``host`` their
        places and values begin. One launch."""
        grid = (max(1, triton.cdiv(max(used, writes[0]), _BLOCK)),)
        steps.stage_kernel[grid](host, staged, self._state, used, *writes, BLOCK=_BLOCK)

    def _write(self, places: NDArray[np.int64], values: NDArray[np.int32]) -> None:
        self._places.append(places)
        self._values.append(values)


class StepInputs:
    """Stages one step after the other; at most ``depth`` of them may be under way.

    The device's buffer holds, in this order, the step's *turn* (which of the host's ``depth + 1``
    places its ids go to), the rows that sample (``max_num_seqs`` of each: slot, position of the new
    id, index of the token whose hidden state tells it) and the rows of the step. In the host's
    buffers, writes to the state follow.
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
        room = self._room = aligned(max_num_seqs)
        size = _ALIGNED + 6 * room + _ALIGNED + aligned(max_tokens)
        self._max_writes = max(size, 1 << 16)
        pin = device.type == "cuda"
        self._hosts = torch.zeros(
            depth + 1, size + 2 * self._max_writes, dtype=torch.int32, pin_memory=pin
        )
        self._returned = torch.zeros(depth + 1, 2, room, dtype=torch.int32, pin_memory=pin)
        self._turn = 0
        self._buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._device_turn = self._buffer[:1]
        self.sample_slots, self.sample_positions, self.sample_tokens = self._buffer[
            _ALIGNED : _ALIGNED + 3 * room
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
        self._turn = (self._turn + 1) % len(self._hosts)
        staged = self._hosts[self._turn]
        host = staged.numpy()
        host[0] = self._turn
        self._fill_samples(host[_ALIGNED:], samples)
        used = self._fill_rows(host, rows, ids, num_rows, num_tokens)
        places, values = self.state.take_writes()
        count = len(places)
        if count > self._max_writes:  # more than there is room for: a step that waits
            more = torch.from_numpy(np.concatenate([places.astype(np.int32), values]))
            self.state.stage(more.to(self._device), self._buffer, 0, (count, 0, count))
            count = 0
        host[used : used + count] = places[:count]
        host[used + count : used + 2 * count] = values[:count]
        self.state.stage(staged, self._buffer, used, (count, used, used + count))

    def _fill_samples(
        self, host: NDArray[np.int32], samples: tuple[NDArray[np.int64], ...]
    ) -> None:
        room, count = self._room, len(samples[0])
        fields = host[: 3 * room].reshape(3, room)
        for field, values in zip(fields, samples, strict=True):
            field[:count] = values
        fields[0, count:] = self.state.padding_slot
        fields[1:, count:] = 0

    def _fill_rows(
        self,
        host: NDArray[np.int32],
        rows: tuple[NDArray[np.int64], ...],
        ids: NDArray[np.int32],
        num_rows: int,
        num_tokens: int,
    ) -> int:
        """Returns how much of ``host`` is used."""
        at = self._places(num_rows, num_tokens)
        slots, contexts, ends = rows
        count = len(slots)
        host[at[0] : at[0] + count] = slots
        host[at[0] + count : at[0] + num_rows] = self.state.padding_slot
        host[at[1] : at[1] + count] = contexts
        host[at[1] + count : at[1] + num_rows] = 0
        first = at[2] + 1
        host[at[2]] = 0
        host[first : first + count] = ends
        host[first + count : first + num_rows] = ends[-1] if count else 0
        host[at[3] : at[3] + len(ids)] = ids
        return at[4]

    def _places(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        """Where slots, contexts, query starts and ids begin, and what follows them."""
        first, rows = _ALIGNED + 3 * self._room, aligned(num_rows)
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

    def keep(self, ids: Tensor, status: Tensor) -> None:
        """New ids int64 [N] to the slots that sample, and with their status to :meth:`returned`."""
        count = len(ids)
        steps.keep_kernel[(triton.cdiv(count, _BLOCK),)](
            ids, status, self.sample_slots, self._device_turn, self.state.last_ids, self._returned,
            count, self._room, BLOCK=_BLOCK, EARLY=False,
        )  # fmt: skip

    def returned(self, count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Ids and status [count] of the step that was staged last; valid once it has ended, and
        until ``depth`` more have been staged."""
        ids, status = self._returned[self._turn, :, :count].numpy()
        return ids, status
