"""Products of a few rows with a weight: bound by reading the weight, once, as early as possible."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _products(w, v):
    """``w`` [ROWS, COLUMNS] times each ``v`` [COUNT, COLUMNS], in fp32."""
    return w.to(tl.float32)[None, :, :] * v.to(tl.float32)[:, None, :]


@triton.jit
def vector_kernel(  # noqa: PLR0913
    x, weight, bias, out, num_out, x_stride,
    COUNT: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
    COLUMNS: tl.constexpr, UNROLL: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``out`` [COUNT, num_out] = ``x`` [COUNT, SIZE] times ``weight`` [num_out, SIZE], ROWS outputs
    a program; SIZE is FIRST and a multiple of COLUMNS. Nobody writes weights, so the FIRST inputs'
    are on their way before earlier kernels have ended."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    vector = tl.arange(0, COUNT)
    real = row < num_out
    start = weight + row[:, None].to(tl.int64) * SIZE
    x_start = x + vector[:, None] * x_stride
    column = tl.arange(0, FIRST)[None, :]
    if EARLY:
        gdc_launch_dependents()
    w = tl.load(start + column, mask=real[:, None], other=0.0)
    if EARLY:
        gdc_wait()
    total = tl.sum(_products(w, tl.load(x_start + column)), 2)
    if SIZE > FIRST:
        rest = FIRST + tl.arange(0, COLUMNS)[None, :]
        acc = tl.zeros([COUNT, ROWS, COLUMNS], tl.float32)
        for at in tl.range(0, SIZE - FIRST, COLUMNS, loop_unroll_factor=UNROLL):
            more = tl.load(start + rest + at, mask=real[:, None], other=0.0)
            acc += _products(more, tl.load(x_start + rest + at))
        total += tl.sum(acc, 2)
    if BIAS:
        total += tl.load(bias + row, mask=real, other=0.0).to(tl.float32)[None, :]
    out_at = out + vector[:, None] * num_out + row[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=real[None, :])
