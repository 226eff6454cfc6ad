"""Kernels over rows of features: norms, activation, embedding. fp32 inside."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton.early import begin


@triton.jit
def norm_kernel(
    x, residual, weight, out, row_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row a program. ADD: ``residual`` becomes its sum with ``x``, rounded, and is normed."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    real = d < SIZE
    scale = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    begin(EARLY)
    wide = tl.load(x + row * row_stride + d, mask=real, other=0.0).to(tl.float32)
    if ADD:
        sums = residual + row * SIZE + d
        wide += tl.load(sums, mask=real, other=0.0).to(tl.float32)
        rounded = wide.to(residual.dtype.element_ty)
        tl.store(sums, rounded, mask=real)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * inverse * scale).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + d, normed, mask=real)


@triton.jit
def gate_kernel(
    gate_up, out, row_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK features of a row a program. gate / (1 + e^-z) · up: z = gate is SiLU, with GELU the
    cubic 2 √(2/π) (x + 0.044715 x³) of it is that function's tanh form."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < SIZE
    begin(EARLY)
    at = gate_up + row * row_stride + d
    gate = tl.load(at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=real, other=0.0).to(tl.float32)
    z = gate
    if GELU:
        z = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    y = gate / (1.0 + tl.exp(-z)) * up
    tl.store(out + row * SIZE + d, y.to(out.dtype.element_ty), mask=real)


@triton.jit
def embedding_kernel(
    ids, weight, out, row_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = d < SIZE
    begin(EARLY)
    token = tl.load(ids + row).to(tl.int64)
    vector = tl.load(weight + token * row_stride + d, mask=real)
    tl.store(out + row * SIZE + d, vector, mask=real)
