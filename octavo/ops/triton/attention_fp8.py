"""Attention over tiles of fp8 pages: products of fp16, of codes as they are.

Codes are read as words of four, in the order of :mod:`octavo.ops.triton.fp8`, and each of the four
is a product of its own: no byte has to find its place in a tile. A word of keys holds four
neighbouring features, so a score is the sum of four products, with queries split alike. A word of
values holds four tokens, whose weights one thread of a tensor core has.

Scales of keys multiply scores. A scale of values is 2^power · fraction: the power goes into the
exponent, where the softmax keeps it in range, and the fraction multiplies the weight. So weights
times scales are fp16 whatever the values are, of LIFT bits at most to keep small ones exact.

Few query rows lie along the short side of the products (``flipped``), so that little of a tensor
core is idle: scores are [TILE, ROWS] and sums [WIDTH, ROWS]. Otherwise they are [ROWS, TILE] and
[ROWS, WIDTH]. ``AXIS`` is the one along which a vector of tokens is constant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import fp8
from octavo.ops.triton.softmax import LOG2E, hide, load_pages, load_rows, tanh

_LIFT = tl.constexpr(14.0)
_LARGEST = tl.constexpr(65504.0)


@triton.jit
def load_queries(
    queries, at, real, WIDTH: tl.constexpr, DIM: tl.constexpr, FLIPPED: tl.constexpr
):  # fmt: skip
    """Features 0, 4, 8 … of the rows at ``at`` [rows], features 1, 5, 9 …, and so on: four of
    [rows, WIDTH / 4], or flipped; fp16 unless they are fp32. fp16 saturates."""
    AXIS: tl.constexpr = 1 if FLIPPED else 0
    d = 4 * tl.arange(0, WIDTH // 4)
    there = tl.expand_dims(real, 1 - AXIS) & tl.expand_dims(d < DIM, AXIS)
    at = queries + tl.expand_dims(at, 1 - AXIS) + tl.expand_dims(d, AXIS)
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
    FLIPPED: tl.constexpr,
):  # fmt: skip
    """As for plain pages; ``q`` from :func:`load_queries`."""
    AXIS: tl.constexpr = 1 if FLIPPED else 0
    WIDTH: tl.constexpr = acc.shape[1 - AXIS]
    chunk = 16 * tl.arange(0, TILE // 16)
    # Masked tiles of a unit are few: loaded ahead, they would take as much shared memory as all
    # others, and fewer programs would fit.
    for tile in tl.range(first_tile, last_tile, num_stages=1 if MASK and not WINDOW else None):
        start = tile * TILE
        token = start + _columns(TILE, FLIPPED)
        seen = token < high
        page = start + chunk
        page_seen = page < high
        if WINDOW:
            seen &= token >= low
            page_seen &= page + 15 >= low
        head = keys + load_pages(table, page, page_seen, PAGE, PAGE_STRIDE, MASK)
        codes = _load_chunks(head + page % PAGE * DIM, page_seen, WIDTH, DIM, MASK)
        k = fp8.numbers(_key_rows(codes, DIM, FLIPPED), q[0].dtype, FP8)
        score = tl.zeros([TILE, top.shape[0]] if FLIPPED else [top.shape[0], TILE], tl.float32)
        for i in tl.static_range(4):
            if FLIPPED:
                score = tl.dot(k[i], q[i], score, input_precision=PRECISION)
            else:
                score = tl.dot(q[i], tl.trans(k[i]), score, input_precision=PRECISION)

        at = head + PAGE * DIM + page % PAGE * 2
        of_keys = _scales(at, page_seen, token, MASK, FLIPPED) * (scale * fp8.UNIT[FP8])
        of_values = _scales(at + VALUES_STRIDE, page_seen, token, MASK, FLIPPED)
        if MASK:  # what nobody wrote may be NaN
            of_values = tl.where(seen, of_values, 1.0)
        power = (of_values.to(tl.int32, bitcast=True) >> 23) - 127
        inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
        power = tl.expand_dims(power.to(tl.float32), AXIS)
        if SOFT_CAP:
            score = soft_cap * tanh(score * tl.expand_dims(of_keys / soft_cap, AXIS))
            score = score * LOG2E + power
        else:
            score = score * tl.expand_dims(of_keys * LOG2E, AXIS) + power
        if MASK:
            score = hide(
                score, tl.expand_dims(token, AXIS), tl.expand_dims(seen, AXIS),
                tl.expand_dims(position, 1 - AXIS), window, TOKENS, WINDOW,
            )  # fmt: skip

        new_top = tl.maximum(top, tl.max(score, 1 - AXIS))
        weight = tl.exp2(score - tl.expand_dims(new_top - _LIFT, 1 - AXIS))
        shrink = tl.exp2(top - new_top)
        part = tl.sum(weight * tl.expand_dims(inverse, AXIS), 1 - AXIS)
        total = total * shrink + part
        acc = acc * tl.expand_dims(shrink, 1 - AXIS)
        fraction = (of_values * inverse).to(q[0].dtype)
        weight = weight.to(q[0].dtype) * tl.expand_dims(fraction, AXIS)
        w = _quarters(weight, FLIPPED)
        at = head + VALUES_STRIDE + page % PAGE * DIM
        codes = _value_rows(_load_chunks(at, page_seen, WIDTH, DIM, MASK))
        if MASK:
            codes &= _kept(start, low, high, TILE, WINDOW)[:, None]
        v = fp8.numbers(tl.trans(codes) if FLIPPED else codes, q[0].dtype, FP8)
        for i in tl.static_range(4):
            if FLIPPED:
                acc = tl.dot(v[i], w[i], acc, input_precision=PRECISION)
            else:
                acc = tl.dot(w[i], v[i], acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


# A token's place among 32 is five bits: c its chunk, h (of 8), j (two bits) and i (the last).
# Tensor cores spread three bits of a row over lanes and keep the others in a thread, where the
# four of a word must be: so flipped scores are in the order (h, i, c, j), others in their own,
# (c, h, j, i). Values are in the order (j, c), for each word.


@triton.jit
def _columns(TILE: tl.constexpr, FLIPPED: tl.constexpr):
    """Which token each row or column of scores is."""
    n = tl.arange(0, TILE)
    if FLIPPED:
        n = n // 32 * 32 + n % 8 // 4 * 16 + n % 32 // 16 * 8 + n % 4 * 2 + n % 16 // 8
    return n


@triton.jit
def _load_chunks(at, seen, WIDTH: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr):
    """Words [chunks, 4 · WIDTH] of the chunks at ``at``, as they lie in memory: whole rows of a
    cache. Some are of tokens that nobody sees: such scores are hidden, such values masked out."""
    word = tl.arange(0, 4 * WIDTH)
    at = fp8.words(at)[:, None] + word[None, :]
    return load_rows(at, seen, 4 * DIM, MASK)


@triton.jit
def _key_rows(codes, DIM: tl.constexpr, FLIPPED: tl.constexpr):
    """[TILE, WIDTH / 4] in the order of scores, of keys [chunks, 4 · WIDTH]."""
    SIZE: tl.constexpr = fp8.key_group(DIM)
    GROUPS: tl.constexpr = codes.shape[1] // 16 // SIZE
    x = tl.reshape(codes, [codes.shape[0] // 2, 2, GROUPS, 2, 2, 4, SIZE])
    if FLIPPED:
        x = tl.permute(x, [0, 3, 4, 1, 5, 2, 6])
    else:
        x = tl.permute(x, [0, 1, 3, 5, 4, 2, 6])
    return tl.reshape(x, [codes.shape[0] * 16, GROUPS * SIZE])


@triton.jit
def _value_rows(codes):
    """[TILE / 4, WIDTH] of values [chunks, 4 · WIDTH]."""
    WIDTH: tl.constexpr = codes.shape[1] // 4
    x = tl.reshape(codes, [codes.shape[0] // 2, 2, WIDTH // 8, 4, 8])
    return tl.reshape(tl.permute(x, [0, 3, 1, 2, 4]), [codes.shape[0] * 4, WIDTH])


@triton.jit
def _scales(at, seen, token, MASK: tl.constexpr, FLIPPED: tl.constexpr):
    """fp32 [TILE] in the order of scores, of the chunks whose scales are at ``at``; zeros where a
    chunk is not ``seen``. Words, not halves, because those can be copied ahead."""
    at = fp8.words(at)[:, None] + (tl.arange(0, 16) // 2)[None, :]
    if MASK:
        pairs = tl.load(at, mask=seen[:, None], other=0)
    else:
        pairs = tl.load(at)
    if FLIPPED:
        pairs = tl.reshape(pairs, [at.shape[0] // 2, 2, 2, 4, 2])
        pairs = tl.permute(pairs, [0, 2, 4, 1, 3])
    pairs = tl.reshape(pairs, [token.shape[0]])
    half = tl.where(token % 2 == 0, pairs, pairs >> 16)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _quarters(x, FLIPPED: tl.constexpr):
    """[TILE, rows] as four of [TILE / 4, rows], or the same flipped: one for each byte of a word of
    values."""
    if FLIPPED:
        ROWS: tl.constexpr = x.shape[1]
        x = tl.reshape(x, [x.shape[0] // 32, 2, 2, 2, 4, ROWS])
        x = tl.permute(x, [0, 4, 3, 5, 1, 2])
        x = tl.reshape(x, [x.shape[0] * 8, ROWS, 2, 2])
    else:
        x = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 2, 4, 2])
        x = tl.permute(x, [0, 1, 4, 2, 3, 5])
        x = tl.reshape(x, [x.shape[0], x.shape[1] * 8, 2, 2])
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _kept(start, low, high, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Masks [TILE / 4] of words of values: the bytes of tokens within [low, high)."""
    row = tl.arange(0, TILE // 4)
    token = start + row // 8 * 32 + row % 2 * 16 + row % 8 // 2 * 2
    kept = token * 0
    for byte in tl.static_range(4):
        of_byte = token + byte % 2 + byte // 2 * 8
        inside = of_byte < high
        if WINDOW:
            inside &= of_byte >= low
        kept |= tl.where(inside, 0xFF, 0) << (8 * byte)
    return kept
