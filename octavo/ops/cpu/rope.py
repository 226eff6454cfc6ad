"""QK-norm, rotary embedding and the write of K and V to their pages, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic

from octavo.ops.cpu.fp8 import add_squares, quantize_row
from octavo.ops.cpu.jit import FIRST_ARGUMENT, ITEMS, NEXT, SCRATCH, TICKET
from octavo.ops.cpu.memory import copy_item, load_float64, load_int64, take
from octavo.ops.cpu.rows import RowAccess, inverse_rms, scaled
from octavo.ops.cpu.simd import Lanes, literals
from octavo.ops.cpu.tiles import BF16, FP8, WIDTH, convert_row, fill, neighbour

ARGUMENTS = "15qd"  # in the order that the kernel reads them


@dataclass(frozen=True, slots=True)
class RopeShape:
    """What a rope kernel is compiled for. ``rotated``: features that turn, D unless partial."""

    head_dim: int
    rotated: int
    page_size: int
    bf16: bool  # activations
    kv: int  # what K and V are: FP32, BF16 or FP8
    norms: bool
    fp32_norms: bool = False  # their weights are fp32


@intrinsic(prefer_literal=True)
def rotate_head(  # noqa: PLR0913
    typing, source, weight, cos_sin, target, eps, dim, rotated, lanes, bf16, to_bf16, norms,
    fp32_norms,
):  # fmt: skip
    """target [dim] = rotation of source [dim], after its RMSNorm if ``norms``."""
    D, R, n, is_bf16, writes_bf16, has_norm, wide = literals(
        dim, rotated, lanes, bf16, to_bf16, norms, fp32_norms
    )

    def normed(row: RowAccess, values: list, weight: ir.Value, eps: ir.Value) -> list:
        v = row.v
        squares = v.number(0.0)
        for value in values:
            squares = v.fma(value, value, squares)
        factor = inverse_rms(v, squares, D, eps)
        return [
            row.round(scaled(row, value, factor, weight, i, wide)) for i, value in enumerate(values)
        ]

    def turned(v: Lanes, values: list, cos_sin: ir.Value) -> list:
        b, half = v.b, R // 2 // n
        low, high, rest = values[:half], values[half : 2 * half], values[2 * half :]
        cos = [v.load(cos_sin, i * n * 4) for i in range(half)]
        sin = [v.load(cos_sin, (half + i) * n * 4) for i in range(half)]
        parts = list(zip(low, high, cos, sin, strict=True))
        first = [b.fsub(b.fmul(x, c), b.fmul(y, s)) for x, y, c, s in parts]
        second = [b.fadd(b.fmul(y, c), b.fmul(x, s)) for x, y, c, s in parts]
        return first + second + rest

    def emit(context, builder, signature, args):
        source, weight, cos_sin, target, eps = args[:5]
        row, out = RowAccess(builder, n, is_bf16), RowAccess(builder, n, writes_bf16)
        values = [row.read(source, i * row.bytes) for i in range(D // n)]
        if has_norm:
            values = normed(row, values, weight, eps)
        for i, value in enumerate(turned(row.v, values, cos_sin)):
            out.write(value if writes_bf16 else row.round(value), target, i * out.bytes)
        return context.get_dummy_value()

    kinds = (
        source, weight, cos_sin, target, eps, dim, rotated, lanes, bf16, to_bf16, norms, fp32_norms,
    )  # fmt: skip
    return types.void(*kinds), emit


def make_rope(  # noqa: PLR0915  (sizes reach a kernel only as its closure: one piece)
    shape: RopeShape, lanes: int
) -> tuple[Callable[[int], None], str, int]:
    """The kernel's Python function, its name, and the scratch bytes a thread needs.

    An item is ``grain`` tokens. See :mod:`octavo.ops.cpu.tiles` for the order within pages.
    """
    D, R, P = shape.head_dim, shape.rotated, shape.page_size
    bf16, kv_bf16, kv_fp8 = shape.bf16, shape.kv == BF16, shape.kv == FP8
    norms, fp32_norms = shape.norms, shape.fp32_norms
    half = R // 2
    row_lanes = min(lanes, D & -D)
    lanes = min(row_lanes, half & -half)
    element = 2 if bf16 else 4
    width = WIDTH[shape.kv]
    words, bits = D // width, 32 // width  # of a K row; of an element
    thread_scratch = -(-D * 9 // 4096) * 4096  # a row, its queries' squares and its codes
    written = D * 8 if kv_fp8 else 0  # where what is written begins in it
    scales = D * P  # behind the codes of a head

    def rope(block):
        row = load_int64(block, SCRATCH) + take(block, TICKET) * thread_scratch
        squares, ready = row + D * 4, row + written
        tokens = load_int64(block, ITEMS)
        qkv = load_int64(block, FIRST_ARGUMENT)
        out = load_int64(block, FIRST_ARGUMENT + 1)
        positions = load_int64(block, FIRST_ARGUMENT + 2)
        cos_sin = load_int64(block, FIRST_ARGUMENT + 3)
        pages = load_int64(block, FIRST_ARGUMENT + 4)
        page_bytes = load_int64(block, FIRST_ARGUMENT + 5)
        values_at = load_int64(block, FIRST_ARGUMENT + 6)
        head_bytes = load_int64(block, FIRST_ARGUMENT + 7)
        page_of = load_int64(block, FIRST_ARGUMENT + 8)
        offset_of = load_int64(block, FIRST_ARGUMENT + 9)
        heads = load_int64(block, FIRST_ARGUMENT + 10)
        kv_heads = load_int64(block, FIRST_ARGUMENT + 11)
        group = heads // kv_heads
        q_norm = load_int64(block, FIRST_ARGUMENT + 12)
        k_norm = load_int64(block, FIRST_ARGUMENT + 13)
        grain = load_int64(block, FIRST_ARGUMENT + 14)
        eps = load_float64(block, FIRST_ARGUMENT + 15)
        row_bytes = (heads + 2 * kv_heads) * D * element
        first = take(block, NEXT) * grain
        while first < tokens:
            for t in range(first, min(first + grain, tokens)):
                angles = cos_sin + load_int64(positions, t) * R * 4
                source = qkv + t * row_bytes
                target = out + t * heads * D * element
                for h in range(heads):
                    at = h * D * element
                    rotate_head(
                        source + at,
                        q_norm,
                        angles,
                        target + at,
                        eps,
                        D,
                        R,
                        lanes,
                        bf16,
                        bf16,
                        norms,
                        fp32_norms,
                    )
                offset = load_int64(offset_of, t)
                page = pages + load_int64(page_of, t) * page_bytes
                for h in range(kv_heads):
                    k = source + (heads + h) * D * element
                    place = page + h * head_bytes
                    rotate_head(
                        k, k_norm, angles, row, eps, D, R, lanes, bf16, kv_bf16, norms, fp32_norms
                    )
                    if kv_fp8:
                        fill(squares, 0, D, float32(0.0))
                        for g in range(h * group, (h + 1) * group):
                            add_squares(target + g * D * element, squares, D, row_lanes, bf16)
                        quantize_row(
                            row, squares, ready, place + scales + offset * 2, D, row_lanes, True
                        )
                    for w in range(words):
                        copy_item(ready, w, place, w * P + offset, 32)
                    v = k + kv_heads * D * element
                    place += values_at
                    convert_row(v, row, D, row_lanes, bf16, kv_bf16)
                    if kv_fp8:
                        quantize_row(
                            row, squares, ready, place + scales + offset * 2, D, row_lanes, False
                        )
                    base = offset // width * width * D + neighbour(offset, width)
                    for d in range(D):
                        copy_item(ready, d, place, base + width * d, bits)
            first = take(block, NEXT) * grain

    name = f"rope_{D}_{R}_{P}_{lanes}_{int(bf16)}_{shape.kv}_{norms + fp32_norms}"
    return rope, name, thread_scratch
