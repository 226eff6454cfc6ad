"""Paged attention: one kernel, specialised for decoding and for longer queries.

Work is cut into items, (KV head, tile of a row's queries), that threads take one by one. An item
sees its row's pages in chunks of 128 tokens: scores, online softmax, weighted values. Each item
is computed whole by one thread, in one order, so results do not depend on who took it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numba import float32

from octavo.ops import fp8
from octavo.ops.cpu.fp8 import LIFT, read_scales
from octavo.ops.cpu.isa import Isa
from octavo.ops.cpu.jit import FIRST_ARGUMENT, ITEMS, NEXT, SCRATCH, TICKET
from octavo.ops.cpu.memory import (
    load,
    load_arguments,
    load_float64,
    load_int32,
    load_int64,
    take,
)
from octavo.ops.cpu.tiles import (
    BF16,
    BF16_DOT,
    DOT,
    FP8,
    FP8_DOT,
    FP32,
    cap_row,
    convert_row,
    fetch,
    fill,
    page_scores,
    page_values,
    scale_row,
    softmax_row,
    write_row,
)

ARGUMENTS = "13q2d"  # in the order that the kernel reads them
_KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.uint8: FP8, fp8.KV_DTYPE: FP8}
_CHUNK_TOKENS = 128
_TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for. ``group`` = query heads a KV head."""

    group: int
    head_dim: int
    page_size: int
    bf16: bool  # queries and output
    kv: int  # what K and V are: FP32, BF16 or FP8

    def mode(self, isa: Isa, lanes: int) -> int:
        """Products of bf16 where K and V are no wider, if the machine multiplies such pairs. Of fp8
        they would round queries of fp32, which are kept for their precision."""
        dot = isa.bf16_dot and lanes == 16
        if self.kv == FP8:
            return FP8_DOT if dot and self.bf16 else FP8
        return BF16_DOT if dot and self.kv == BF16 else self.kv

    def tile_tokens(self, decode: bool) -> int:
        return 1 if decode else max(1, _TILE_ROWS // self.group)


def make_attention(  # noqa: C901, PLR0915  (sizes reach a kernel only as its closure: one piece)
    shape: AttentionShape, isa: Isa, decode: bool
) -> tuple[Callable[[int], None], str, int]:
    """The kernel's Python function, its name, and the scratch bytes a thread needs."""
    G, D, P = shape.group, shape.head_dim, shape.page_size
    block, blocks = _blocks(shape.tile_tokens(decode) * G)
    rows = block * blocks
    lanes, registers = min(isa.lanes, D & -D, P & -P), isa.registers
    mode = shape.mode(isa, lanes)
    bf16, q_bf16, is_fp8 = shape.bf16, mode in DOT, shape.kv == FP8
    element = 2 if bf16 else 4
    chunk = P * max(1, _CHUNK_TOKENS // P)
    q_row, weight_bytes = (D * 2, 2) if q_bf16 else (D * 4, 4)
    at_scores = rows * q_row
    at_sums = at_scores + rows * chunk * 4
    at_maxima = at_sums + rows * D * 4
    at_totals = at_maxima + rows * 4
    at_factors = at_totals + rows * 4  # scales of the chunk's V
    thread_scratch = -(-(at_factors + chunk * 4) // 4096) * 4096
    head_page = kv_bytes(shape.kv, P, D)
    masked, lowest, lift = np.float32(-np.inf), np.float32(-1e30), np.float32(LIFT)
    log2_e = np.float32(np.log2(np.e))

    def attend(arguments):  # noqa: C901
        queries = load_int64(arguments, SCRATCH) + take(arguments, TICKET) * thread_scratch
        scores, sums = queries + at_scores, queries + at_sums
        maxima, totals, factors = queries + at_maxima, queries + at_totals, queries + at_factors
        items = load_int64(arguments, ITEMS)
        (
            query, query_token, out, out_token, pages, page_bytes, to_values, head_bytes,
            table, table_row, tiles, kv_heads, window,
        ) = load_arguments(arguments, FIRST_ARGUMENT, 13)  # fmt: skip
        scale = load_float64(arguments, FIRST_ARGUMENT + 13)
        cap = load_float64(arguments, FIRST_ARGUMENT + 14)
        item = take(arguments, NEXT)
        while item < items:
            tile = tiles + item // kv_heads * 16
            head = item % kv_heads
            row, token = load_int32(tile, 0), load_int32(tile, 1)
            used = load_int32(tile, 2) * G
            first = load_int32(tile, 3)  # position of the tile's first query
            end = first + load_int32(tile, 2)
            for r in range(used):
                at = (token + r // G) * query_token + (head * G + r % G) * D
                if is_fp8:
                    convert_row(query + at * element, sums, D, lanes, bf16, False)
                    write_row(sums, lift, queries + r * q_row, D, lanes, q_bf16)
                else:
                    convert_row(query + at * element, queries + r * q_row, D, lanes, bf16, q_bf16)
            fill(queries, used * q_row // 4, rows * q_row // 4, float32(0.0))
            fill(sums, 0, rows * D, float32(0.0))
            fill(maxima, 0, rows, lowest)
            fill(totals, 0, rows, float32(0.0))

            begin = max(0, first - window + 1) // P * P if window > 0 else 0
            while begin < end:
                tokens = min(chunk, end - begin)
                used_pages = (tokens + P - 1) // P
                padded = used_pages * P
                entry = table + (row * table_row + begin // P) * 4
                keys = pages + head * head_bytes
                for p in range(used_pages):
                    page = keys + load_int32(entry, p) * page_bytes
                    fetch(page + to_values, head_page)
                    if is_fp8:
                        read_scales(page + to_values + D * P, factors + p * P * 4, P, lanes)
                    for b in range(blocks):
                        page_scores(
                            queries + b * block * q_row, page,
                            scores + (b * block * chunk + p * P) * 4,
                            block, D, P, chunk, lanes, mode,
                        )  # fmt: skip
                if is_fp8:
                    fill(factors, tokens, padded, float32(0.0))
                for r in range(used):
                    weights = scores + r * chunk * 4
                    if cap > 0:
                        cap_row(weights, padded, scale, cap, lanes)
                    seen = first + r // G + 1 - begin  # of this chunk, from its start
                    if window > 0:
                        fill(weights, 0, min(seen - window, padded), masked)
                    fill(weights, max(0, seen), padded, masked)
                    shrink = softmax_row(
                        weights, padded, maxima + r * 4, totals + r * 4,
                        log2_e if cap > 0 else scale * log2_e, factors, lanes, mode,
                    )  # fmt: skip
                    if shrink != 1:
                        scale_row(sums + r * D * 4, shrink, D, lanes)
                for p in range(used_pages):
                    page = keys + load_int32(entry, p) * page_bytes
                    if begin + chunk + p * P < end:
                        fetch(keys + load_int32(entry, p + chunk // P) * page_bytes, head_page)
                    for b in range(blocks):
                        page_values(
                            scores + b * block * chunk * 4 + p * P * weight_bytes,
                            page + to_values, sums + b * block * D * 4, min(P, tokens - p * P),
                            block, D, chunk, lanes, registers, mode,
                        )  # fmt: skip
                begin += chunk

            for r in range(used):
                at = (token + r // G) * out_token + (head * G + r % G) * D
                inverse = (lift if is_fp8 else float32(1.0)) / load(totals, r, False)
                write_row(sums + r * D * 4, inverse, out + at * element, D, lanes, bf16)
            item = take(arguments, NEXT)

    phase = "decode" if decode else "prefill"
    name = f"attend_{phase}_{G}_{D}_{P}_{lanes}_{registers}_{mode}_{int(bf16)}"
    return attend, name, thread_scratch


def kv_kind(pages: torch.dtype) -> int:
    """What pages of this type hold: FP32, BF16 or FP8."""
    return _KINDS[pages]


def kv_bytes(kind: int, page_size: int, head_dim: int) -> int:
    """Bytes of one head's keys in a page."""
    if kind == FP8:
        return fp8.head_bytes(page_size, head_dim)
    return page_size * head_dim * (2 if kind == BF16 else 4)


def has_order(pages: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether there is an order of elements for such pages: neighbours must be whole."""
    width = {FP32: 1, BF16: 2, FP8: 4}.get(_KINDS.get(pages, -1), 0)
    return width > 0 and head_dim % max(2, width) == 0 and page_size % width == 0


def _blocks(tile: int) -> tuple[int, int]:
    """Rows a block and blocks a tile: 3 or 4 rows, whichever wastes fewer, or all of a few."""
    block = tile if tile <= 4 else min((4, 3), key=lambda size: -tile % size)
    return block, -(-tile // block)


def plan_tiles(
    query_start: np.ndarray, context_len: np.ndarray, tile_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut rows into tiles: int32 [*, 4] of (row, first token, tokens, position), for one-query
    rows and for all longer ones. Long tiles come first, so that threads end together.
    """
    counts = np.diff(query_start)
    positions = context_len - counts
    single = np.flatnonzero(counts == 1)
    ones = np.stack(
        (single, query_start[single], np.ones_like(single), positions[single]), axis=1
    ).astype(np.int32)
    longer = np.flatnonzero(counts > 1)
    if not longer.size:
        return ones, np.empty((0, 4), np.int32)
    per_row = -(-counts[longer] // tile_tokens)
    rows = np.repeat(longer, per_row)
    skipped = (np.arange(rows.size) - np.repeat(per_row.cumsum() - per_row, per_row)) * tile_tokens
    sizes = np.minimum(tile_tokens, counts[rows] - skipped)
    tiles = np.stack((rows, query_start[rows] + skipped, sizes, positions[rows] + skipped), axis=1)
    order = np.argsort(-(tiles[:, 3] * tiles[:, 2]), kind="stable")
    return ones, np.ascontiguousarray(tiles[order], dtype=np.int32)
