"""Paged attention: one kernel, specialised for decoding and for longer queries.

Work is cut into items, (KV head, tile of a row's queries), that threads take one by one. An item
sees its row's pages in chunks of 128 tokens: scores, online softmax, weighted values. Each item
is computed whole by one thread, in one order, so results do not depend on who took it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import float32

from octavo.ops.cpu.isa import Isa
from octavo.ops.cpu.jit import FIRST_ARGUMENT, ITEMS, NEXT, SCRATCH, TICKET
from octavo.ops.cpu.memory import load, load_float64, load_int32, load_int64, take
from octavo.ops.cpu.tiles import (
    BF16,
    BF16_DOT,
    FP32,
    cap_row,
    convert_row,
    fill,
    page_scores,
    page_values,
    scale_row,
    softmax_row,
    write_row,
)

ARGUMENTS = "13q2d"  # in the order that the kernel reads them
_CHUNK_TOKENS = 128
_TILE_ROWS = 16


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for. ``group`` = query heads a KV head."""

    group: int
    head_dim: int
    page_size: int
    bf16: bool  # queries and output
    kv_bf16: bool

    @property
    def supported(self) -> bool:
        """Pair order needs even sizes; anything else runs on the reference."""
        return self.head_dim % 2 == 0 and (self.page_size % 2 == 0 or not self.kv_bf16)

    def tile_tokens(self, decode: bool) -> int:
        return 1 if decode else max(1, _TILE_ROWS // self.group)


def make_attention(
    shape: AttentionShape, isa: Isa, decode: bool
) -> tuple[Callable[[int], None], str, int]:
    """The kernel's Python function, its name, and the scratch bytes a thread needs."""
    G, D, P = shape.group, shape.head_dim, shape.page_size
    tile = shape.tile_tokens(decode) * G
    block = _block_rows(tile)  # rows whose sums are in registers together
    rows = -(-tile // block) * block
    lanes = min(isa.lanes, D & -D, P & -P)
    registers = isa.registers
    mode = FP32 if not shape.kv_bf16 else BF16
    if shape.kv_bf16 and isa.bf16_dot and lanes == 16:
        mode = BF16_DOT
    bf16, q_bf16 = shape.bf16, mode == BF16_DOT
    chunk = P * max(1, _CHUNK_TOKENS // P)
    q_row, score_row, sum_row = D * (2 if q_bf16 else 4), chunk * 4, D * 4
    at_scores = rows * q_row
    at_sums = at_scores + rows * score_row
    at_state = at_sums + rows * sum_row
    thread_scratch = -(-(at_state + rows * 8) // 4096) * 4096
    element = 2 if bf16 else 4
    masked = np.float32(-np.inf)

    def attend(block_address):
        scratch = load_int64(block_address, SCRATCH)
        scratch += take(block_address, TICKET) * thread_scratch
        items = load_int64(block_address, ITEMS)
        query = load_int64(block_address, FIRST_ARGUMENT)
        query_token = load_int64(block_address, FIRST_ARGUMENT + 1)
        out = load_int64(block_address, FIRST_ARGUMENT + 2)
        out_token = load_int64(block_address, FIRST_ARGUMENT + 3)
        pages = load_int64(block_address, FIRST_ARGUMENT + 4)
        page_bytes = load_int64(block_address, FIRST_ARGUMENT + 5)
        values_at = load_int64(block_address, FIRST_ARGUMENT + 6)
        head_bytes = load_int64(block_address, FIRST_ARGUMENT + 7)
        table = load_int64(block_address, FIRST_ARGUMENT + 8)
        table_row = load_int64(block_address, FIRST_ARGUMENT + 9)
        tiles = load_int64(block_address, FIRST_ARGUMENT + 10)
        kv_heads = load_int64(block_address, FIRST_ARGUMENT + 11)
        window = load_int64(block_address, FIRST_ARGUMENT + 12)
        scale = load_float64(block_address, FIRST_ARGUMENT + 13)
        cap = load_float64(block_address, FIRST_ARGUMENT + 14)
        softmax_scale = float32(1.0) if cap > 0 else scale
        scores, sums, state = scratch + at_scores, scratch + at_sums, scratch + at_state

        item = take(block_address, NEXT)
        while item < items:
            number = item // kv_heads
            head = item - number * kv_heads
            row = load_int32(tiles, number * 4)
            token = load_int32(tiles, number * 4 + 1)
            count = load_int32(tiles, number * 4 + 2)
            first = load_int32(tiles, number * 4 + 3)  # position of the tile's first query
            used = count * G
            for r in range(used):
                source = query + ((token + r // G) * query_token + (head * G + r % G) * D) * element
                convert_row(source, scratch + r * q_row, D, lanes, bf16, q_bf16)
            fill(scratch, used * q_row // 4, rows * q_row // 4, float32(0.0))
            fill(sums, 0, rows * D, float32(0.0))
            for r in range(rows):
                fill(state, r * 2, r * 2 + 1, float32(-1e30))
                fill(state, r * 2 + 1, r * 2 + 2, float32(0.0))

            begin = max(0, first - window + 1) // P * P if window > 0 else 0
            while begin < first + count:
                tokens = min(chunk, first + count - begin)
                used_pages = (tokens + P - 1) // P
                entry = row * table_row + begin // P
                for p in range(used_pages):
                    keys = pages + load_int32(table, entry + p) * page_bytes + head * head_bytes
                    for b in range(0, rows, block):
                        target = scores + b * score_row + p * P * 4
                        page_scores(
                            scratch + b * q_row, keys, target, block, D, P, chunk, lanes, mode
                        )
                for r in range(used):
                    row_scores = scores + r * score_row
                    if cap > 0:
                        cap_row(row_scores, used_pages * P, scale, cap, lanes)
                    seen = first + r // G + 1 - begin  # of this chunk, from its start
                    if window > 0:
                        fill(row_scores, 0, min(seen - window, used_pages * P), masked)
                    fill(row_scores, max(0, seen), used_pages * P, masked)
                    shrink = softmax_row(
                        row_scores, used_pages * P, state + r * 8, softmax_scale, lanes, mode
                    )
                    if shrink != 1:
                        scale_row(sums + r * sum_row, shrink, D, lanes)
                for p in range(used_pages):
                    values = pages + load_int32(table, entry + p) * page_bytes + head * head_bytes
                    weights = scores + p * P * (2 if q_bf16 else 4)
                    left = min(P, tokens - p * P)
                    for b in range(0, rows, block):
                        page_values(
                            weights + b * score_row,
                            values + values_at,
                            sums + b * sum_row,
                            left,
                            block,
                            D,
                            chunk,
                            lanes,
                            registers,
                            mode,
                        )
                begin += chunk

            for r in range(used):
                target = out + ((token + r // G) * out_token + (head * G + r % G) * D) * element
                inverse = float32(1.0) / load(state, r * 2 + 1, False)
                write_row(sums + r * sum_row, inverse, target, D, lanes, bf16)
            item = take(block_address, NEXT)

    phase = "decode" if decode else "prefill"
    name = f"attend_{phase}_{G}_{D}_{P}_{lanes}_{mode}_{int(bf16)}_{registers}"
    return attend, name, thread_scratch


def _block_rows(tile: int) -> int:
    """Rows a block: 3 or 4, whichever wastes fewer; a smaller tile is one block."""
    return tile if tile <= 4 else min((4, 3), key=lambda size: -tile % size)


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
