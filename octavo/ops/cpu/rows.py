"""Row-wise kernels: RMSNorm with or without the residual sum, and the gated activation.

Rounding follows the reference step by step, so that bf16 results agree to the last bit but for
the order of one sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from octavo.ops.cpu.jit import FIRST_ARGUMENT, ITEMS, NEXT
from octavo.ops.cpu.memory import load_float64, load_int64, take
from octavo.ops.cpu.simd import F32, I64, Lanes, literals, loop

NORM_ARGUMENTS = "5qd"
GATE_ARGUMENTS = "3q"
# The tanh form of GELU: x (1 + tanh u) / 2 = x / (1 + e^-2u), 2u = 2 √(2/π) (x + 0.044715 x³).
GELU = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU


class RowAccess:
    """Reads and writes a row of bf16 or fp32 as vectors of fp32."""

    def __init__(self, builder: ir.IRBuilder, lanes: int, bf16: bool) -> None:
        self.v = Lanes(builder, lanes)
        self.bf16 = bf16
        self.bytes = (2 if bf16 else 4) * lanes  # a vector

    def at(self, index: ir.Value | int, element: int = 0) -> ir.Value | int:
        """Where the ``index``-th vector begins, in bytes; ``element``: bytes of one, if not the
        row's."""
        size = element * self.v.n if element else self.bytes
        return index * size if isinstance(index, int) else self.v.b.mul(index, I64(size))

    def read(self, row: ir.Value, offset: ir.Value | int) -> ir.Value:
        if self.bf16:
            return self.v.widen(self.v.load(row, offset, self.v.i16))
        return self.v.load(row, offset)

    def write(self, value: ir.Value, row: ir.Value, offset: ir.Value | int) -> None:
        self.v.store(self.v.narrow(value) if self.bf16 else value, row, offset)

    def round(self, value: ir.Value) -> ir.Value:
        return self.v.widen(self.v.narrow(value)) if self.bf16 else value


def inverse_rms(v: Lanes, squares: ir.Value, size: int, eps: ir.Value) -> ir.Value:
    """1 / sqrt(mean + eps), splat, from the vector of partial sums of squares."""
    mean = v.b.fmul(v.total(squares), F32(1.0 / size))
    root = v.b.call(v.b.module.declare_intrinsic("llvm.sqrt", [F32]), [v.b.fadd(mean, eps)])
    return v.splat(v.b.fdiv(F32(1.0), root))


def scaled(
    row: RowAccess, value: ir.Value, factor: ir.Value, weight: ir.Value, index: int | ir.Value,
    fp32_weight: bool,
) -> ir.Value:  # fmt: skip
    """The ``index``-th vector of a norm: value · factor, rounded, · weight; without the rounding in
    between where the weight is fp32."""
    normed = row.v.b.fmul(value, factor)
    if not fp32_weight:
        return row.v.b.fmul(row.read(weight, row.at(index)), row.round(normed))
    return row.v.b.fmul(row.v.load(weight, row.at(index, 4)), normed)


@intrinsic(prefer_literal=True)
def norm_row(typing, x, residual, weight, out, eps, size, lanes, bf16, adds, fp32_weight):
    """out = weight · x / rms(x); with ``adds``, residual += x first and its norm is taken."""
    N, n, is_bf16, has_residual, wide = literals(size, lanes, bf16, adds, fp32_weight)

    def emit(context, builder, signature, args):
        x, residual, weight, out, eps = args[:5]
        row = RowAccess(builder, n, is_bf16)
        v = row.v
        squares = v.variable(v.number(0.0))
        with loop(builder, I64(N // n)) as index:
            at = builder.mul(index, I64(row.bytes))
            value = row.read(x, at)
            if has_residual:
                value = row.round(builder.fadd(row.read(residual, at), value))
                row.write(value, residual, at)
            builder.store(v.fma(value, value, builder.load(squares)), squares)
        factor = inverse_rms(v, builder.load(squares), N, eps)
        with loop(builder, I64(N // n)) as index:
            at = builder.mul(index, I64(row.bytes))
            value = row.read(residual if has_residual else x, at)
            row.write(scaled(row, value, factor, weight, index, wide), out, at)
        return context.get_dummy_value()

    kinds = (x, residual, weight, out, eps, size, lanes, bf16, adds, fp32_weight)
    return types.void(*kinds), emit


@intrinsic(prefer_literal=True)
def gate_row(typing, gate, up, out, size, lanes, bf16, gelu):
    """out = gate / (1 + e^-z) · up; z = gate is SiLU, a cubic of it the tanh form of GELU."""
    N, n, is_bf16, is_gelu = literals(size, lanes, bf16, gelu)

    def emit(context, builder, signature, args):
        gate, up, out = args[:3]
        row = RowAccess(builder, n, is_bf16)
        v = row.v
        with loop(builder, I64(N // n)) as index:
            at = builder.mul(index, I64(row.bytes))
            value = row.read(gate, at)
            z = value
            if is_gelu:
                cubic = v.fma(builder.fmul(value, value), v.number(GELU_CUBIC), v.number(GELU))
                z = builder.fmul(value, cubic)
            below = builder.fadd(v.number(1.0), v.exp(builder.fneg(z)))
            active = row.round(builder.fdiv(value, below))
            row.write(builder.fmul(active, row.read(up, at)), out, at)
        return context.get_dummy_value()

    return types.void(gate, up, out, size, lanes, bf16, gelu), emit


def make_norm(
    size: int, lanes: int, bf16: bool, adds: bool, fp32_weight: bool
) -> tuple[Callable[[int], None], str]:
    """RMSNorm of rows [*, size]; an item is ``grain`` rows."""
    lanes = min(lanes, size & -size)
    row_bytes = size * (2 if bf16 else 4)

    def norm(block):
        x = load_int64(block, FIRST_ARGUMENT)
        residual = load_int64(block, FIRST_ARGUMENT + 1)
        weight = load_int64(block, FIRST_ARGUMENT + 2)
        out = load_int64(block, FIRST_ARGUMENT + 3)
        grain = load_int64(block, FIRST_ARGUMENT + 4)
        eps = load_float64(block, FIRST_ARGUMENT + 5)
        rows = load_int64(block, ITEMS)
        first = take(block, NEXT) * grain
        while first < rows:
            for r in range(first, min(first + grain, rows)):
                at = r * row_bytes
                norm_row(
                    x + at, residual + at, weight, out + at, eps,
                    size, lanes, bf16, adds, fp32_weight,
                )  # fmt: skip
            first = take(block, NEXT) * grain

    name = "add_norm" if adds else "norm"
    return norm, f"{name}_{size}_{lanes}_{int(bf16)}_{int(fp32_weight)}"


def make_gate(size: int, lanes: int, bf16: bool, gelu: bool) -> tuple[Callable[[int], None], str]:
    """silu(gate) · up, or gelu, of rows [*, 2·size]: [*, size]; an item is ``grain`` rows."""
    lanes = min(lanes, size & -size)
    row_bytes = size * (2 if bf16 else 4)

    def gated(block):
        gate_up = load_int64(block, FIRST_ARGUMENT)
        out = load_int64(block, FIRST_ARGUMENT + 1)
        grain = load_int64(block, FIRST_ARGUMENT + 2)
        rows = load_int64(block, ITEMS)
        first = take(block, NEXT) * grain
        while first < rows:
            for r in range(first, min(first + grain, rows)):
                gate = gate_up + r * 2 * row_bytes
                gate_row(gate, gate + row_bytes, out + r * row_bytes, size, lanes, bf16, gelu)
            first = take(block, NEXT) * grain

    return gated, f"{'gelu' if gelu else 'silu'}_{size}_{lanes}_{int(bf16)}"
