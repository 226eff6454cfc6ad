"""QK-norm, rotation and the write to the KV pages, in one pass over the merged projection."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import fp8
from octavo.ops.triton.early import begin


@triton.jit
def _scaled(x, weight, feature, chosen, DIM: tl.constexpr):
    """``x`` [heads, WIDTH] times the weight of each column's ``feature``, in ``chosen`` heads."""
    scale = tl.load(weight + feature, mask=feature < DIM, other=0.0).to(tl.float32)
    return tl.where(chosen[:, None], x * scale[None, :], x)


@triton.jit(do_not_specialize=["layer"])
def rope_kernel(  # noqa: PLR0913
    qkv, positions, cos_sin, q_norm, k_norm, pages, offsets, q_out, kv, layer,
    token_stride, page_stride, layer_stride, values_stride, head_stride, offset_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, NORM_Q: tl.constexpr, NORM_K: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK heads of a token a program; heads are queries, keys, values. The first 2 · HALF
    features are rotated: y[d] = x[d] cos ∓ x[partner of d] sin."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    turned = (d < 2 * HALF) & (d < DIM)
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    real = (is_q | is_k | is_v)[:, None] & (d < DIM)[None, :]
    begin(EARLY)
    at = qkv + token * token_stride + head[:, None] * DIM
    x = tl.load(at + d[None, :], mask=real, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=real, other=0.0).to(tl.float32)
    if NORM_Q or NORM_K:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        normed = (is_q & NORM_Q) | (is_k & NORM_K)
        x = tl.where(normed[:, None], x * inverse, x)
        other = tl.where(normed[:, None], other * inverse, other)
    if NORM_Q:
        x = _scaled(x, q_norm, d, is_q, DIM)
        other = _scaled(other, q_norm, partner, is_q, DIM)
    if NORM_K:
        x = _scaled(x, k_norm, d, is_k, DIM)
        other = _scaled(other, k_norm, partner, is_k, DIM)
    row = cos_sin + tl.load(positions + token) * (2 * HALF)
    angle = tl.where(d < HALF, d, d - HALF)
    cos = tl.load(row + angle, mask=turned, other=1.0)
    sin = tl.load(row + HALF + angle, mask=turned, other=0.0)
    sin = tl.where(d < HALF, -sin, sin)
    y = tl.where(is_v[:, None], x, x * cos[None, :] + other * sin[None, :])
    q_at = q_out + (token * Q_HEADS + head[:, None]) * DIM + d[None, :]
    tl.store(q_at, y.to(q_out.dtype.element_ty), mask=real & is_q[:, None])
    offset = tl.load(offsets + token)
    place = kv + tl.load(pages + token) * page_stride + layer.to(tl.int64) * layer_stride
    kv_head = tl.where(is_k, head - Q_HEADS, head - Q_HEADS - KV_HEADS)
    slot = kv_head * head_stride + is_v.to(tl.int32) * values_stride
    written = real & (is_k | is_v)[:, None]
    if FP8:
        codes, scales = fp8.quantize(y)
        in_head = tl.where(is_v[:, None], fp8.value_place(offset, d, DIM)[None, :],
                           offset * DIM + d[None, :])  # fmt: skip
        tl.store(place + slot[:, None] + in_head, codes, mask=written)
        scale_at = fp8.scale_place(place + slot + PAGE * DIM) + offset
        tl.store(scale_at, scales, mask=is_k | is_v)
    else:
        kv_at = place + offset * offset_stride + slot[:, None] + d[None, :]
        tl.store(kv_at, y.to(kv.dtype.element_ty), mask=written)
