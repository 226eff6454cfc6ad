"""e4m3 codes and fp16 scales as vectors: see :mod:`octavo.ops.fp8` for what they mean.

A code's bits, moved to where an fp32 or bf16 keeps its lowest exponent bits, are a number too small
by 2^120 and exact, the codes below the smallest power (2^-6) being subnormal numbers. So reading
costs a shift or two and a mask. Half of the factor is made up for before codes are multiplied,
half after, so that no product leaves the range: ``LIFT``. Only instructions for bf16 take subnormal
numbers, that is codes below 2^-6, as zeros.
"""

from __future__ import annotations

from functools import reduce

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.ops.cpu.rows import RowAccess
from octavo.ops.cpu.simd import F32, I16, I32, I64, Lanes, literals, loop
from octavo.ops.fp8 import LARGEST_CODE, LARGEST_SCALE, PHASES, SMALLEST_SCALE, WEIGHT_FLOOR

LIFT = 2.0**60
QUAD = (0, 2, 1, 3)  # where the i-th of 4 neighbours lies: even bytes are a pair, odd ones another

_HALF_EXPONENT = 112 << 23  # between the biases of fp16 and fp32, in place
_HALF_NAN = 0x7E00
_SHIFT = 16384.0  # has units of 2^-9, the distance of the smallest codes, in its low bits


def code_parts(v: Lanes, quads: ir.Value) -> tuple[ir.Value, ...]:
    """The 4 neighbours of each int32 as fp32, times 2^-120."""
    b = v.b

    def part(byte: int) -> ir.Value:
        top = b.shl(quads, v.bits(24 - 8 * byte))
        return b.bitcast(b.and_(b.ashr(top, v.bits(4)), v.bits(0x87F00000)), v.f32)

    return tuple(part(byte) for byte in QUAD)


def code_pairs(v: Lanes, quads: ir.Value) -> tuple[ir.Value, ...]:
    """The same as 2 pairs of bf16."""
    b, kind = v.b, ir.VectorType(I16, 2 * v.n)

    def short(value: int) -> ir.Value:
        return ir.Constant(kind, [value] * 2 * v.n)

    def pair(high: ir.Value) -> ir.Value:
        return b.bitcast(b.and_(b.ashr(high, short(4)), short(0x87F0)), v.i32)

    shorts = b.bitcast(quads, kind)
    return pair(b.shl(shorts, short(8))), pair(shorts)


def scale_numbers(v: Lanes, halves: ir.Value) -> ir.Value:
    """fp16 above zero, as int16, to fp32."""
    b, wide = v.b, v.b.zext(halves, v.i32)
    normal = b.bitcast(b.add(b.shl(wide, v.bits(13)), v.bits(_HALF_EXPONENT)), v.f32)
    small = b.fmul(b.sitofp(wide, v.f32), v.number(2.0**-24))
    number = b.select(b.icmp_unsigned("<", wide, v.bits(0x400)), small, normal)
    return b.select(b.icmp_unsigned(">", wide, v.bits(0x7BFF)), v.number(float("nan")), number)


def _scale_bits(v: Lanes, least: ir.Value) -> ir.Value:
    """The fp16 scale, as int32, from ``least`` on, NaN for NaN; scalar."""
    b = v.b
    exact = v.maximum(least, v.number(SMALLEST_SCALE))
    exact = b.select(
        b.fcmp_ordered("<", exact, v.number(LARGEST_SCALE)), exact, v.number(LARGEST_SCALE)
    )
    bits = b.add(b.bitcast(exact, v.i32), v.bits(0x1FFF))
    normal = b.lshr(b.sub(bits, v.bits(_HALF_EXPONENT)), v.bits(13))
    units = b.fmul(exact, v.number(2.0**24))
    whole = b.fptosi(units, v.i32)
    more = b.zext(b.fcmp_ordered("<", b.sitofp(whole, v.f32), units), v.i32)
    is_small = b.fcmp_ordered("<", exact, v.number(2.0**-14))
    half = b.select(is_small, b.add(whole, more), normal)
    return b.select(b.fcmp_unordered("uno", least, least), v.bits(_HALF_NAN), half)


def _nearest(v: Lanes, x: ir.Value) -> ir.Value:
    """The nearest e4m3 number, ties to even, saturating, without its sign."""
    b, magnitude, rounded, small = v.b, *_rounded(v, x)
    shift = v.number(_SHIFT)
    normal = b.bitcast(b.and_(rounded, v.bits(0x7FF00000)), v.f32)
    is_small = b.fcmp_ordered("<", magnitude, v.number(2.0**-6))
    return b.select(is_small, b.fsub(small, shift), normal)


def _codes(v: Lanes, x: ir.Value) -> ir.Value:
    """The nearest codes as int32."""
    b, magnitude, rounded, small = v.b, *_rounded(v, x)
    normal = b.sub(b.lshr(rounded, v.bits(20)), v.bits(120 << 3))
    units = b.sub(b.bitcast(small, v.i32), b.bitcast(v.number(_SHIFT), v.i32))
    code = b.select(b.fcmp_ordered("<", magnitude, v.number(2.0**-6)), units, normal)
    return b.or_(code, b.and_(b.lshr(b.bitcast(x, v.i32), v.bits(24)), v.bits(0x80)))


def _rounded(v: Lanes, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """|x| or the largest code; as int32 whose high 12 bits are rounded; plus _SHIFT."""
    b = v.b
    bits = b.bitcast(x, v.i32)
    magnitude = b.bitcast(b.and_(bits, v.bits(0x7FFFFFFF)), v.f32)
    most = v.number(LARGEST_CODE)
    magnitude = b.select(b.fcmp_ordered(">", magnitude, most), most, magnitude)
    own = b.bitcast(magnitude, v.i32)
    odd = b.and_(b.lshr(own, v.bits(20)), v.bits(1))
    rounded = b.add(own, b.add(odd, v.bits(0x7FFFF)))
    return magnitude, rounded, b.fadd(magnitude, v.number(_SHIFT))


def _best_scale(
    v: Lanes, values: list[ir.Value], weights: list[ir.Value], least: ir.Value
) -> ir.Value:
    """Of PHASES scales from ``least`` on, as int16, the one with the least squared error; squares
    are multiplied by ``weights``, if there are any."""
    b, one = v.b, Lanes(v.b, 1)
    first = b.trunc(_scale_bits(one, least), I16)
    best, error = one.variable(first), one.variable(F32(float("inf")))
    with loop(b, I64(PHASES)) as phase:
        share = b.fmul(b.sitofp(phase, F32), F32(1 / PHASES))
        half = b.trunc(_scale_bits(one, b.fmul(least, b.fadd(share, F32(1.0)))), I16)
        number = scale_numbers(one, half)
        factor, inverse = v.splat(number), v.splat(b.fdiv(F32(1.0), number))
        squares = v.number(0.0)
        for index, value in enumerate(values):
            magnitude = b.bitcast(b.and_(b.bitcast(value, v.i32), v.bits(0x7FFFFFFF)), v.f32)
            near = b.fmul(_nearest(v, b.fmul(value, inverse)), factor)
            off = b.fsub(near, magnitude)
            square = b.fmul(off, off)
            squares = b.fadd(squares, b.fmul(square, weights[index]) if weights else square)
        total = v.total(squares)
        with b.if_then(b.fcmp_ordered("<", total, b.load(error))):
            b.store(total, error)
            b.store(half, best)
    return b.load(best)


@intrinsic(prefer_literal=True)
def add_squares(typing, row, sums, dim, lanes, bf16):
    """sums [dim] += squares of a row [dim] of bf16 or fp32; ``sums`` are fp32."""
    D, n, is_bf16 = literals(dim, lanes, bf16)

    def emit(context, builder, signature, args):
        row, sums = args[:2]
        source = RowAccess(builder, n, is_bf16)
        v = source.v
        for i in range(D // n):
            x = source.read(row, i * source.bytes)
            v.store(builder.fadd(v.load(sums, 4 * n * i), builder.fmul(x, x)), sums, 4 * n * i)
        return context.get_dummy_value()

    return types.void(row, sums, dim, lanes, bf16), emit


@intrinsic(prefer_literal=True)
def quantize_row(typing, row, squares, codes, scale, dim, lanes, keys):
    """codes [dim] bytes and one fp16 scale of an fp32 row [dim]. ``keys``: the scale is chosen by
    the ``squares`` [dim] fp32 of queries, and codes are in the order of QUAD, for which lanes must
    be a multiple of 4."""
    D, n, are_keys = literals(dim, lanes, keys)
    order = [4 * (i // 4) + QUAD.index(i % 4) for i in range(n)]

    def emit(context, builder, signature, args):
        row, squares, codes, scale = args[:4]
        v, one = Lanes(builder, n), Lanes(builder, 1)
        values = [v.load(row, first * 4) for first in range(0, D, n)]
        weights = []
        if are_keys:
            weights = [v.load(squares, first * 4) for first in range(0, D, n)]
            total = reduce(builder.fadd, weights)
            floor = v.splat(builder.fmul(v.total(total), F32(WEIGHT_FLOOR / D)))
            weights = [builder.fadd(weight, floor) for weight in weights]
        largest = v.bits(0)
        for value in values:  # as integers, where a NaN is larger than all numbers
            bits = builder.and_(builder.bitcast(value, v.i32), v.bits(0x7FFFFFFF))
            bigger = builder.icmp_unsigned(">", bits, largest)
            largest = builder.select(bigger, bits, largest)
        if n > 1:
            name, kind = f"llvm.vector.reduce.umax.v{n}i32", ir.FunctionType(I32, [v.i32])
            most = cgutils.get_or_insert_function(builder.module, kind, name)
            largest = builder.call(most, [largest])
        least = builder.fdiv(builder.bitcast(largest, F32), F32(LARGEST_CODE))
        half = _best_scale(v, values, weights, least)
        one.store(half, scale, 0)
        inverse = v.splat(builder.fdiv(F32(1.0), scale_numbers(one, half)))
        for index, value in enumerate(values):
            found = builder.trunc(_codes(v, builder.fmul(value, inverse)), v.i8)
            if are_keys:
                found = builder.shuffle_vector(found, found, ir.Constant(v.i32, order))
            v.store(found, codes, index * n)
        return context.get_dummy_value()

    return types.void(row, squares, codes, scale, dim, lanes, keys), emit


@intrinsic(prefer_literal=True)
def read_scales(typing, halves, numbers, tokens, lanes):
    """numbers [tokens] fp32 = LIFT · halves [tokens] fp16."""
    P, n = literals(tokens, lanes)

    def emit(context, builder, signature, args):
        halves, numbers = args[:2]
        v = Lanes(builder, n)
        for first in range(0, P, n):
            number = scale_numbers(v, v.load(halves, 2 * first, v.i16))
            v.store(builder.fmul(number, v.number(LIFT)), numbers, 4 * first)
        return context.get_dummy_value()

    return types.void(halves, numbers, tokens, lanes), emit
