"""Around a step: what the host stages becomes the model's inputs, and ids go where they are needed.

``state`` is the slots' memory (:class:`octavo.runner.device.DeviceState`), ``staged`` what the host
sent for this step. So a step is a function of memory at fixed places, and a captured graph serves
every step of its size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.early import begin
from octavo.ops.triton.plan import count_upto


@triton.jit(do_not_specialize=["used", "count", "places", "values"])
def stage_kernel(host, staged, state, used, count, places, values, BLOCK: tl.constexpr):
    """``staged[:used] = host[:used]``; then for ``count`` writes whose places, which are distinct,
    and values begin at ``places`` and ``values`` of ``host``, ``state[place] = value``. All int32;
    the host's memory is read in place."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(staged + i, tl.load(host + i, mask=i < used, other=0), mask=i < used)
    place = tl.load(host + places + i, mask=i < count, other=0)
    tl.store(state + place, tl.load(host + values + i, mask=i < count, other=0), mask=i < count)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "page_stride", "row_bits"])
def expand_kernel(  # noqa: PLR0913
    slots, contexts, query_start, staged_ids, last_ids, tables, ids, positions, pages, offsets,
    num_rows, num_tokens, page_stride, table_size, row_size, row_bits,
    GROUPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Id, position and place of each token. A staged id below 0 is the slot's last sampled one.

    ``tables`` int32 [GROUPS, slots, row_size], of ``table_size`` each; ``pages`` int64 [GROUPS,
    page_stride]. Tokens past the last row's are padding: id 0 on the null page."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < num_tokens
    row = count_upto(query_start + 1, token, num_rows, 1, row_bits)
    real = there & (row < num_rows)
    slot = tl.load(slots + row, mask=real, other=0)
    position = tl.load(contexts + row, mask=real, other=0) - (
        tl.load(query_start + row + 1, mask=real, other=0) - token
    )
    position = tl.where(real, position, 0)
    staged = tl.load(staged_ids + token, mask=real, other=0)
    last = tl.load(last_ids + slot, mask=real, other=0)
    tl.store(ids + token, tl.where(staged < 0, last, staged).to(tl.int64), mask=there)
    tl.store(positions + token, position.to(tl.int64), mask=there)
    tl.store(offsets + token, (position % PAGE).to(tl.int64), mask=there)
    for group in tl.static_range(GROUPS):
        at = tables + group * table_size + slot * row_size + position // PAGE
        page = tl.load(at, mask=real, other=0)
        tl.store(pages + group * page_stride + token, page.to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def draws_kernel(
    records, slots, positions, draws, num_rows, stride, FIELDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Transpose the slots' records, int64 [slots, FIELDS], to ``draws`` int64 [FIELDS, stride]; the
    last field, the prompt's length, becomes the index of the id at ``positions``."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    slot = tl.load(slots + row, mask=there, other=0)
    for field in tl.static_range(FIELDS):
        value = tl.load(records + slot * FIELDS + field, mask=there, other=0)
        if field == FIELDS - 1:
            value = tl.load(positions + row, mask=there, other=0).to(tl.int64) - value
        tl.store(draws + field * stride + row, value, mask=there)


@triton.jit(do_not_specialize=["num_rows", "stride"])
def keep_kernel(
    ids, statuses, slots, turn, last_ids, returned, num_rows, stride,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """New ids to their slots, and with their status to ``returned[turn]``, the host's memory: int32
    [turns, 2, stride]."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < num_rows
    begin(EARLY)
    token = tl.load(ids + row, mask=there, other=0).to(tl.int32)
    status = tl.load(statuses + row, mask=there, other=0).to(tl.int32)
    slot = tl.load(slots + row, mask=there, other=0)
    tl.store(last_ids + slot, token, mask=there)
    out = returned + tl.load(turn) * 2 * stride + row
    tl.store(out, token, mask=there)
    tl.store(out + stride, status, mask=there)
