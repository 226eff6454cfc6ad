"""The inner loops of attention on one page: scores, softmax, weighted values.

Within a page and KV head, K and V are stored the way dot products read them (*pair order*):

    K bf16 [D/2][page][2]   two neighbouring features of a token lie together
    V bf16 [page/2][D][2]   the same feature of two neighbouring tokens lies together
    K fp32 [D][page], V fp32 [page][D]
    K fp8 [D/4][page][4], V fp8 [page/4][D][4], in the order of ``fp8.QUAD``, then scales [page]

So a vector holds one feature of many tokens: no score needs a sum across a vector (for rows of
D features each would), bf16 becomes fp32 by a shift and a mask, and the bf16 dot product
instruction takes the pairs as they are.

A tile is R query rows of one KV head. Scratch rows: q [R][D], scores [R][stride], sums [R][D].
All sizes are compile-time integers.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.fp8 import LIFT, code_pairs, code_parts, scale_numbers
from octavo.ops.cpu.simd import F32, I1, I32, I64, Lanes, literals, loop

FP32, BF16, FP8, BF16_DOT, FP8_DOT = range(5)  # what K and V are
DOT = (BF16_DOT, FP8_DOT)  # q and weights are kept in bf16, too
_WITH_SCALES = (FP8, FP8_DOT)
WIDTH = {FP32: 1, BF16: 2, BF16_DOT: 2, FP8: 4, FP8_DOT: 4}  # neighbours in an int32

_FEATURES_UNROLLED = 8
_CACHE_LINE_BYTES = 64
_LEAST_CHAINS = 8  # independent sums that hide the latency of a fused multiply-add

# 2^x on [-1/2, 1/2], highest power first: relative error 7.5e-8, and 7.5e-5 for bf16 weights.
_EXP2 = (1.3276471e-3, 9.6755410e-3, 5.5507131e-2, 0.24022120, 0.69314694, 1.00000012)
_EXP2_COARSE = (5.5171669e-2, 0.24261113, 0.69326097, 0.99992806)


def _parts(v: Lanes, address: ir.Value, offset: ir.Value | int, mode: int) -> tuple:
    """K or V at an address as operands: the neighbours one by one in fp32, or in pairs of bf16."""
    if mode == FP32:
        return (v.load(address, offset),)
    packed = v.load(address, offset, v.i32)
    if mode in _WITH_SCALES:
        return code_pairs(v, packed) if mode == FP8_DOT else code_parts(v, packed)
    return (packed,) if mode == BF16_DOT else v.halves(packed)


def _add_product(v: Lanes, total: ir.Value, a: ir.Value, b: ir.Value, mode: int) -> ir.Value:
    return v.bf16_dot(total, a, b) if mode in DOT else v.fma(a, b, total)


@intrinsic(prefer_literal=True)
def page_scores(typing, q, k, scores, rows, dim, page, stride, lanes, mode):
    """scores[r, t] = q[r] · k[t] for the tokens t of one page; of fp8, q is larger by LIFT."""
    R, D, P, S, n, kind = literals(rows, dim, page, stride, lanes, mode)
    width, together = WIDTH[kind], 2 if kind in DOT else 1  # features a product takes
    unrolled = _FEATURES_UNROLLED if D % _FEATURES_UNROLLED == 0 else max(2, width)
    chains = min(unrolled // together, 4, -(-_LEAST_CHAINS // R))  # sums a row
    scalar, q_bytes = (I32, 2) if kind in DOT else (F32, 4)

    def step(v: Lanes, sums: list, q_at: ir.Value, k_at: ir.Value) -> None:
        """Adds ``unrolled`` features to ``sums`` [R][chains]."""
        for element in range(unrolled // width):
            for part, keys in enumerate(_parts(v, k_at, element * P * 4, kind)):
                for r in range(R):
                    feature = element * width + part * together
                    query = v.splat_at(q_at, (r * D + feature) * q_bytes, scalar)
                    row, c = sums[r], feature // together % chains
                    row[c] = _add_product(v, row[c], query, keys, kind)

    def emit(context, builder, signature, args):
        q, k, scores = args[:3]
        v = Lanes(builder, n)
        for column in range(0, P, n):
            slots = [[v.variable(v.number(0.0)) for _ in range(chains)] for _ in range(R)]
            with loop(builder, I64(D // unrolled)) as block:
                q_at = builder.add(q, builder.mul(block, I64(unrolled * q_bytes)))
                k_at = builder.add(k, builder.mul(block, I64(unrolled // width * P * 4)))
                sums = [[builder.load(slot) for slot in row] for row in slots]
                step(v, sums, q_at, builder.add(k_at, I64(column * 4)))
                for row, values in zip(slots, sums, strict=True):
                    for slot, value in zip(row, values, strict=True):
                        builder.store(value, slot)
            scale = None
            if kind in _WITH_SCALES:
                halves = v.load(k, D * P + column * 2, v.i16)
                scale = builder.fmul(scale_numbers(v, halves), v.number(LIFT))
            for r, row in enumerate(slots):
                first, *others = [builder.load(slot) for slot in row]
                total = functools.reduce(builder.fadd, others, first)
                total = builder.fmul(total, scale) if scale else total
                v.store(total, scores, (r * S + column) * 4)
        return context.get_dummy_value()

    return types.void(q, k, scores, rows, dim, page, stride, lanes, mode), emit


@intrinsic(prefer_literal=True)
def page_values(typing, weights, values, sums, tokens, rows, dim, stride, lanes, registers, mode):
    """sums[r] += Σ_t weights[r, t] · values[t] over the first ``tokens`` tokens of a page.

    Memory past them is read at most in the same pair, and never reaches a sum: it may be NaN.
    Codes of fp8 are none: up to 3 tokens past the end are added, and must weigh nothing.
    """
    R, D, S, n, kind = literals(rows, dim, stride, lanes, mode)
    held = _sum_vectors(R, D // n, registers.literal_value)
    width = WIDTH[kind]
    scalar, operands = (I32, max(1, width // 2)) if kind in DOT else (F32, width)

    def step(v: Lanes, slots: list, weight_at: ir.Value, value_at: ir.Value, both: bool) -> None:
        """Adds ``width`` tokens; without ``both`` only the first of a pair."""
        used = operands if both else 1
        factors = [
            [v.splat_at(weight_at, (r * S + part) * 4, scalar) for part in range(used)]
            for r in range(R)
        ]
        for i in range(held):
            parts = _parts(v, value_at, i * n * 4, kind)[:used]
            if kind == BF16_DOT and not both:
                parts = (v.b.and_(parts[0], v.bits(0xFFFF)),)
            for slot, row in zip((row[i] for row in slots), factors, strict=True):
                total = v.b.load(slot)
                for factor, part in zip(row, parts, strict=True):
                    total = _add_product(v, total, factor, part, kind)
                v.b.store(total, slot)

    def emit(context, builder, signature, args):
        weights, values, sums, tokens = args[:4]
        v = Lanes(builder, n)
        weight_bytes = 4 * operands  # of a step: fp32 or pairs of bf16
        whole = builder.add(tokens, I64(3)) if kind in _WITH_SCALES else tokens
        steps = builder.lshr(whole, I64(width.bit_length() - 1))
        for first in range(0, D, held * n):
            at = [[(r * D + first + i * n) * 4 for i in range(held)] for r in range(R)]
            slots = [[v.variable(v.load(sums, offset)) for offset in row] for row in at]

            def place(index, first=first):
                weight_at = builder.add(weights, builder.mul(index, I64(weight_bytes)))
                value_at = builder.add(values, builder.mul(index, I64(D * 4)))
                return weight_at, builder.add(value_at, I64(first * 4))

            with loop(builder, steps) as index:
                step(v, slots, *place(index), both=True)
            if kind in (BF16, BF16_DOT):
                with builder.if_then(builder.trunc(tokens, I1)):
                    step(v, slots, *place(steps), both=False)
            for row, offsets in zip(slots, at, strict=True):
                for slot, offset in zip(row, offsets, strict=True):
                    v.store(builder.load(slot), sums, offset)
        return context.get_dummy_value()

    kinds = (weights, values, sums, tokens, rows, dim, stride, lanes, registers, mode)
    return types.void(*kinds), emit


def _sum_vectors(rows: int, vectors: int, registers: int) -> int:
    """Sum vectors a row to hold at once: a divisor of ``vectors``, in 3/4 of the registers."""
    return max(
        count
        for count in range(1, vectors + 1)
        if vectors % count == 0 and (count == 1 or rows * count <= registers * 3 // 4)
    )


@intrinsic(prefer_literal=True)
def softmax_row(typing, scores, tokens, maximum, total, scale, factors, lanes, mode):
    """Turn scores [tokens] (a multiple of lanes) into weights 2^(scale·score - maximum), in place.

    The fp32 numbers at ``maximum`` and ``total`` (of the weights) are updated; returns the factor
    by which all that was summed before must shrink (Milakov and Gimelshein 2018). With DOT modes
    weights are left as bf16, packed at the row's start. Of fp8 they are left times ``factors``
    [tokens], the scales of V.
    """
    n, kind = literals(lanes, mode)
    coefficients = _EXP2_COARSE if kind in DOT else _EXP2

    def emit(context, builder, signature, args):
        scores, tokens, maximum, total, scale, factors = args[:6]
        v = Lanes(builder, n)
        vectors = builder.udiv(tokens, I64(n))
        best = v.variable(v.number(-1e30))
        with loop(builder, vectors) as index:
            value = v.load(scores, builder.mul(index, I64(4 * n)))
            builder.store(v.maximum(builder.load(best), value), best)
        scalar = Lanes(builder, 1)
        old, old_total = v.load(maximum, 0, F32), v.load(total, 0, F32)
        new = scalar.maximum(builder.fmul(v.largest(builder.load(best)), scale), old)
        shrink = scalar.exp2_below_one(builder.fsub(old, new), _EXP2)
        factor, minus_new = v.splat(scale), v.splat(builder.fneg(new))
        summed = v.variable(v.number(0.0))
        with loop(builder, vectors) as index:
            value = v.load(scores, builder.mul(index, I64(4 * n)))
            weight = left = v.exp2_below_one(v.fma(value, factor, minus_new), coefficients)
            if kind in _WITH_SCALES:
                scales = v.load(factors, builder.mul(index, I64(4 * n)))
                left = builder.fmul(weight, scales)
            if kind in DOT:  # written behind what is still to be read
                left = v.narrow_by_instruction(left)
                v.store(left, scores, builder.mul(index, I64(2 * n)))
            else:
                v.store(left, scores, builder.mul(index, I64(4 * n)))
            if kind == BF16_DOT:
                weight = v.widen(left)  # what is summed is what weighs
            builder.store(builder.fadd(builder.load(summed), weight), summed)
        kept = builder.fmul(old_total, shrink)
        v.store(new, maximum, 0)
        v.store(builder.fadd(kept, v.total(builder.load(summed))), total, 0)
        return shrink

    kinds = (scores, tokens, maximum, total, scale, factors, lanes, mode)
    return types.float32(*kinds), emit


@intrinsic(prefer_literal=True)
def cap_row(typing, scores, tokens, scale, cap, lanes):
    """scores = cap · tanh(scale · score / cap), in place; tokens is a multiple of lanes."""
    (n,) = literals(lanes)

    def emit(context, builder, signature, args):
        scores, tokens, scale, cap = args[:4]
        v = Lanes(builder, n)
        twice = v.splat(builder.fmul(F32(2.0), builder.fdiv(scale, cap)))
        one, height = v.number(1.0), v.splat(cap)
        with loop(builder, builder.udiv(tokens, I64(n))) as index:
            offset = builder.mul(index, I64(4 * n))
            growth = v.exp(builder.fmul(v.load(scores, offset), twice))
            # tanh x = 1 - 2 / (e^2x + 1), right at both infinities
            part = builder.fdiv(v.number(2.0), builder.fadd(growth, one))
            v.store(builder.fmul(height, builder.fsub(one, part)), scores, offset)
        return context.get_dummy_value()

    return types.void(scores, tokens, scale, cap, lanes), emit


@intrinsic(prefer_literal=True)
def scale_row(typing, sums, factor, dim, lanes):
    """sums [dim] *= factor."""
    D, n = literals(dim, lanes)

    def emit(context, builder, signature, args):
        v = Lanes(builder, n)
        factor = v.splat(args[1])
        for offset in range(0, D * 4, n * 4):
            v.store(builder.fmul(v.load(args[0], offset), factor), args[0], offset)
        return context.get_dummy_value()

    return types.void(sums, factor, dim, lanes), emit


@intrinsic(prefer_literal=True)
def convert_row(typing, source, target, dim, lanes, from_bf16, to_bf16):
    """Copy a row [dim] of bf16 or fp32 as bf16 or fp32."""
    D, n, reads_bf16, writes_bf16 = literals(dim, lanes, from_bf16, to_bf16)

    def emit(context, builder, signature, args):
        source, target = args[:2]
        v = Lanes(builder, n)
        for first in range(0, D, n):
            raw = v.load(source, first * (2 if reads_bf16 else 4), v.i16 if reads_bf16 else v.f32)
            if reads_bf16 and not writes_bf16:
                raw = v.widen(raw)
            elif writes_bf16 and not reads_bf16:
                raw = v.narrow(raw)
            v.store(raw, target, first * (2 if writes_bf16 else 4))
        return context.get_dummy_value()

    return types.void(source, target, dim, lanes, from_bf16, to_bf16), emit


@intrinsic(prefer_literal=True)
def write_row(typing, sums, factor, target, dim, lanes, bf16):
    """target [dim] = factor · sums [dim], as bf16 or fp32."""
    D, n, is_bf16 = literals(dim, lanes, bf16)

    def emit(context, builder, signature, args):
        sums, factor, target = args[:3]
        v = Lanes(builder, n)
        factor = v.splat(factor)
        for first in range(0, D, n):
            value = builder.fmul(v.load(sums, first * 4), factor)
            value = v.narrow(value) if is_bf16 else value
            v.store(value, target, first * (2 if is_bf16 else 4))
        return context.get_dummy_value()

    return types.void(sums, factor, target, dim, lanes, bf16), emit


@intrinsic(prefer_literal=True)
def neighbour(typing, index, width):
    """Where the ``index``-th of many lies among its ``width`` neighbours in an int32."""
    (n,) = literals(width)

    def emit(context, builder, signature, args):
        place = builder.and_(args[0], I64(n - 1))
        if n < 4:
            return place
        swapped = builder.lshr(place, I64(1))  # QUAD: the two bits in turn
        return builder.or_(swapped, builder.shl(builder.and_(place, I64(1)), I64(1)))

    return types.int64(types.int64, width), emit


@intrinsic(prefer_literal=True)
def fetch(typing, address, size):
    """Ask for ``size`` bytes to come closer, without waiting."""
    (total,) = literals(size)

    def emit(context, builder, signature, args):
        for offset in range(0, total, _CACHE_LINE_BYTES):
            Lanes(builder, 1).prefetch(args[0], offset)
        return context.get_dummy_value()

    return types.void(types.int64, size), emit


@intrinsic(prefer_literal=True)
def fill(typing, target, begin, end, value):
    """target[begin:end] = value, fp32; empty if begin ≥ end."""

    def emit(context, builder, signature, args):
        target, begin, end, value = args
        v = Lanes(builder, 1)
        count = builder.sub(end, begin)
        count = builder.select(builder.icmp_signed(">", count, I64(0)), count, I64(0))
        with loop(builder, count) as index:
            v.store(value, target, builder.mul(builder.add(begin, index), I64(4)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit
