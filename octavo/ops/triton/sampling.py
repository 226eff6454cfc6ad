"""Exact draws on a GPU, by the rule of :mod:`octavo.ops.sampling.reference`: no row is sorted.

As on a CPU (:mod:`octavo.ops.sampling.rows`), a *key* is an int32 that orders logits, a *code* the
int64 ``(-key << BITS) | id``: ascending codes are descending logits, lowest id first on ties. A row
is read once for the best key of each block of BLOCK ids; afterwards only blocks that can matter
are read again. A truncated row is its last retained code, the *cut*, found by halving a range of
codes until one is left. Scores and sums are fp64; nothing depends on timing.

Names: BITS tell an id from another; WIDTH is the number of blocks, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.early import begin

_ABS = tl.constexpr(0x7FFFFFFF)
_INF = tl.constexpr(0x7F800000)
_LOWEST = tl.constexpr(-0x80000000)  # below every key: no id is there
_NO_CUT = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NON_FINITE = tl.constexpr(1)
_ALL_MASKED = tl.constexpr(2)
_TOKEN_STREAM = tl.constexpr(0)
_BLOCK_STREAM = tl.constexpr(1)
_SLACK = tl.constexpr(1.0 - 1e-9)  # TOP_P_SLACK


@triton.jit
def _key(x):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & _ABS
    return tl.where(magnitude > _INF, _ABS, tl.where(bits >= 0, magnitude, -magnitude))


@triton.jit
def _value(key):
    """The logit of a key, in fp64."""
    bits = tl.where(key >= 0, key, (-key) | _LOWEST)
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _code(key, token, BITS: tl.constexpr):
    return (-(key.to(tl.int64)) << BITS) | token.to(tl.int64)


@triton.jit
def _code_key(code, BITS: tl.constexpr):
    return tl.maximum(-(code >> BITS), -_ABS).to(tl.int32)


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
def _cuts_rank(top_k, size):
    return (top_k > 0) & (top_k < size)


@triton.jit
def _inverse(temperature):
    """Of a temperature above 0; finite, so that it times 0 is 0."""
    return tl.minimum(1.0 / temperature, 1e300)


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
        mass = tl.sum(tl.exp((x - best[:, None]) * _inverse(temperature)), 1)
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
    key = tl.where(real, _key(x), _LOWEST)
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
def _load_codes(
    row, blocks, count, base, size, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Codes of TILE ids of the listed blocks, from place ``base`` of their line on; _NO_CUT past
    the end; and their logits."""
    place = base + tl.arange(0, TILE)
    block = tl.load(blocks + place // BLOCK, mask=place < count * BLOCK, other=0)
    token = block * BLOCK + place % BLOCK
    real = (place < count * BLOCK) & (token < size)
    x = tl.load(row + token, mask=real, other=float("-inf"))
    return tl.where(real, _code(_key(x), token, BITS), _NO_CUT), x


@triton.jit
def _count(
    row, blocks, count, size, low, high,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many codes of the listed blocks lie in (low, high]."""
    number = tl.zeros([TILE], tl.int32)
    for base in range(0, count * BLOCK, TILE):
        code, _ = _load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        number += ((code > low) & (code <= high)).to(tl.int32)
    return tl.sum(number, 0)


@triton.jit
def _mass(
    row, blocks, count, size, high, top, temperature,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weight, relative to the best id's, of the codes of the listed blocks that are at most
    ``high``."""
    mass = tl.zeros([TILE], tl.float64)
    for base in range(0, count * BLOCK, TILE):
        code, x = _load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        weight = tl.exp((x.to(tl.float64) - top) * _inverse(temperature))
        mass += tl.where(code <= high, weight, 0.0)
    return tl.sum(mass, 0)


@triton.jit
def _list(chosen, places, WIDTH: tl.constexpr):
    """Write the indices of the ``chosen`` to ``places``; returns how many."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # whoever still reads an older list
    tl.store(places + place, tl.arange(0, WIDTH), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _list_blocks(block_key, num_blocks, least, blocks, WIDTH: tl.constexpr):
    """Write the blocks whose best key is at least ``least`` to ``blocks``; returns how many."""
    block = tl.arange(0, WIDTH)
    return _list((block < num_blocks) & (block_key >= least), blocks, WIDTH)


@triton.jit
def _halve(low, high, steps, BITS: tl.constexpr):
    """A code between two: in the middle of their logits or, every other time, of the codes, which
    alone comes to an end."""
    middle = low + ((high - low) >> 1)
    value = 0.5 * _value(_code_key(low, BITS)) + 0.5 * _value(_code_key(high, BITS))
    between = _code(_key(value.to(tl.float32)), tl.full([], (1 << BITS) - 1, tl.int32), BITS)
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
    count = _list_blocks(block_key, num_blocks, _code_key(high, BITS), blocks, WIDTH)
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
        code, _ = _load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        inside = (code > low) & (code <= high)
        place = taken + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(codes + place, code, mask=inside)
        taken += tl.sum(inside.to(tl.int32), 0)
    tl.debug_barrier()
    at = tl.arange(0, KEPT)
    code = tl.load(codes + at, mask=at < taken, other=_NO_CUT)
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
    low = tl.min(tl.where(real, block_key, _ABS), 0).to(tl.int64)
    high = tl.max(tl.where(real, block_key, _LOWEST), 0).to(tl.int64)
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
    block_key = tl.load(block_keys + at, mask=block < num_blocks, other=_LOWEST)
    best = tl.max(block_key, 0)
    cuts_rank = _cuts_rank(top_k, size)
    cut = tl.full([], _NO_CUT, tl.int64)
    wanted = tl.full([], float("inf"), tl.float64)
    if (temperature > 0) & (best < _INF) & (best > -_INF):
        row = logits + index * size
        blocks += index * num_blocks
        top = _value(best)
        lowest = tl.full([], -_INF, tl.int32)
        if cuts_rank:
            least = lowest
            if top_k <= num_blocks:
                least = tl.maximum(_nth_key(block_key, num_blocks, top_k, WIDTH), lowest)
            last = tl.full([], (1 << BITS) - 1, tl.int32)
            cut = _select(
                row, block_key, num_blocks, blocks, codes + index * KEPT, size,
                _code(best, best * 0, BITS) - 1, _code(least, last, BITS), top_k.to(tl.int32),
                BITS, BLOCK, TILE, KEPT, WIDTH,
            )  # fmt: skip
        if top_p < 1.0:
            if cuts_rank:
                count = _list_blocks(
                    block_key, num_blocks, tl.maximum(_code_key(cut, BITS), lowest), blocks, WIDTH
                )
                mass = _mass(row, blocks, count, size, cut, top, temperature, BITS, BLOCK, TILE)
            else:
                own = tl.load(masses + at, mask=block < num_blocks, other=0.0)
                heaviest = _value(tl.maximum(block_key, lowest))
                mass = tl.sum(own * tl.exp((heaviest - top) * _inverse(temperature)), 0)
            wanted = mass * (top_p * _SLACK)
    tl.store(cuts + index, cut)
    tl.store(wanteds + index, wanted)


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
    return best, tl.min(tl.where(there & (score == best), token, _ABS), 0)


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
    key = tl.load(block_keys + block, mask=real, other=_LOWEST)
    best_id = tl.load(block_ids + block, mask=real, other=_ABS)
    first, second, third, _ = _philox(seed, block, index, _BLOCK_STREAM)
    smallest = _exponential(first, second) / BLOCK
    lead = -tl.log(smallest)
    holder = block * BLOCK + (third % BLOCK).to(tl.int32)
    tl.store(leads + block, lead, mask=real)

    s = (_value(tl.maximum(key, -_INF)) - top) / temperature
    kept = real & (key > -_INF) & (_code(key, best_id, BITS) <= high) & (s >= least)
    score = _own_score(s, best_id, holder, lead, smallest, seed, index, kept)
    bound = tl.where(kept, s + lead, float("-inf"))
    highest = tl.max(score, 0)
    winner = tl.min(tl.where(score == highest, best_id, _ABS), 0)

    x = tl.load(row + holder, mask=kept & (holder < size), other=float("-inf"))
    s = (x.to(tl.float64) - top) / temperature
    kept = kept & (holder < size) & (_code(_key(x), holder, BITS) <= high) & (s >= least)
    score = tl.where(kept, s + lead, float("-inf"))
    of_holders = tl.max(score, 0)
    if of_holders > highest:
        highest = of_holders
        winner = tl.min(tl.where(score == of_holders, holder, _ABS), 0)

    count = _list(bound > highest, blocks, WIDTH)
    taken = count * 0
    for base in range(0, count * BLOCK, TILE):
        spot = base + tl.arange(0, TILE)
        listed = spot < count * BLOCK
        of = tl.load(blocks + spot // BLOCK, mask=listed, other=0)
        token = of * BLOCK + spot % BLOCK
        listed = listed & (token < size)
        v = tl.load(row + token, mask=listed, other=float("-inf"))
        scaled = (v.to(tl.float64) - top) / temperature
        able = listed & (_code(_key(v), token, BITS) <= high) & (scaled >= least)
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
    key = tl.load(block_keys + block, mask=real, other=_LOWEST)
    best_id = tl.load(block_ids + block, mask=real, other=_ABS)
    best = tl.max(key, 0)
    winner = tl.min(tl.where(key == best, best_id, _ABS), 0)
    status = tl.where(best >= _INF, _NON_FINITE, tl.where(best <= -_INF, _ALL_MASKED, 0))
    if (temperature > 0) & (status == 0):
        row = logits + place * size
        high = tl.load(cuts + place)
        wanted = tl.load(wanteds + place)
        seed = tl.load(seeds + place)
        index = tl.load(indices + place)
        min_p = tl.load(min_ps + place)
        least = tl.log(tl.maximum(min_p, 1e-300))
        least = tl.where(min_p > 0, least, float("-inf"))
        top = _value(best)
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
                own_key = _key(tl.load(row + winner))
                high = _code(own_key, winner, BITS) - 1
                key = tl.load(block_keys + block, mask=real, other=_LOWEST)
                count = _list_blocks(key, num_blocks, own_key, blocks, WIDTH)
                before = _mass(row, blocks, count, size, high, top, temperature, BITS, BLOCK, TILE)
    tl.store(ids + place, winner.to(tl.int64))
    tl.store(statuses + place, status.to(tl.int8))
