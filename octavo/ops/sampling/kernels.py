"""Numba kernels of the CPU sampler. Each takes an argument block and works through rows.

The layout of a block: :mod:`octavo.ops.cpu.jit`; its first argument is the vocabulary's size.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from octavo.ops.cpu.jit import FIRST_ARGUMENT, ITEMS, NEXT
from octavo.ops.cpu.memory import load_int64, take
from octavo.ops.sampling.exponential import sum_exp
from octavo.ops.sampling.reference import BLOCK, OK
from octavo.ops.sampling.rows import (
    NO_CUT,
    code_id,
    cut_top_k,
    cut_top_p,
    first_of,
    key_value,
    penalise_row,
    race,
    rank_of,
    row_status,
    scan,
    take_best,
)


@intrinsic
def _advance(typing, pointer, offset):
    """``pointer`` plus ``offset`` bytes."""

    def emit(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return types.voidptr(types.voidptr, types.int64), emit


@intrinsic
def _to_pointer(typing, address):
    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


@njit
def _argument(block, position):
    return _to_pointer(load_int64(block, FIRST_ARGUMENT + position))


def draw(block):
    """:meth:`octavo.ops.sampling.reference.SamplingOps.draw`, by an argument block."""
    rows, size = load_int64(block, ITEMS), load_int64(block, FIRST_ARGUMENT)
    logits = carray(_argument(block, 1), (rows, size), np.float32)
    temperature = carray(_argument(block, 2), rows, np.float64)
    top_k = carray(_argument(block, 3), rows, np.int64)
    top_p = carray(_argument(block, 4), rows, np.float64)
    min_p = carray(_argument(block, 5), rows, np.float64)
    seed = carray(_argument(block, 6), rows, np.uint64)
    index = carray(_argument(block, 7), rows, np.uint64)
    ids = carray(_argument(block, 8), rows, np.int64)
    status = carray(_argument(block, 9), rows, np.int8)
    block_max = np.empty(-(-size // BLOCK), np.int32)
    codes, weights = np.empty(size + 1, np.int64), np.empty(size + 1, np.float64)
    r = take(block, NEXT)
    while r < rows:
        row, t, k, p = logits[r], temperature[r], top_k[r], top_p[r]
        best = scan(row.view(np.int32), block_max)
        status[r] = row_status(best)
        if status[r] != OK or t == 0.0:
            ids[r] = first_of(row, block_max, best)
        else:
            cut = NO_CUT
            if 0 < k < size:
                cut = cut_top_k(row, block_max, best, k, p, t, codes, weights)
            elif p < 1.0:
                cut = cut_top_p(row, block_max, best, p, t, codes, weights)
            ids[r] = race(row, block_max, best, cut, t, min_p[r], seed[r], index[r])
        r = take(block, NEXT)


def check(block):
    """:meth:`octavo.ops.sampling.reference.SamplingOps.status`, by an argument block."""
    count, size = load_int64(block, ITEMS), load_int64(block, FIRST_ARGUMENT)
    logits = _argument(block, 1)
    rows = carray(_argument(block, 2), count, np.int64)
    status = carray(_argument(block, 3), count, np.int8)
    block_max = np.empty(-(-size // BLOCK), np.int32)
    j = take(block, NEXT)
    while j < count:
        row = carray(_advance(logits, rows[j] * size * 4), size, np.float32)
        status[j] = row_status(scan(row.view(np.int32), block_max))
        j = take(block, NEXT)


def penalise(block):
    """:meth:`octavo.ops.sampling.reference.SamplingOps.penalise`, by an argument block."""
    count, size = load_int64(block, ITEMS), load_int64(block, FIRST_ARGUMENT)
    logits, counts = _argument(block, 1), _argument(block, 2)
    rows = carray(_argument(block, 3), count, np.int64)
    count_rows = carray(_argument(block, 4), count, np.int64)
    repetition = carray(_argument(block, 5), count, np.float32)
    frequency = carray(_argument(block, 6), count, np.float32)
    presence = carray(_argument(block, 7), count, np.float32)
    j = take(block, NEXT)
    while j < count:
        row = carray(_advance(logits, rows[j] * size * 4), size, np.float32)
        seen = carray(_advance(counts, count_rows[j] * size * 4), size, np.int32)
        penalise_row(row, seen, repetition[j], frequency[j], presence[j])
        j = take(block, NEXT)


def top_logprobs(block):
    """:meth:`octavo.ops.sampling.reference.SamplingOps.top_logprobs`, by an argument block."""
    rows, size = load_int64(block, ITEMS), load_int64(block, FIRST_ARGUMENT)
    k = load_int64(block, FIRST_ARGUMENT + 1)
    logits = carray(_argument(block, 2), (rows, size), np.float32)
    targets = carray(_argument(block, 3), rows, np.int64)
    own = carray(_argument(block, 4), rows, np.float64)
    rank = carray(_argument(block, 5), rows, np.int64)
    ids = carray(_argument(block, 6), (rows, k), np.int64)
    values = carray(_argument(block, 7), (rows, k), np.float64)
    block_max = np.empty(-(-size // BLOCK), np.int32)
    codes, weights = np.empty(size + 1, np.int64), np.empty(size + 1, np.float64)
    r = take(block, NEXT)
    while r < rows:
        row = logits[r]
        top = key_value(scan(row.view(np.int32), block_max))
        total = top + math.log(sum_exp(row, top, 1.0))
        own[r] = row[targets[r]] - total
        rank[r] = rank_of(row, targets[r])
        if k > 0:
            take_best(row, block_max, k, codes, weights)
        for j in range(k):
            ids[r, j] = code_id(codes[j])
            values[r, j] = row[ids[r, j]] - total
        r = take(block, NEXT)
