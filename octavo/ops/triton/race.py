"""Exact draws on a GPU, by the rule of :mod:`octavo.ops.sampling.reference`: rows race.

A block's smallest exponential is drawn first, so that only ids are drawn that can still win. Scores
are fp64; nothing depends on timing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import keys
from octavo.ops.triton.early import begin

_NON_FINITE = tl.constexpr(1)
_ALL_MASKED = tl.constexpr(2)
_TOKEN_STREAM = tl.constexpr(0)
_BLOCK_STREAM = tl.constexpr(1)


@triton.jit
def _exponential(high, low):
    """Exp(1) from two 32-bit words, by 52 bits that are never 0 or 1."""
    bits = (high.to(tl.int64) << 20) | (low.to(tl.int64) >> 12)
    return -tl.log((bits.to(tl.float64) + 0.5) * (1.0 / (1 << 52)))


@triton.jit
def _philox(seed, counter, index, stream):
    """Four words of Philox 4x32-10 for counters (counter, index, stream, 0)."""
    zero = counter * 0
    return tl.philox(seed, counter, zero + index.to(tl.int32), zero + stream, zero)


@triton.jit
def _own_score(s, token, holder, lead, smallest, seed, index, kept):
    """Perturbed scores of ids of blocks whose smallest draw is given; -inf unless ``kept``."""
    high, low, _, _ = _philox(seed, token, index, _TOKEN_STREAM)
    score = tl.where(token == holder, s + lead, s - tl.log(smallest + _exponential(high, low)))
    return tl.where(kept, score, float("-inf"))


@triton.jit
def _race_picked(
    row, picked, taken, top, temperature, seed, index, BLOCK: tl.constexpr, KEPT: tl.constexpr
):
    """The highest perturbed score of the ids in ``picked``, and its id."""
    tl.debug_barrier()  # all threads' ids before any is read
    place = tl.arange(0, KEPT)
    there = place < taken
    token = tl.load(picked + place, mask=there, other=0)
    x = tl.load(row + token, mask=there, other=float("-inf"))
    tl.debug_barrier()  # and all read before others take their place
    block = token // BLOCK
    high, low, third, _ = _philox(seed, block, index, _BLOCK_STREAM)
    smallest = _exponential(high, low) / BLOCK
    holder = block * BLOCK + (third % BLOCK).to(tl.int32)
    s = (x.to(tl.float64) - top) / temperature
    score = _own_score(s, token, holder, -tl.log(smallest), smallest, seed, index, there)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(there & (score == best), token, keys.ABS), 0)


@triton.jit
def _race(  # noqa: PLR0913
    row, block_keys, block_ids, num_blocks, blocks, leads, picked, size, high, least, top,
    temperature, seed, index, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    KEPT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The id of highest perturbed score among codes up to ``high`` and scores from ``least`` on.

    The best id and the holder of each block race first; then only ids are drawn that could still
    win."""
    block = tl.arange(0, WIDTH)
    real = block < num_blocks
    key = tl.load(block_keys + block, mask=real, other=keys.LOWEST)
    best_id = tl.load(block_ids + block, mask=real, other=keys.ABS)
    first, second, third, _ = _philox(seed, block, index, _BLOCK_STREAM)
    smallest = _exponential(first, second) / BLOCK
    lead = -tl.log(smallest)
    holder = block * BLOCK + (third % BLOCK).to(tl.int32)
    tl.store(leads + block, lead, mask=real)

    s = (keys.value_of(tl.maximum(key, -keys.INF)) - top) / temperature
    kept = real & (key > -keys.INF) & (keys.code_of(key, best_id, BITS) <= high) & (s >= least)
    score = _own_score(s, best_id, holder, lead, smallest, seed, index, kept)
    bound = tl.where(kept, s + lead, float("-inf"))
    highest = tl.max(score, 0)
    winner = tl.min(tl.where(score == highest, best_id, keys.ABS), 0)

    x = tl.load(row + holder, mask=kept & (holder < size), other=float("-inf"))
    s = (x.to(tl.float64) - top) / temperature
    kept = (
        kept & (holder < size) & (keys.code_of(keys.key_of(x), holder, BITS) <= high) & (s >= least)
    )
    score = tl.where(kept, s + lead, float("-inf"))
    of_holders = tl.max(score, 0)
    if of_holders > highest:
        highest = of_holders
        winner = tl.min(tl.where(score == of_holders, holder, keys.ABS), 0)

    count = keys.list_chosen(bound > highest, blocks, WIDTH)
    taken = count * 0
    for base in range(0, count * BLOCK, TILE):
        spot = base + tl.arange(0, TILE)
        listed = spot < count * BLOCK
        of = tl.load(blocks + spot // BLOCK, mask=listed, other=0)
        token = of * BLOCK + spot % BLOCK
        listed = listed & (token < size)
        v = tl.load(row + token, mask=listed, other=float("-inf"))
        scaled = (v.to(tl.float64) - top) / temperature
        able = listed & (keys.code_of(keys.key_of(v), token, BITS) <= high) & (scaled >= least)
        able = able & (scaled + tl.load(leads + of, mask=listed, other=0.0) > highest)
        number = tl.sum(able.to(tl.int32), 0)
        if taken + number > KEPT:
            own, its_id = _race_picked(
                row, picked, taken, top, temperature, seed, index, BLOCK, KEPT
            )
            if own > highest:
                highest = own
                winner = its_id
            taken = taken * 0
        tl.store(picked + taken + tl.cumsum(able.to(tl.int32), 0) - 1, token, mask=able)
        taken += number
    if taken > 0:
        own, its_id = _race_picked(row, picked, taken, top, temperature, seed, index, BLOCK, KEPT)
        if own > highest:
            winner = its_id
    return winner


@triton.jit(do_not_specialize=["num_blocks"])
def race_kernel(  # noqa: PLR0913
    logits, block_keys, block_ids, cuts, wanteds, temperatures, min_ps, seeds, indices, ids,
    statuses, blocks, leads, picked, size, num_blocks, BITS: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, RACED: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The retained id of highest perturbed score, int64 [N], and the row's status, int8 [N].

    A row a program. A winner that those before it show to be past top_p's share is out, with all
    after it, and the rest races again: so 1 - top_p of the rows race more than once. RACED ids are
    raced at a time, TILE weighed. ``blocks`` int32 and ``leads`` fp64 [N, blocks], and ``picked``
    int32 [N, KEPT] are its own to write to."""
    place = tl.program_id(0).to(tl.int64)
    begin(EARLY)
    temperature = tl.load(temperatures + place)
    block_keys += place * num_blocks
    block_ids += place * num_blocks
    block = tl.arange(0, WIDTH)
    real = block < num_blocks
    key = tl.load(block_keys + block, mask=real, other=keys.LOWEST)
    best_id = tl.load(block_ids + block, mask=real, other=keys.ABS)
    best = tl.max(key, 0)
    winner = tl.min(tl.where(key == best, best_id, keys.ABS), 0)
    status = tl.where(best >= keys.INF, _NON_FINITE, tl.where(best <= -keys.INF, _ALL_MASKED, 0))
    if (temperature > 0) & (status == 0):
        row = logits + place * size
        high = tl.load(cuts + place)
        wanted = tl.load(wanteds + place)
        seed = tl.load(seeds + place)
        index = tl.load(indices + place)
        min_p = tl.load(min_ps + place)
        least = tl.log(tl.maximum(min_p, 1e-300))
        least = tl.where(min_p > 0, least, float("-inf"))
        top = keys.value_of(best)
        blocks += place * num_blocks
        before = wanted
        while before >= wanted:
            winner = _race(
                row, block_keys, block_ids, num_blocks, blocks, leads + place * num_blocks,
                picked + place * KEPT, size, high, least, top, temperature, seed, index,
                BITS, BLOCK, RACED, KEPT, WIDTH,
            )  # fmt: skip
            before = tl.full([], -1.0, tl.float64)
            if wanted < float("inf"):
                own_key = keys.key_of(tl.load(row + winner))
                high = keys.code_of(own_key, winner, BITS) - 1
                key = tl.load(block_keys + block, mask=real, other=keys.LOWEST)
                count = keys.list_blocks(key, num_blocks, own_key, blocks, WIDTH)
                before = keys.mass_of(
                    row, blocks, count, size, high, top, temperature, BITS, BLOCK, TILE
                )
    tl.store(ids + place, winner.to(tl.int64))
    tl.store(statuses + place, status.to(tl.int8))
