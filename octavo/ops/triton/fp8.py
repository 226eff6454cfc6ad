"""e4m3 codes and fp16 scales in kernels: see :mod:`octavo.ops.fp8` for what they mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.fp8 import PHASES
from octavo.ops.triton.tiles import Card

# How codes become numbers: by their bits, on any GPU, or by an instruction for e4m3.
PLAIN, BITS, NATIVE = 0, 1, 2
UNIT = tl.constexpr((1.0, 256.0, 1.0))  # what a number from :func:`numbers` counts
_NATIVE_FROM = 89  # the first compute capability with that instruction

_LARGEST_CODE = tl.constexpr(448.0)
_PHASES, _STEP = tl.constexpr(PHASES), tl.constexpr(1 / PHASES)
_SMALLEST_SCALE, _LARGEST_SCALE = tl.constexpr(2.0**-24), tl.constexpr(65504.0)


def decoding(card: Card) -> int:
    return NATIVE if card.capability >= _NATIVE_FROM and not torch.version.hip else BITS


@triton.jit
def numbers(codes, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Codes [...] in a floating type, exact, in units of UNIT[FP8].

    The bits of a code, moved to where fp16 keeps its own, meet an exponent bias larger by 8."""
    if FP8 == 2:
        x = codes.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        wide = codes.to(tl.uint16)
        bits = ((wide & 0x7F) << 7) | ((wide & 0x80) << 8)
        x = bits.to(tl.float16, bitcast=True).to(DTYPE)
    return x


@triton.jit
def scale_place(codes):
    """Where byte addresses ``codes`` point, as addresses of scales."""
    return codes.to(tl.pointer_type(tl.float16), bitcast=True)


@triton.jit
def _with_scale(x, least):
    """fp32 ``x`` [R, D] over scales from ``least`` [R] on, without signs, and the scales, fp16."""
    exact = tl.where(least < _SMALLEST_SCALE, _SMALLEST_SCALE, least)
    exact = tl.where(exact > _LARGEST_SCALE, _LARGEST_SCALE, exact)
    nearest = exact.to(tl.float16)
    below = (nearest.to(tl.float32) < exact).to(tl.int16)
    scale = (nearest.to(tl.int16, bitcast=True) + below).to(tl.float16, bitcast=True)
    scaled = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale.to(tl.float32))[:, None]
    return tl.minimum(tl.abs(scaled), _LARGEST_CODE), scale


@triton.jit
def _rounded(magnitude):
    """``magnitude`` as int32 whose high 12 bits are rounded to nearest, ties to even."""
    own = magnitude.to(tl.int32, bitcast=True)
    return own + ((own >> 20) & 1) + 0x7FFFF


@triton.jit
def quantize(x):
    """Codes uint8 [R, D] and scales fp16 [R] of fp32 ``x`` [R, D]."""
    bits = x.to(tl.int32, bitcast=True)
    largest = tl.max(bits & 0x7FFFFFFF, 1)  # as integers, where a NaN is larger than all numbers
    least = tl.div_rn(largest.to(tl.float32, bitcast=True), _LARGEST_CODE)
    magnitude, scale = _with_scale(x, least)
    shift = tl.full(magnitude.shape, 16384.0, tl.float32)  # units of 2^-9 in its low bits
    error = tl.full(least.shape, float("inf"), tl.float32)
    for phase in range(_PHASES):
        other, other_scale = _with_scale(x, least * (1.0 + phase * _STEP))
        normal = (_rounded(other) & 0x7FF00000).to(tl.float32, bitcast=True)
        near = tl.where(other < 0.015625, (other + shift) - shift, normal)
        off = near * other_scale.to(tl.float32)[:, None] - tl.abs(x)
        other_error = tl.sum(off * off, 1)
        better = other_error < error
        magnitude = tl.where(better[:, None], other, magnitude)
        scale = tl.where(better, other_scale, scale)
        error = tl.where(better, other_error, error)
    normal = (_rounded(magnitude) >> 20) - (120 << 3)
    small = (magnitude + shift).to(tl.int32, bitcast=True) - shift.to(tl.int32, bitcast=True)
    code = tl.where(magnitude < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8), scale
