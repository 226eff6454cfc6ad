"""Sampling on CPU, one row of logits at a time: functions for Numba kernels to call.

Order. Floats are compared as int32 *keys*: a monotone map of the bits in which both
zeros are equal and every NaN is above infinity. A *code* is the int64
``(-key << 32) | id``: ascending codes are descending logits, lowest id first on ties, and no
two are equal. A truncated row is then just its last retained code, the *cut*.

A row is scanned once for the maximum of each block of ``BLOCK`` ids. The m-th largest of
these is below at least m logits, so the ids at or above it are a small superset of
the m best, found by visiting few blocks.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from octavo.ops.sampling.exponential import (
    FAST_SUM_ERROR,
    exp,
    sum_exp,
    sum_exp_fast,
    summing,
)
from octavo.ops.sampling.reference import (
    ALL_MASKED,
    BLOCK,
    NON_FINITE,
    OK,
    PROMPT_FLAG,
    TOP_P_SLACK,
)

_kernel = njit(error_model="numpy")

_I = np.int32
_ABS = np.int32(0x7FFFFFFF)
_INF = np.int32(0x7F800000)
_NEG_INF = np.int32(-0x7F800000)
_LOWEST = np.int32(-0x80000000)
NO_CUT = np.int64(0x7FFFFFFFFFFFFFFF)
_COUNT = np.int32(PROMPT_FLAG - 1)

# Candidates of top_p above which ids lie so close that only the exact sum can tell them apart,
# and above which a histogram of the row costs less than sorting them out.
_SOME, _MANY = 400, 12_000
_LAST_BUCKET = np.float32(511.0)
_WAYS = 4  # copies of the histogram
_FEW = 16  # sorted by insertion rather than partitioned further

_MASK = np.uint64(0xFFFFFFFF)
_U12 = np.uint64(12)
_U20 = np.uint64(20)
_U32 = np.uint64(32)
_PHILOX_M0 = np.uint64(0xD2511F53)
_PHILOX_M1 = np.uint64(0xCD9E8D57)
_PHILOX_W0 = np.uint64(0x9E3779B9)
_PHILOX_W1 = np.uint64(0xBB67AE85)
_ZERO = np.uint64(0)
_TOKEN_STREAM = np.uint64(0)
_BLOCK_STREAM = np.uint64(1)


# --- order ---------------------------------------------------------------------------------


@_kernel
def _key(bits):
    """Monotone int32 of an fp32's bits; INT32_MAX for NaN. Casts keep Numba from widening."""
    magnitude = _I(bits & _ABS)
    key = magnitude if bits >= _I(0) else _I(-magnitude)
    return _ABS if magnitude > _INF else key


@_kernel
def _key_of(value):
    return _key(np.float32(value).view(np.int32))


@_kernel
def _code(key, token):
    return (-np.int64(key) << 32) | np.int64(token)


@_kernel
def _code_key(code):
    return _I(-(code >> 32))


@_kernel
def code_id(code):
    return code & np.int64(0xFFFFFFFF)


@_kernel
def key_value(key):
    """The logit of a key, as a float64."""
    bits = key if key >= _I(0) else _I(_LOWEST - key)
    return np.float64(_I(bits).view(np.float32))


@_kernel
def scan(bits, block_max):
    """Largest key of each block of a row; returns the largest of all."""
    size = bits.shape[0]
    full = size // BLOCK
    best = _LOWEST
    for block in range(full):
        largest = _LOWEST
        for j in range(BLOCK):
            key = _key(bits[block * BLOCK + j])
            largest = key if key > largest else largest
        block_max[block] = largest
        best = largest if largest > best else best
    if full * BLOCK < size:
        largest = _LOWEST
        for i in range(full * BLOCK, size):
            largest = max(largest, _key(bits[i]))
        block_max[full] = largest
        best = max(best, largest)
    return _I(best)


@_kernel
def row_status(best):
    if best >= _INF:
        return NON_FINITE
    return ALL_MASKED if best <= _NEG_INF else OK


@_kernel
def first_of(row, block_max, best):
    """Lowest id whose key is ``best``."""
    for block in range(block_max.shape[0]):
        if block_max[block] == best:
            for i in range(block * BLOCK, min(row.shape[0], (block + 1) * BLOCK)):
                if _key_of(row[i]) == best:
                    return i
    return 0


# --- selection -----------------------------------------------------------------------------


@_kernel
def _sort(codes, weights, low, high):
    """Sort a few codes by insertion; weights move along."""
    for i in range(low + 1, high):
        code, weight, j = codes[i], weights[i], i
        while j > low and codes[j - 1] > code:
            codes[j], weights[j] = codes[j - 1], weights[j - 1]
            j -= 1
        codes[j], weights[j] = code, weight


@_kernel
def _select(codes, weights, size, target):
    """Position of the first code in ascending order at which the summed weights reach ``target``.

    Also returns the sum there. Quickselect by weight: afterwards ``codes[: position + 1]`` are
    exactly the codes up to it, in some order, and ``weights`` moved along. If all weights together
    do not reach the target, that is all of them.
    """
    low, high, reached = 0, size, 0.0
    state = np.uint64(size)
    while high - low > _FEW:
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        pivot = codes[low + np.int64((state >> np.uint64(33)) % np.uint64(high - low))]
        middle, mass = low, 0.0
        for i in range(low, high):  # Lomuto without branches: codes up to the pivot go first
            code, weight = codes[i], weights[i]
            codes[i], weights[i] = codes[middle], weights[middle]
            codes[middle], weights[middle] = code, weight
            small = np.int64(code <= pivot)
            mass += weight * np.float64(small)
            middle += small
        if reached + mass >= target and middle < high:
            high = middle
        elif middle < high:
            reached += mass
            low = middle
        # middle == high: the pivot was the largest; the next pivot will differ.
    _sort(codes, weights, low, high)
    for i in range(low, high):
        reached += weights[i]
        if reached >= target:
            return i, reached
    return high - 1, reached


@_kernel
def _collect(row, block_max, threshold, codes):
    """Codes of all ids whose key is at least ``threshold``; returns how many.

    Branch-free, so ``codes`` needs room for one more than the row.
    """
    size = row.shape[0]
    value = np.float32(key_value(threshold))
    count = 0
    for block in range(block_max.shape[0]):
        if block_max[block] >= threshold:
            start = block * BLOCK
            for i in range(start, min(size, start + BLOCK)):
                codes[count] = _code(_key_of(row[i]), i)
                count += row[i] >= value
    return count


@summing
def _weigh(codes, weights, size, top, inverse_temperature):
    """Unnormalised probabilities of the first ``size`` codes; returns their sum."""
    total = 0.0
    for i in range(size):
        value = key_value(_code_key(codes[i]))
        weights[i] = exp((value - top) * inverse_temperature)
        total += weights[i]
    return total


@_kernel
def _nth_block_max(block_max, n, codes, weights):
    """A key that at least n of the row's keys reach (the n-th largest block maximum)."""
    blocks = block_max.shape[0]
    if n > blocks:
        return _NEG_INF
    for block in range(blocks):
        codes[block] = _code(block_max[block], block)
        weights[block] = 1.0
    position, _ = _select(codes, weights, blocks, np.float64(n))
    return _code_key(codes[position])


@_kernel
def cut_top_k(row, block_max, best, top_k, top_p, temperature, codes, weights):
    """Last code kept by top_k and then, on the renormalised rest, top_p."""
    size = _collect(row, block_max, _nth_block_max(block_max, top_k, codes, weights), codes)
    weights[:size] = 1.0
    position, _ = _select(codes, weights, size, np.float64(top_k))
    if top_p < 1.0:
        kept = position + 1
        total = _weigh(codes, weights, kept, key_value(best), min(1.0 / temperature, 1e30))
        position, _ = _select(codes, weights, kept, total * top_p * (1.0 - TOP_P_SLACK))
    return codes[position]


@_kernel
def cut_top_p(row, block_max, best, top_p, temperature, codes, weights):
    """Last code kept by top_p: the smallest prefix with at least its share of the mass.

    All ids lighter than (1 - share) · mass / vocabulary together weigh less than what may be
    cut, so only heavier ones are candidates. The mass is first known within the error of the
    fast sum; if the two ends of that could cut differently, it is summed exactly.
    """
    top, size = key_value(best), row.shape[0]
    inverse = min(1.0 / temperature, 1e30)
    share = top_p * (1.0 - TOP_P_SLACK)
    total = sum_exp_fast(row, top, inverse)
    lightest = -np.inf
    spare = (1.0 - share * (1.0 + FAST_SUM_ERROR)) * (1.0 - 2.0 * FAST_SUM_ERROR)
    if spare > 0.0:
        lightest = top + temperature * math.log(spare * total / size)
        lightest -= 1e-6 * abs(lightest)
    heavy = _count_from(row, np.float32(lightest))
    if heavy > _MANY:
        count, before, total = _crossing_bucket(row, top, lightest, share, inverse, codes, weights)
        _weigh(codes, weights, count, top, inverse)
        position, _ = _select(codes, weights, count, total * share - before)
        return codes[position]
    error = FAST_SUM_ERROR
    if heavy > _SOME:
        total, error = sum_exp(row, top, inverse), 0.0
    count = _collect(row, block_max, _key_of(np.float32(lightest)), codes)
    _weigh(codes, weights, count, top, inverse)
    position, reached = _select(codes, weights, count, total * share * (1.0 - error))
    if reached < total * share * (1.0 + error):
        total = sum_exp(row, top, inverse)
        position, _ = _select(codes, weights, count, total * share)
    return codes[position]


@_kernel
def _count_from(row, least):
    count = 0
    for i in range(row.shape[0]):
        count += row[i] >= least
    return count


@_kernel
def _bucket(value, top, scale):
    """Monotone in the logit, so a lower bucket holds only higher logits."""
    return _I(min(np.float32(top - value) * scale, _LAST_BUCKET))


@_kernel
def _crossing_bucket(row, top, lightest, share, inverse, codes, weights):
    """Codes of the ids in whose bucket of logits the mass reaches its share.

    For flat rows: a histogram of the mass, exact, in place of sorting thousands of candidates.
    Returns how many codes, the mass before them and the total mass.
    """
    top_32 = np.float32(top)
    scale = np.float32(_LAST_BUCKET / max(top - lightest, 1e-30))
    masses = np.zeros((_WAYS, _I(_LAST_BUCKET) + 1), np.float64)
    buckets = np.empty(BLOCK, np.int32)
    size = row.shape[0]
    for start in range(0, size, BLOCK):
        length = min(BLOCK, size - start)
        for j in range(length):
            weights[j] = exp((np.float64(row[start + j]) - top) * inverse)
            buckets[j] = _bucket(row[start + j], top_32, scale)
        for j in range(length):  # neighbours add to different copies: no sum waits for the last
            masses[j % _WAYS, buckets[j]] += weights[j]
    mass = masses.sum(0)
    total, before, wanted = mass.sum(), 0.0, 0
    while wanted < _I(_LAST_BUCKET) and before + mass[wanted] < total * share:
        before += mass[wanted]
        wanted += 1
    return _collect_bucket(row, top_32, scale, _I(wanted), codes), before, total


@_kernel
def _collect_bucket(row, top, scale, wanted, codes):
    count, size = 0, row.shape[0]
    for start in range(0, size, BLOCK):
        end = min(size, start + BLOCK)
        hits = _I(0)
        for i in range(start, end):
            hits = _I(hits + _I(_bucket(row[i], top, scale) == wanted))
        if hits > _I(0):
            for i in range(start, end):
                codes[count] = _code(_key_of(row[i]), i)
                count += _bucket(row[i], top, scale) == wanted
    return count


# --- the draw ------------------------------------------------------------------------------


@_kernel
def philox(key, c0, c1, c2, c3):
    """Philox 4x32-10, as :func:`octavo.ops.sampling.reference.philox`, in uint64."""
    k0, k1 = key & _MASK, key >> _U32
    for _ in range(10):
        first, second = _PHILOX_M0 * c0, _PHILOX_M1 * c2
        c0 = (second >> _U32) ^ c1 ^ k0
        c2 = (first >> _U32) ^ c3 ^ k1
        c1, c3 = second & _MASK, first & _MASK
        k0, k1 = (k0 + _PHILOX_W0) & _MASK, (k1 + _PHILOX_W1) & _MASK
    return c0, c1, c2, c3


@_kernel
def _exponential(high, low):
    """Exp(1) from two 32-bit words, by 52 bits that are never 0 or 1."""
    bits = (high << _U20) | (low >> _U12)
    return -math.log((np.float64(bits) + 0.5) * 2.0**-52)


@_kernel
def race(row, block_max, best, cut, temperature, min_p, seed, index):
    """The retained id of highest score s - log(E); see :mod:`octavo.ops.sampling.reference`.

    A block's smallest E is drawn first, so a block or an id that cannot win even with it
    is passed over without drawing more.
    """
    top = key_value(best)
    least = math.log(min_p) if min_p > 0.0 else -np.inf
    winner, score = np.int64(-1), -np.inf
    for block in range(block_max.shape[0]):
        key = block_max[block]
        if _code(key, block * BLOCK) > cut:
            continue
        bound = (key_value(key) - top) / temperature
        if bound < least:
            continue
        w0, w1, w2, _ = philox(seed, np.uint64(block), index, _BLOCK_STREAM, _ZERO)
        smallest = _exponential(w0, w1) / BLOCK
        lead = -math.log(smallest)
        if bound + lead < score:
            continue
        holder = np.int64(w2 % np.uint64(BLOCK))
        for j in range(min(BLOCK, row.shape[0] - block * BLOCK)):
            i = block * BLOCK + j
            s = (np.float64(row[i]) - top) / temperature
            if s + lead < score or s < least or _code(_key_of(row[i]), i) > cut:
                continue
            own = s + lead
            if j != holder:
                w0, w1, _, _ = philox(seed, np.uint64(i), index, _TOKEN_STREAM, _ZERO)
                own = s - math.log(smallest + _exponential(w0, w1))
            if own > score:
                winner, score = np.int64(i), own
    return winner


# --- penalties and log-probabilities -------------------------------------------------------


@_kernel
def penalise_row(row, counts, repetition, frequency, presence):
    """All in fp32, as the reference."""
    zero = np.float32(0.0)
    for i in range(row.shape[0]):
        z, count = row[i], counts[i]
        repeated = z / repetition if z > zero else z * repetition
        z = repeated if count != _I(0) else z
        outputs = np.float32(_I(count & _COUNT))
        z = np.float32(z - np.float32(frequency * outputs))
        row[i] = np.float32(z - (presence if outputs > zero else zero))


@_kernel
def rank_of(row, target):
    """1-based position of an id in the order of the row."""
    value = row[target]
    rank = 1
    for i in range(row.shape[0]):
        rank += row[i] > value
    for i in range(target):
        rank += row[i] == value
    return rank


@_kernel
def take_best(row, block_max, k, codes, weights):
    """Leaves the codes of the k best ids, in order, at the start of ``codes``."""
    threshold = _nth_block_max(block_max, k, codes, weights)
    count = _collect(row, block_max, threshold, codes)
    weights[:count] = 1.0
    _select(codes, weights, count, np.float64(k))
    _sort(codes, weights, 0, k)
