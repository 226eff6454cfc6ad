"""What of each row may be drawn, found without sorting it: one scan, then blocks that can matter.

A row cut by top_k is its last retained code, found by halving a range of codes until one is left.
One cut by top_p is the weight that the ids before a retained one may have. Weights and sums are
fp64; nothing depends on timing. See :mod:`octavo.ops.sampling.reference` for the rule.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import keys
from octavo.ops.triton.early import begin

_SLACK = tl.constexpr(1.0 - 1e-9)  # TOP_P_SLACK


@triton.jit
def _cuts_rank(top_k, size):
    return (top_k > 0) & (top_k < size)


@triton.jit
def _store_masses(
    row, masses, first, num_blocks, size, temperature, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """Sums of exp((x - best x of the block) / temperature) of BLOCKS blocks, a few at a time."""
    few: tl.constexpr = 4 if BLOCKS >= 4 else BLOCKS
    for base in range(0, BLOCKS, few):
        block = first + base + tl.arange(0, few)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(row + token, mask=token < size, other=float("-inf")).to(tl.float64)
        best = tl.max(x, 1)
        best = tl.where(best > float("-inf"), best, 0.0)
        mass = tl.sum(tl.exp((x - best[:, None]) * keys.inverse_of(temperature)), 1)
        tl.store(masses + block, mass, mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_blocks"])
def scan_kernel(
    logits, temperatures, top_ks, top_ps, block_keys, block_ids, masses, size, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Best key of each block and its lowest id: int32 [N, blocks] both. BLOCKS a program.

    In rows that use top_p without top_k, which leaves few ids to weigh, also each block's weight
    relative to its best id's, fp64 [N, blocks]."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    lane = tl.arange(0, BLOCK)[None, :]
    token = block[:, None] * BLOCK + lane
    real = token < size
    begin(EARLY)
    x = tl.load(logits + row * size + token, mask=real, other=float("-inf"))
    key = tl.where(real, keys.key_of(x), keys.LOWEST)
    best = tl.max(key, 1)
    first = tl.min(tl.where(key == best[:, None], lane, BLOCK), 1)
    at = row * num_blocks + block
    tl.store(block_keys + at, best, mask=block < num_blocks)
    tl.store(block_ids + at, block * BLOCK + first, mask=block < num_blocks)
    temperature = tl.load(temperatures + row)
    cuts_rank = _cuts_rank(tl.load(top_ks + row), size)
    if (temperature > 0) & (tl.load(top_ps + row) < 1.0) & (not cuts_rank):
        _store_masses(
            logits + row * size, masses + row * num_blocks, tl.program_id(1) * BLOCKS, num_blocks,
            size, temperature, BLOCK, BLOCKS,
        )  # fmt: skip


@triton.jit
def _count(
    row, blocks, count, size, low, high,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many codes of the listed blocks lie in (low, high]."""
    number = tl.zeros([TILE], tl.int32)
    for base in range(0, count * BLOCK, TILE):
        code, _ = keys.load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        number += ((code > low) & (code <= high)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def _halve(low, high, steps, BITS: tl.constexpr):
    """A code between two: in the middle of their logits or, every other time, of the codes, which
    alone comes to an end."""
    middle = low + ((high - low) >> 1)
    best = keys.value_of(keys.key_of_code(low, BITS))
    worst = keys.value_of(keys.key_of_code(high, BITS))
    key = keys.key_of((0.5 * best + 0.5 * worst).to(tl.float32))
    between = keys.code_of(key, tl.full([], (1 << BITS) - 1, tl.int32), BITS)
    usable = (steps % 2 == 0) & (between > low) & (between < high)
    return tl.where(usable, between, middle)


@triton.jit
def _select(  # noqa: PLR0913
    row, block_key, num_blocks, blocks, codes, size, low, high, wanted,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Code number ``wanted`` (from 1) of those in (low, high]. At most KEPT codes, in ``codes``,
    are searched in registers."""
    count = keys.list_blocks(block_key, num_blocks, keys.key_of_code(high, BITS), blocks, WIDTH)
    number = _count(row, blocks, count, size, low, high, BITS, BLOCK, TILE)
    steps = number * 0
    while number > KEPT:
        middle = _halve(low, high, steps, BITS)
        n = _count(row, blocks, count, size, low, middle, BITS, BLOCK, TILE)
        steps += 1
        if n >= wanted:
            high = middle
            number = n
        else:
            low = middle
            number -= n
            wanted -= n
    taken = number * 0
    for base in range(0, count * BLOCK, TILE):
        code, _ = keys.load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        inside = (code > low) & (code <= high)
        place = taken + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(codes + place, code, mask=inside)
        taken += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    at = tl.arange(0, KEPT)
    code = tl.load(codes + at, mask=at < taken, other=keys.NO_CUT)
    high = tl.max(tl.where(code <= high, code, low), 0)
    while number > 1:
        middle = low + ((high - low) >> 1)
        inside = (code > low) & (code <= middle)
        n = tl.sum(inside.to(tl.int32), 0)
        if n >= wanted:
            number = n
            high = tl.max(tl.where(inside, code, low), 0)
        else:
            low = middle
            number -= n
            wanted -= n
    return high


@triton.jit
def _nth_key(block_key, num_blocks, n, WIDTH: tl.constexpr):
    """The n-th largest of the keys of at least n blocks: at least n ids reach it."""
    real = tl.arange(0, WIDTH) < num_blocks
    low = tl.min(tl.where(real, block_key, keys.ABS), 0).to(tl.int64)
    high = tl.max(tl.where(real, block_key, keys.LOWEST), 0).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        reached = tl.sum((real & (block_key.to(tl.int64) >= middle)).to(tl.int32), 0)
        if reached >= n:
            low = middle
        else:
            high = middle - 1
    return low.to(tl.int32)


@triton.jit(do_not_specialize=["num_blocks"])
def cut_kernel(  # noqa: PLR0913
    logits, block_keys, masses, temperatures, top_ks, top_ps, blocks, codes, cuts, wanteds, size,
    num_blocks, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, KEPT: tl.constexpr,
    WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The last code that top_k keeps, int64 [N], and the weight, fp64 [N], that top_p wants of
    the ids up to it: an id is retained if those before it weigh less.

    A row a program; ``blocks`` int32 [N, blocks] and ``codes`` int64 [N, KEPT] are its own to
    write to."""
    index = tl.program_id(0).to(tl.int64)
    begin(EARLY)
    temperature = tl.load(temperatures + index)
    top_k = tl.load(top_ks + index)
    top_p = tl.load(top_ps + index)
    block = tl.arange(0, WIDTH)
    at = index * num_blocks + block
    block_key = tl.load(block_keys + at, mask=block < num_blocks, other=keys.LOWEST)
    best = tl.max(block_key, 0)
    cuts_rank = _cuts_rank(top_k, size)
    cut = tl.full([], keys.NO_CUT, tl.int64)
    wanted = tl.full([], float("inf"), tl.float64)
    if (temperature > 0) & (best < keys.INF) & (best > -keys.INF):
        row = logits + index * size
        blocks += index * num_blocks
        top = keys.value_of(best)
        lowest = tl.full([], -keys.INF, tl.int32)
        if cuts_rank:
            least = lowest
            if top_k <= num_blocks:
                least = tl.maximum(_nth_key(block_key, num_blocks, top_k, WIDTH), lowest)
            first = keys.code_of(best, best * 0, BITS)
            last = keys.code_of(least, tl.full([], (1 << BITS) - 1, tl.int32), BITS)
            cut = _select(
                row, block_key, num_blocks, blocks, codes + index * KEPT, size, first - 1, last,
                top_k.to(tl.int32), BITS, BLOCK, TILE, KEPT, WIDTH,
            )  # fmt: skip
        if top_p < 1.0:
            if cuts_rank:
                lightest = tl.maximum(keys.key_of_code(cut, BITS), lowest)
                count = keys.list_blocks(block_key, num_blocks, lightest, blocks, WIDTH)
                mass = keys.mass_of(
                    row, blocks, count, size, cut, top, temperature, BITS, BLOCK, TILE
                )
            else:
                own = tl.load(masses + at, mask=block < num_blocks, other=0.0)
                heaviest = keys.value_of(tl.maximum(block_key, lowest))
                mass = tl.sum(own * tl.exp((heaviest - top) * keys.inverse_of(temperature)), 0)
            wanted = mass * (top_p * _SLACK)
    tl.store(cuts + index, cut)
    tl.store(wanteds + index, wanted)
