"""Paged attention: shares for decoding and few queries, whole units for many.

A unit's queries (:mod:`octavo.ops.triton.plan`), one a row and query head of the group, meet its
KV tiles in an online softmax (Milakov and Gimelshein 2018). ``share_kernel`` gives each
program an equal run of tiles, so that a long context is spread over programs; the last program
to finish a part of a split unit adds the parts up, in order. No float is added atomically, so
results do not depend on timing. ``unit_kernel`` gives each program whole units, heavy ones first
and neighbours at the same time, so that they share the L2 cache.

Names: ``rows`` of a unit are query · GROUP + head of the group, padded to ROWS. ``top`` and
``total`` [rows] are the largest score so far, in base 2, and the sum of weights. DIM is padded to
WIDTH, a power of two. Scores and sums are fp32.

Tiles of fp8 pages are another loop (:mod:`octavo.ops.triton.attention_fp8`) between the same ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import attention_fp8, fp8
from octavo.ops.triton.early import begin
from octavo.ops.triton.softmax import LOG2E, LOWEST, hide, load_pages, load_rows, tanh


@triton.jit
def _attend_tiles(  # noqa: PLR0913
    q, acc, top, total, first_tile, last_tile, low, high, position, keys, table, scale, soft_cap,
    window, MASK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, PAGE_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go on over tiles [first_tile, last_tile) of one KV head, whose keys in page 0 start at
    ``keys``. With MASK nothing outside tokens [low, high) is read: it may be NaN."""
    d = tl.arange(0, q.shape[1])
    for tile in tl.range(first_tile, last_tile):
        token = tile * TILE + tl.arange(0, TILE)
        seen = token < high
        if WINDOW:
            seen &= token >= low
        page = load_pages(table, token, seen, PAGE, PAGE_STRIDE, MASK)
        at = keys + (page + token % PAGE * TOKEN_STRIDE)[:, None] + d[None, :]
        k = load_rows(at, seen, DIM, MASK)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = scale * LOG2E
        if SOFT_CAP:
            score = soft_cap * tanh(score * (scale / soft_cap))
            factor = LOG2E
        if MASK:
            score = hide(
                score, token[None, :], seen[None, :], position[:, None], window, TOKENS, WINDOW
            )
        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        v = load_rows(at + VALUES_STRIDE, seen, DIM, MASK)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _attend_run(  # noqa: PLR0913
    queries, q_stride, keys, table, first_tile, last_tile, first, start, size, head, scale,
    soft_cap, window, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A unit of ``size`` queries from position ``start`` on, over some of its tiles."""
    row = tl.arange(0, ROWS)
    at = (first + row // GROUP).to(tl.int64) * q_stride + (head * GROUP + row % GROUP) * DIM
    real = row < size * GROUP
    position = start + row // GROUP
    low = tl.maximum(start - window + 1, 0)
    high = start + size
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    masked_from = first_tile
    if FP8:
        FLIPPED: tl.constexpr = ROWS < 64
        if FLIPPED:
            acc = tl.zeros([WIDTH, ROWS], tl.float32)
        q = attention_fp8.load_queries(queries, at, real, WIDTH, DIM, FLIPPED)
        if not WINDOW:  # tiles that every query sees whole come first, unmasked
            masked_from = tl.minimum(tl.maximum((start + 1) // TILE, first_tile), last_tile)
            acc, top, total = attention_fp8.attend_tiles(
                q, acc, top, total, first_tile, masked_from, low, high, position, keys, table,
                scale, soft_cap, window, False, TOKENS, TILE, PAGE, DIM, PAGE_STRIDE,
                VALUES_STRIDE, WINDOW, SOFT_CAP, PRECISION, FP8, FLIPPED,
            )  # fmt: skip
        acc, top, total = attention_fp8.attend_tiles(
            q, acc, top, total, masked_from, last_tile, low, high, position, keys, table, scale,
            soft_cap, window, True, TOKENS, TILE, PAGE, DIM, PAGE_STRIDE, VALUES_STRIDE, WINDOW,
            SOFT_CAP, PRECISION, FP8, FLIPPED,
        )  # fmt: skip
        if FLIPPED:
            acc = tl.trans(acc)
        acc *= fp8.UNIT[FP8]
    else:
        d = tl.arange(0, WIDTH)
        there = real[:, None] & (d < DIM)[None, :]
        q = tl.load(queries + at[:, None] + d[None, :], mask=there, other=0.0)
        if ROWS >= 64 and not WINDOW:
            masked_from = tl.minimum(tl.maximum((start + 1) // TILE, first_tile), last_tile)
            acc, top, total = _attend_tiles(
                q, acc, top, total, first_tile, masked_from, low, high, position, keys, table,
                scale, soft_cap, window, False, TOKENS, TILE, PAGE, DIM, PAGE_STRIDE,
                VALUES_STRIDE, TOKEN_STRIDE, WINDOW, SOFT_CAP, PRECISION,
            )  # fmt: skip
        acc, top, total = _attend_tiles(
            q, acc, top, total, masked_from, last_tile, low, high, position, keys, table, scale,
            soft_cap, window, True, TOKENS, TILE, PAGE, DIM, PAGE_STRIDE, VALUES_STRIDE,
            TOKEN_STRIDE, WINDOW, SOFT_CAP, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _write(
    acc, total, out, token_stride, head_stride, first, size, head,
    GROUP: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """``acc`` [rows, WIDTH] over ``total`` [rows] to the output of a unit's queries."""
    row = tl.arange(0, acc.shape[0])
    d = tl.arange(0, acc.shape[1])
    at = (first + row // GROUP).to(tl.int64) * token_stride
    at += (head * GROUP + row % GROUP) * head_stride
    real = (row < size * GROUP)[:, None] & (d < DIM)[None, :]
    mean = acc / tl.maximum(total, 1.0e-30)[:, None]  # padding rows may have seen nothing
    tl.store(out + at[:, None] + d[None, :], mean.to(out.dtype.element_ty), mask=real)


@triton.jit
def _add_up(
    sums, states, origin, share, parts,
    KEPT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The parts of a unit and head whose tiles begin at ``origin`` of the line: acc and total.

    Two slots a share: what it begins with goes to the first, what it ends with to the second."""
    row = tl.arange(0, KEPT)
    d = tl.arange(0, WIDTH)
    first_share = origin // share
    acc = tl.zeros([KEPT, WIDTH], tl.float32)
    top = tl.full([KEPT], LOWEST, tl.float32)
    total = tl.zeros([KEPT], tl.float32)
    for base in range(0, parts, PARTS):
        part = base + tl.arange(0, PARTS)
        slot = 2 * (first_share + part)
        slot += ((part == 0) & (origin != first_share * share)).to(tl.int32)
        at = slot[:, None] * (2 * KEPT) + row[None, :]
        live = (part < parts)[:, None]
        part_top = tl.load(states + at, mask=live, other=LOWEST, cache_modifier=".cg")
        part_total = tl.load(states + at + KEPT, mask=live, other=0.0, cache_modifier=".cg")
        at = (slot[:, None] * KEPT + row[None, :])[:, :, None] * WIDTH + d[None, None, :]
        x = tl.load(sums + at, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(part_top, 0))
        weight = tl.exp2(part_top - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(part_total * weight, 0)
        acc = acc * shrink[:, None] + tl.sum(x * weight[:, :, None], 0)
        top = new_top
    return acc, total


@triton.jit(do_not_specialize=["layer", "table_stride", "max_units", "window"])
def share_kernel(  # noqa: PLR0913
    queries, kv, table, out, units, tiles_before, totals, starts, arrived, sums, states,
    layer, q_stride, out_token_stride, out_head_stride, table_stride, max_units, window, scale,
    soft_cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEPT: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr,
    VALUES_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program a share. ``sums`` [2 · shares, KEPT, WIDTH] and ``states`` [2 · shares, 2, KEPT]
    hold parts; KEPT rows hold all real rows of a unit, PARTS are added up at a time."""
    begin(EARLY)
    index = tl.program_id(0)
    shares = tl.num_programs(0)
    num_units = tl.load(totals)
    share = tl.load(totals + 1)
    end = tl.load(totals + 2)
    unit = tl.load(starts + index)
    page_row = tl.load(starts + shares + index)
    first = tl.load(starts + 2 * shares + index)
    start = tl.load(starts + 3 * shares + index)
    size = tl.load(starts + 4 * shares + index)
    line = tl.load(starts + 5 * shares + index)
    tiles = tl.load(starts + 6 * shares + index)
    at = index * share
    end = tl.minimum(at + share, end)
    kv += layer.to(tl.int64) * LAYER_STRIDE
    while at < end:
        following = tl.minimum(unit + 1, num_units - 1)  # loaded now, needed much later
        next_page_row = tl.load(units + following)
        next_first = tl.load(units + max_units + following)
        next_start = tl.load(units + 2 * max_units + following)
        next_size = tl.load(units + 3 * max_units + following)
        next_tiles = tl.load(tiles_before + following + 1) - line - tiles
        head = (at - line * HEADS) // tiles
        origin = line * HEADS + head * tiles  # of this unit and head, in the line
        stop = tl.minimum(origin + tiles, end)
        skipped = 0
        if WINDOW:
            skipped = tl.maximum(start - window + 1, 0) // TILE
        acc, top, total = _attend_run(
            queries, q_stride, kv + head * HEAD_STRIDE,
            table + page_row.to(tl.int64) * table_stride, at - origin + skipped,
            stop - origin + skipped, first, start, size, head, scale, soft_cap, window,
            GROUP, TOKENS, ROWS, TILE, PAGE, DIM, WIDTH, PAGE_STRIDE, VALUES_STRIDE, TOKEN_STRIDE,
            WINDOW, SOFT_CAP, PRECISION, FP8,
        )  # fmt: skip
        if stop - at == tiles:
            _write(
                acc, total, out, out_token_stride, out_head_stride, first, size, head, GROUP, DIM
            )
        else:
            row = tl.arange(0, ROWS)
            d = tl.arange(0, WIDTH)
            slot = 2 * index + (at != index * share).to(tl.int32)
            kept = row < KEPT
            where = slot * KEPT + row
            tl.store(sums + where[:, None] * WIDTH + d[None, :], acc, mask=kept[:, None])
            tl.store(states + slot * KEPT + where, top, mask=kept)
            tl.store(states + slot * KEPT + where + KEPT, total, mask=kept)
            tl.debug_barrier()  # all threads' stores before the one that announces them
            parts = (origin + tiles - 1) // share - origin // share + 1
            before = tl.atomic_add(arrived + unit * HEADS + head, 1, sem="acq_rel", scope="gpu")
            if before == parts - 1:
                tl.debug_barrier()
                both, weight = _add_up(sums, states, origin, share, parts, KEPT, WIDTH, PARTS)
                _write(
                    both, weight, out, out_token_stride, out_head_stride, first, size, head,
                    GROUP, DIM,
                )  # fmt: skip
                tl.store(arrived + unit * HEADS + head, 0)
        at = stop
        if stop == (line + tiles) * HEADS:
            unit += 1
            line += tiles
            page_row, first, start = next_page_row, next_first, next_start
            size, tiles = next_size, next_tiles


@triton.jit(do_not_specialize=["layer", "table_stride", "max_units", "window"])
def unit_kernel(  # noqa: PLR0913
    queries, kv, table, out, units, totals, layer, q_stride, out_token_stride, out_head_stride,
    table_stride, max_units, window, scale, soft_cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_STRIDE: tl.constexpr, LAYER_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Whole units, one after the other, the last (of most tiles) first."""
    begin(EARLY)
    num_units = tl.load(totals)
    kv += layer.to(tl.int64) * LAYER_STRIDE
    for item in tl.range(tl.program_id(0), num_units * HEADS, tl.num_programs(0)):
        unit = num_units - 1 - item // HEADS
        head = item % HEADS
        page_row = tl.load(units + unit)
        first = tl.load(units + max_units + unit)
        start = tl.load(units + 2 * max_units + unit)
        size = tl.load(units + 3 * max_units + unit)
        skipped = 0
        if WINDOW:
            skipped = tl.maximum(start - window + 1, 0) // TILE
        last_tile = (start + size + TILE - 1) // TILE
        acc, _, total = _attend_run(
            queries, q_stride, kv + head * HEAD_STRIDE,
            table + page_row.to(tl.int64) * table_stride, skipped, last_tile, first, start, size,
            head, scale, soft_cap, window,
            GROUP, TOKENS, ROWS, TILE, PAGE, DIM, WIDTH, PAGE_STRIDE, VALUES_STRIDE, TOKEN_STRIDE,
            WINDOW, SOFT_CAP, PRECISION, FP8,
        )  # fmt: skip
        _write(acc, total, out, out_token_stride, out_head_stride, first, size, head, GROUP, DIM)
