"""Attention over tiles of fp8 pages: products of fp16, of codes as they are.

Codes are read four at a time, as words of 32 bits, and each of the four is a product of its own: no
byte has to find its place in a tile. A word of keys holds four neighbours of a token, so a score is
the sum of four products, with queries split alike. A word of values holds tokens 2j, 2j + 1, 2j + 8
and 2j + 9 of a feature (:mod:`octavo.ops.triton.fp8`), where a tensor core has the weights of such
four in one thread.

Scales of keys multiply scores. A scale of values is 2^power · fraction: the power goes into the
exponent, where the softmax keeps it in range, and the fraction multiplies the weight. So weights
times scales are fp16 whatever the values are, of LIFT bits at most to keep small ones exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import fp8
from octavo.ops.triton.softmax import LOG2E, hide, load_pages, load_rows, tanh

_LIFT = tl.constexpr(14.0)
_LARGEST = tl.constexpr(65504.0)


@triton.jit
def load_queries(queries, at, real, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Features 0, 4, 8 … of the rows at ``at`` [rows], features 1, 5, 9 …, and so on: four of
    [rows, WIDTH / 4], fp16 unless they are fp32. fp16 saturates."""
    d = 4 * tl.arange(0, WIDTH // 4)
    there = real[:, None] & (d < DIM)[None, :]
    at = queries + at[:, None] + d[None, :]
    return (_load_narrow(at, there), _load_narrow(at + 1, there), _load_narrow(at + 2, there),
            _load_narrow(at + 3, there))  # fmt: skip


@triton.jit
def _load_narrow(at, there):
    x = tl.load(at, mask=there, other=0.0)
    if x.dtype != tl.float32:
        wide = x.to(tl.float32)
        x = tl.minimum(tl.maximum(wide, -_LARGEST), _LARGEST).to(tl.float16)
    return x


@triton.jit
def attend_tiles(  # noqa: PLR0913
    q, acc, top, total, first_tile, last_tile, low, high, position, keys, table, scale, soft_cap,
    window, MASK: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    DIM: tl.constexpr, PAGE_STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """As for plain pages; ``q`` from :func:`load_queries`."""
    word = tl.arange(0, q[0].shape[1])
    d = tl.arange(0, acc.shape[1])
    for tile in tl.range(first_tile, last_tile):
        token = tile * TILE + tl.arange(0, TILE)
        seen = token < high
        if WINDOW:
            seen &= token >= low
        page = load_pages(table, token, seen, PAGE, PAGE_STRIDE, MASK)
        at = fp8.words(keys + page + token % PAGE * DIM)
        codes = load_rows(at[:, None] + word[None, :], seen, DIM // 4, MASK)
        k = fp8.numbers(codes, q[0].dtype, FP8)
        score = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)
        score = tl.dot(q[1], tl.trans(k[1]), score, input_precision=PRECISION)
        score = tl.dot(q[2], tl.trans(k[2]), score, input_precision=PRECISION)
        score = tl.dot(q[3], tl.trans(k[3]), score, input_precision=PRECISION)

        pair = tile * TILE + 2 * tl.arange(0, TILE // 2)
        pair_seen = pair < high
        if WINDOW:
            pair_seen &= pair + 1 >= low
        page = load_pages(table, pair, pair_seen, PAGE, PAGE_STRIDE, MASK)
        at = fp8.words(keys + page + PAGE * DIM + pair % PAGE * 2)
        of_keys = _scales(at, pair_seen, MASK) * (scale * fp8.UNIT[FP8])
        of_values = _scales(at + VALUES_STRIDE // 4, pair_seen, MASK)
        if MASK:  # what nobody wrote may be NaN
            of_values = tl.where(seen, of_values, 1.0)
        power = (of_values.to(tl.int32, bitcast=True) >> 23) - 127
        inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
        power = power.to(tl.float32)
        if SOFT_CAP:
            score = soft_cap * tanh(score * (of_keys / soft_cap)[None, :])
            score = score * LOG2E + power[None, :]
        else:
            score = score * (of_keys * LOG2E)[None, :] + power[None, :]
        if MASK:
            score = hide(score, token, seen, position, window, TOKENS, WINDOW)

        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - (new_top - _LIFT)[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight * inverse[None, :], 1)
        acc = acc * shrink[:, None]
        weight = weight.to(q[0].dtype) * (of_values * inverse).to(q[0].dtype)[None, :]
        w = _quarters(weight)
        row = tl.arange(0, TILE // 4)
        token = tile * TILE + row // 8 * 32 + row % 2 * 16 + row % 8 // 2 * 2
        row_seen = token < high
        if WINDOW:
            row_seen &= token + 9 >= low
        page = load_pages(table, token, row_seen, PAGE, PAGE_STRIDE, MASK)
        line = token % PAGE // 16 * 4 + token % 16 // 2
        at = fp8.words(keys + page + VALUES_STRIDE + line * (4 * DIM))
        codes = load_rows(at[:, None] + d[None, :], row_seen, DIM, MASK)
        if MASK:
            codes &= _kept(token, low, high, WINDOW)[:, None]
        v = fp8.numbers(codes, q[0].dtype, FP8)
        acc = tl.dot(w[0], v[0], acc, input_precision=PRECISION)
        acc = tl.dot(w[1], v[1], acc, input_precision=PRECISION)
        acc = tl.dot(w[2], v[2], acc, input_precision=PRECISION)
        acc = tl.dot(w[3], v[3], acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit
def _scales(at, seen, MASK: tl.constexpr):
    """fp32 [2 · n] of the pairs of fp16 at ``at`` [n]; zeros where not ``seen``."""
    if MASK:
        pairs = tl.load(at, mask=seen, other=0)
    else:
        pairs = tl.load(at)
    both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(both, [2 * at.shape[0]]).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _quarters(x):
    """[rows, TILE] as four of [rows, TILE / 4], by which byte of a word a token is.

    Column c of 32 is bits (chunk of 16, byte / 2, j, byte % 2), j of two bits; in its quarter it
    is (j, chunk): the order in which tensor cores take weights, so that none moves."""
    PAIRS: tl.constexpr = x.shape[1] // 32
    x = tl.reshape(x, [x.shape[0], PAIRS, 2, 2, 4, 2])
    x = tl.permute(x, [0, 1, 4, 2, 3, 5])
    x = tl.reshape(x, [x.shape[0], PAIRS * 8, 2, 2])
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _kept(token, low, high, WINDOW: tl.constexpr):
    """Masks of words of values: the bytes of tokens ``token`` + 0, 1, 8, 9 within [low, high)."""
    kept = token * 0
    for byte in tl.static_range(4):
        of_byte = token + byte % 2 + byte // 2 * 8
        inside = of_byte < high
        if WINDOW:
            inside &= of_byte >= low
        kept |= tl.where(inside, 0xFF, 0) << (8 * byte)
    return kept
