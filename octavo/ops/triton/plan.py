"""A step's attention work, worked out on the device once for all layers of a group.

Queries are cut into *units*: up to ``tokens`` consecutive queries of one row, with all query
heads of a KV head. A unit sees a range of KV *tiles*. Its tiles, KV head after KV head, unit
after unit, form one line; the line is cut into equal *shares*, one a program, whatever
the lengths are. So nothing here depends on values that only the device knows, and
a captured graph replays on any lengths within the bounds of its GroupMeta.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.api import GroupMeta

_BLOCK = 512
_ROWS = 512  # at least, so that steps of few rows share one compiled kernel
_LENGTHS = [
    "num_rows", "max_units", "num_shares", "least", "window", "low", "high", "row_bits",
    "unit_bits",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cut:
    """How to cut: rows with ``low`` < queries <= ``high`` into units of ``tokens`` queries,
    contexts into tiles of ``tile`` tokens, the line into ``shares`` of at least ``least`` tiles."""

    low: int
    high: int
    tokens: int
    tile: int
    shares: int
    least: int

    def max_units(self, num_tokens: int, num_rows: int) -> int:
        """How many units there can be in a step of this many tokens and rows."""
        rows = min(num_rows, num_tokens // (self.low + 1))
        return rows if self.high <= self.tokens else num_tokens // self.tokens + rows


@dataclass(frozen=True, slots=True)
class Work:
    """Of U units at most, S shares, K KV heads. All int32.

    ``units`` [4, U]: row of the page table, index of the first query among the step's tokens,
    its position, number of queries. ``tiles_before`` [U + 1]: tiles (of one head) of the units
    before. ``totals`` [3]: units, tiles a share, tiles of all heads. ``starts`` [7, S]: the unit
    that a share begins with, what ``units`` says of it, tiles before it and in it. ``arrived``
    [U, K]: parts finished of what is split over shares; zero between launches.
    """

    max_units: int
    units: Tensor
    tiles_before: Tensor
    totals: Tensor
    starts: Tensor
    arrived: Tensor


def plan(meta: GroupMeta, cut: Cut, num_tokens: int, kv_heads: int) -> Work:
    """Launch the planning kernel for a step of ``num_tokens`` (padding included)."""
    num_rows = meta.context_len.shape[0]
    most = max(1, cut.max_units(num_tokens, num_rows))
    sizes = [4 * most, most + 1, 3, 7 * cut.shares, most * kv_heads, num_rows]
    # Each 16 bytes aligned: Triton compiles another kernel where it is not.
    rooms = [-(-size // 4) * 4 for size in sizes]
    memory = torch.empty(sum(rooms), dtype=torch.int32, device=meta.context_len.device)
    units, tiles_before, totals, starts, arrived, scratch = (
        room[:size] for room, size in zip(memory.split(rooms), sizes, strict=True)
    )
    table_row = scratch if meta.table_row is None else meta.table_row
    _plan_kernel[(1,)](
        meta.query_start, meta.context_len, table_row, scratch, units, tiles_before, totals,
        starts, arrived, num_rows, most, cut.shares, cut.least, meta.window, cut.low, cut.high,
        num_rows.bit_length(), most.bit_length(),
        HEADS=kv_heads, TILE=cut.tile, TOKENS=cut.tokens,
        ROWS=max(_ROWS, triton.next_power_of_2(num_rows)),
        MAPPED=meta.table_row is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return Work(
        most, units.view(4, most), tiles_before, totals, starts.view(7, cut.shares), arrived
    )


@triton.jit
def count_upto(ends, value, count, factor, bits):
    """How many of the ascending ``ends[:count]`` are, times ``factor``, at most ``value``.

    A binary search an element; ``count`` < 2 ** bits."""
    found = value * 0
    for bit in range(bits):
        probe = found + (1 << (bits - 1 - bit))
        inside = probe <= count
        end = tl.load(ends + probe - 1, mask=inside, other=0)
        found = tl.where(inside & (end * factor <= value), probe, found)
    return found


@triton.jit
def _whole_parts(share, longest, tiles, num_units):
    """A slightly larger share that units of even lengths divide into or are divided by, if any:
    a unit that lies in one share has no parts to add up."""
    parts = tl.maximum(longest // share, 1)
    units = (share + longest - 1) // tl.maximum(longest, 1)
    whole = tl.where(share > longest, units * longest, (longest + parts - 1) // parts)
    even = tiles * 32 >= longest * num_units * 31
    return tl.where(even & (whole * 16 <= share * 17) & (whole >= share), whole, share)


@triton.jit(do_not_specialize=_LENGTHS)
def _plan_kernel(  # noqa: PLR0913
    query_start, context_len, table_row, unit_ends, units, tiles_before, totals, starts, arrived,
    num_rows, max_units, num_shares, least, window, low, high, row_bits, unit_bits,
    HEADS: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    start = tl.load(query_start + row, mask=row < num_rows, other=0)
    count = tl.load(query_start + row + 1, mask=row < num_rows, other=0) - start
    row_units = tl.where((count > low) & (count <= high), (count + TOKENS - 1) // TOKENS, 0)
    tl.store(unit_ends + row, tl.cumsum(row_units, 0), mask=row < num_rows)
    num_units = tl.sum(row_units, 0)
    tl.store(tiles_before, 0)
    tl.debug_barrier()

    tiles = num_units * 0
    longest = num_units * 0
    for base in range(0, num_units, BLOCK):
        unit = base + tl.arange(0, BLOCK)
        live = unit < num_units
        at = tl.minimum(count_upto(unit_ends, unit, num_rows, 1, row_bits), num_rows - 1)
        row_start = tl.load(query_start + at)
        row_count = tl.load(query_start + at + 1) - row_start
        skipped = TOKENS * (unit - tl.load(unit_ends + at - 1, mask=at > 0, other=0))
        position = tl.load(context_len + at) - row_count + skipped
        size = tl.minimum(row_count - skipped, TOKENS)
        first_tile = tl.where(window > 0, tl.maximum(position - window + 1, 0) // TILE, 0)
        unit_tiles = tl.where(live, (position + size + TILE - 1) // TILE - first_tile, 0)
        page_row = at
        if MAPPED:
            page_row = tl.load(table_row + at)
        tl.store(units + unit, page_row, mask=live)
        tl.store(units + max_units + unit, row_start + skipped, mask=live)
        tl.store(units + 2 * max_units + unit, position, mask=live)
        tl.store(units + 3 * max_units + unit, size, mask=live)
        tl.store(tiles_before + unit + 1, tiles + tl.cumsum(unit_tiles, 0), mask=live)
        for head in range(HEADS):
            tl.store(arrived + unit * HEADS + head, 0, mask=live)
        tiles += tl.sum(unit_tiles, 0)
        longest = tl.maximum(longest, tl.max(unit_tiles, 0))

    share = tl.maximum((tiles * HEADS + num_shares - 1) // num_shares, least)
    share = _whole_parts(share, longest, tiles, num_units)
    tl.store(totals, num_units)
    tl.store(totals + 1, share)
    tl.store(totals + 2, tiles * HEADS)
    tl.debug_barrier()
    for base in range(0, num_shares, BLOCK):
        index = base + tl.arange(0, BLOCK)
        unit = count_upto(tiles_before + 1, index * share, num_units, HEADS, unit_bits)
        used = (index < num_shares) & (unit < num_units)
        tl.store(starts + index, unit, mask=used)
        for field in tl.static_range(4):
            value = tl.load(units + field * max_units + unit, mask=used, other=0)
            tl.store(starts + (field + 1) * num_shares + index, value, mask=used)
        line = tl.load(tiles_before + unit, mask=used, other=0)
        after = tl.load(tiles_before + unit + 1, mask=used, other=0)
        tl.store(starts + 5 * num_shares + index, line, mask=used)
        tl.store(starts + 6 * num_shares + index, after - line, mask=used)
