"""Logits as integers in their order, and the few blocks of a row that can matter.

A *key* is an int32 that orders logits, a *code* the int64 ``(-key << BITS) | id``: ascending codes
are descending logits, lowest id first on ties. BITS tell an id from another. A row of ids lies in
blocks of BLOCK; WIDTH is the number of blocks, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

ABS = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
LOWEST = tl.constexpr(-0x80000000)  # below every key: no id is there
NO_CUT = tl.constexpr(0x7FFFFFFFFFFFFFFF)


@triton.jit
def key_of(x):
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & ABS
    return tl.where(magnitude > INF, ABS, tl.where(bits >= 0, magnitude, -magnitude))


@triton.jit
def value_of(key):
    """The logit of a key, in fp64."""
    bits = tl.where(key >= 0, key, (-key) | LOWEST)
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def code_of(key, token, BITS: tl.constexpr):
    return (-(key.to(tl.int64)) << BITS) | token.to(tl.int64)


@triton.jit
def key_of_code(code, BITS: tl.constexpr):
    return tl.maximum(-(code >> BITS), -ABS).to(tl.int32)


@triton.jit
def load_codes(
    row, blocks, count, base, size, BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Codes of TILE ids of the listed blocks, from place ``base`` of their line on; NO_CUT past
    the end; and their logits."""
    place = base + tl.arange(0, TILE)
    block = tl.load(blocks + place // BLOCK, mask=place < count * BLOCK, other=0)
    token = block * BLOCK + place % BLOCK
    real = (place < count * BLOCK) & (token < size)
    x = tl.load(row + token, mask=real, other=float("-inf"))
    return tl.where(real, code_of(key_of(x), token, BITS), NO_CUT), x


@triton.jit
def list_chosen(chosen, places, WIDTH: tl.constexpr):
    """Write the indices of the ``chosen`` to ``places``; returns how many."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.debug_barrier()  # whoever still reads an older list
    tl.store(places + place, tl.arange(0, WIDTH), mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def list_blocks(block_key, num_blocks, least, blocks, WIDTH: tl.constexpr):
    """Write the blocks whose best key is at least ``least`` to ``blocks``; returns how many."""
    block = tl.arange(0, WIDTH)
    return list_chosen((block < num_blocks) & (block_key >= least), blocks, WIDTH)


@triton.jit
def inverse_of(temperature):
    """Of a temperature above 0; finite, so that it times 0 is 0."""
    return tl.minimum(1.0 / temperature, 1e300)


@triton.jit
def mass_of(
    row, blocks, count, size, high, top, temperature,
    BITS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Weight, relative to the best id's, of the codes of the listed blocks that are at most
    ``high``."""
    mass = tl.zeros([TILE], tl.float64)
    for base in range(0, count * BLOCK, TILE):
        code, x = load_codes(row, blocks, count, base, size, BITS, BLOCK, TILE)
        weight = tl.exp((x.to(tl.float64) - top) * inverse_of(temperature))
        mass += tl.where(code <= high, weight, 0.0)
    return tl.sum(mass, 0)
