"""e4m3 codes and fp16 scales in kernels: see :mod:`octavo.ops.fp8` for what they mean.

In a page of Triton's, the codes of a head are words of four, in chunks of 16 tokens. A word of keys
is four neighbouring features; of values, tokens 2j, 2j + 1, 2j + 8 and 2j + 9. Words are in groups
of eight (of keys fewer, where eight do not divide a token's), the reach of a tensor core: a chunk
of keys is [groups][slot of a token][8], slots being tokens 0, 2, 4, 6, 1, 3, 5, 7 and the same plus
8; a chunk of values is [D / 8][j][8]. Scales are in the order of :mod:`octavo.ops.fp8`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.fp8 import PHASES, page_views
from octavo.ops.fp8 import WEIGHT_FLOOR as _WEIGHT_FLOOR
from octavo.ops.triton.tiles import Card

# How codes become numbers: by their bits, on any GPU, or by an instruction for e4m3.
PLAIN, BITS, NATIVE = 0, 1, 2
UNIT = tl.constexpr((1.0, 256.0, 1.0))  # what a number from :func:`numbers` counts
CODES = 4  # in a word
_NATIVE_FROM = 89  # the first compute capability with that instruction

_LARGEST_CODE = tl.constexpr(448.0)
WEIGHT_FLOOR = tl.constexpr(_WEIGHT_FLOOR)
_PHASES, _STEP = tl.constexpr(PHASES), tl.constexpr(1 / PHASES)
_SMALLEST_SCALE, _LARGEST_SCALE = tl.constexpr(2.0**-24), tl.constexpr(65504.0)


@triton.constexpr_function
def key_groups(dim: int) -> int:
    """Groups of words in a token's keys."""
    return dim // 32 if dim % 32 == 0 else 1


@triton.constexpr_function
def key_group(dim: int) -> int:
    """Words in a group of keys."""
    return math.gcd(dim // CODES, 8)


@triton.constexpr_function
def key_codes(dim: int) -> int:
    """Codes in a group of keys."""
    return CODES * key_group(dim)


def ordered(kv_pages: Tensor, page_size: int) -> Tensor:
    """A copy of pages [P, L, 2, K, bytes] in the order of the reference, in that of the kernels."""
    pages = kv_pages.clone()
    codes, _ = page_views(pages, page_size)
    keys, values = codes[:, :, 0], codes[:, :, 1]
    tokens = (-1, 2, 4, 2)  # chunk, half, j, last bit
    x = keys.unflatten(-1, (-1, key_codes(keys.shape[-1]))).unflatten(-3, tokens)
    keys.copy_(x.permute(0, 1, 2, 3, 7, 4, 6, 5, 8).reshape(keys.shape))
    x = values.unflatten(-1, (-1, 8)).unflatten(-3, tokens)
    values.copy_(x.permute(0, 1, 2, 3, 7, 5, 8, 4, 6).reshape(values.shape))
    return pages


def restored(kv_pages: Tensor, page_size: int) -> Tensor:
    """What :func:`ordered` was given."""
    pages = kv_pages.clone()
    codes, _ = page_views(pages, page_size)
    keys, values = codes[:, :, 0], codes[:, :, 1]
    shape, dim = keys.shape[:3], keys.shape[-1]
    size = key_codes(dim)
    x = keys.reshape(*shape, -1, dim // size, 2, 2, 4, size)
    keys.copy_(x.permute(0, 1, 2, 3, 5, 7, 6, 4, 8).reshape(keys.shape))
    x = values.reshape(*shape, -1, dim // 8, 4, 8, 2, 2)
    values.copy_(x.permute(0, 1, 2, 3, 7, 5, 8, 4, 6).reshape(values.shape))
    return pages


def decoding(card: Card) -> int:
    return NATIVE if card.capability >= _NATIVE_FROM and not torch.version.hip else BITS


# Two words of four codes to four pairs of fp16: a pair has the same byte of both.
_UNPACK = tl.constexpr("""{
.reg .b32 low, high;
.reg .b16 a, b, c, d;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
mov.b32 {a, b}, low;
mov.b32 {c, d}, high;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")


@triton.jit
def words(bytes):
    """Byte addresses as addresses of words of four codes."""
    return bytes.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def numbers(codes, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Words [...] of four codes as four of [...], low bytes first, in units of UNIT[FP8]; exact."""
    if FP8 == 2:
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r,r", [codes],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a, b, c, d = _byte(codes), _byte(codes >> 8), _byte(codes >> 16), _byte(codes >> 24)
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)


@triton.jit
def _byte(code):
    """A code in the low byte: its bits where fp16, whose exponent bias is larger by 8, has its."""
    bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def scale_place(codes):
    """Where byte addresses ``codes`` point, as addresses of scales."""
    return codes.to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def key_place(offset, d, DIM: tl.constexpr):
    """Where feature ``d`` of the keys of a page's token ``offset`` is among the head's bytes."""
    SIZE: tl.constexpr = key_codes(DIM)
    slot = offset % 16 // 8 * 8 + offset % 2 * 4 + offset % 8 // 2
    return offset // 16 * (16 * DIM) + d // SIZE * (16 * SIZE) + slot * SIZE + d % SIZE


@triton.jit
def value_place(offset, d, DIM: tl.constexpr):
    """The same for values."""
    word = offset // 16 * (4 * DIM) + d // 8 * 32 + offset % 8 // 2 * 8 + d % 8
    return word * 4 + offset % 16 // 8 * 2 + offset % 2


@triton.jit
def _next_scale(least):
    """fp16 scales of at least ``least`` [R], if there are such."""
    exact = tl.where(least < _SMALLEST_SCALE, _SMALLEST_SCALE, least)
    exact = tl.where(exact > _LARGEST_SCALE, _LARGEST_SCALE, exact)
    nearest = exact.to(tl.float16)
    below = (nearest.to(tl.float32) < exact).to(tl.int16)
    return (nearest.to(tl.int16, bitcast=True) + below).to(tl.float16, bitcast=True)


@triton.jit
def _over(x, scale):
    """fp32 ``x`` [R, D] over fp16 scales [R]."""
    return x * (1.0 / scale.to(tl.float32))[:, None]


@triton.jit
def _rounded(magnitude):
    """``magnitude`` as int32 whose high 12 bits are rounded to nearest, ties to even."""
    own = magnitude.to(tl.int32, bitcast=True)
    return own + ((own >> 20) & 1) + 0x7FFFF


@triton.jit
def _nearest(magnitude, FP8: tl.constexpr):
    """The e4m3 numbers nearest to ``magnitude`` >= 0, the largest beyond it, as codes and fp32."""
    if FP8 == 2:
        codes = magnitude.to(tl.float8e4nv)
        near = codes.to(tl.float32)
        codes = codes.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        magnitude = tl.minimum(magnitude, _LARGEST_CODE)
        shift = tl.full(magnitude.shape, 16384.0, tl.float32)  # units of 2^-9 in its low bits
        rounded, shifted = _rounded(magnitude), magnitude + shift
        is_small = magnitude < 0.015625
        near = (rounded & 0x7FF00000).to(tl.float32, bitcast=True)
        near = tl.where(is_small, shifted - shift, near)
        small = shifted.to(tl.int32, bitcast=True) - shift.to(tl.int32, bitcast=True)
        codes = tl.where(is_small, small, (rounded >> 20) - (120 << 3))
    return codes, near


@triton.jit
def quantize(x, weights, FP8: tl.constexpr):
    """Codes uint8 [R, D] and scales fp16 [R] of fp32 ``x`` [R, D], for ``weights`` [R, D]."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1)  # as integers, where a NaN is larger than all numbers
    least = tl.div_rn(largest.to(tl.float32, bitcast=True), _LARGEST_CODE)
    scale = _next_scale(least)
    error = tl.full(least.shape, float("inf"), tl.float32)
    for phase in tl.range(0, _PHASES, loop_unroll_factor=4):
        other = _next_scale(least * (1.0 + phase * _STEP))
        _, near = _nearest(_over(magnitude, other), FP8)
        off = near * other.to(tl.float32)[:, None] - magnitude
        other_error = tl.sum(off * off * weights, 1)
        better = other_error < error
        scale = tl.where(better, other, scale)
        error = tl.where(better, other_error, error)
    codes, _ = _nearest(_over(magnitude, scale), FP8)
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8), scale
