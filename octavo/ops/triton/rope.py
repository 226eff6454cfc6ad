"""QK-norm, rotation and the write to the KV pages, in one pass over the merged projection."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.triton import fp8
from octavo.ops.triton.early import begin


@triton.jit
def _normed(x, other, weight, d, partner, chosen, eps, DIM: tl.constexpr):
    """RMSNorm of ``chosen`` rows of ``x`` [heads, WIDTH] and of their features' partners."""
    inverse = tl.where(chosen, tl.rsqrt(tl.sum(x * x, 1) / DIM + eps), 1.0)[:, None]
    own = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    of_partner = tl.load(weight + partner, mask=partner < DIM, other=0.0).to(tl.float32)
    x = x * inverse * tl.where(chosen[:, None], own[None, :], 1.0)
    return x, other * inverse * tl.where(chosen[:, None], of_partner[None, :], 1.0)


@triton.jit
def _key_weights(
    at, real, d, partner, cos, sin, q_norm, eps, DTYPE: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """fp32 [heads, WIDTH] of KV heads whose first queries are at ``at`` [heads, 1]: see
    :func:`octavo.ops.fp8.key_weights`."""
    squares = tl.zeros(real.shape, tl.float32)
    chosen = tl.full([real.shape[0]], True, tl.int1)
    for head in tl.static_range(GROUP):
        q = tl.load(at + head * DIM + d[None, :], mask=real, other=0.0).to(tl.float32)
        other = tl.load(at + head * DIM + partner[None, :], mask=real, other=0.0).to(tl.float32)
        if NORM:
            q, other = _normed(q, other, q_norm, d, partner, chosen, eps, DIM)
        q = (q * cos[None, :] + other * sin[None, :]).to(DTYPE).to(tl.float32)
        squares += q * q
    return squares + (tl.sum(squares, 1) * (fp8.WEIGHT_FLOOR / DIM))[:, None]


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
    if NORM_Q:
        x, other = _normed(x, other, q_norm, d, partner, is_q, eps, DIM)
    if NORM_K:
        x, other = _normed(x, other, k_norm, d, partner, is_k, eps, DIM)
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
        if tl.program_id(1) * BLOCK + BLOCK > Q_HEADS:
            GROUP: tl.constexpr = Q_HEADS // KV_HEADS
            first = qkv + token * token_stride + kv_head[:, None] * (GROUP * DIM)
            weights = _key_weights(
                first, real & is_k[:, None], d, partner, cos, sin, q_norm, eps,
                q_out.dtype.element_ty, GROUP, DIM, NORM_Q,
            )  # fmt: skip
            codes, scales = fp8.quantize(y, tl.where(is_k[:, None], weights, 1.0), FP8)
            in_head = tl.where(
                is_v[:, None], fp8.value_place(offset, d, DIM), fp8.key_place(offset, d, DIM)
            )
            tl.store(place + slot[:, None] + in_head, codes, mask=written)
            scale_at = fp8.scale_place(place + slot + PAGE * DIM) + offset
            tl.store(scale_at, scales, mask=is_k | is_v)
    else:
        kv_at = place + offset * offset_stride + slot[:, None] + d[None, :]
        tl.store(kv_at, y.to(kv.dtype.element_ty), mask=written)
