"""Keys and values in fp8: e4m3 codes, with one fp16 scale a token and KV head.

Pages are bytes, uint8 [P, L, 2, K, page_size · (D + 2)]: a head's codes of all tokens of the page,
then their scales. So a page is still one range of memory that means the same wherever it is
copied, and nothing has to be calibrated. Every backend makes the same codes and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_DTYPE = torch.float8_e4m3fn
LARGEST_CODE = 448.0
SCALE_BYTES = 2
PHASES = 16  # scales that are tried; twice a scale makes the same errors
WEIGHT_FLOOR = 0.5
# Scales are positive fp16: no division by zero, and no infinity.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0


def head_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of the keys, or values, of one KV head in a page of one layer."""
    return page_size * (head_dim + SCALE_BYTES)


def is_fp8(kv_pages: Tensor) -> bool:
    """Whether pages hold codes and scales rather than plain numbers."""
    return kv_pages.dtype is torch.uint8


def key_weights(q: Tensor, kv_heads: int) -> Tensor:
    """What errors of keys weigh, fp32 [T, K, D], by the rotated queries [T, H, D] of the same
    tokens: squares, summed over the query heads of a KV head, plus WEIGHT_FLOOR of their mean.

    An error of a key counts by the queries that it meets. These are not known yet, but queries of a
    head are large in the same features, and a token's own are at hand."""
    squares = q.float().square().unflatten(1, (kv_heads, -1)).sum(2)
    return squares + WEIGHT_FLOOR * squares.mean(-1, keepdim=True)


def quantize(x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D] and scales fp16 [...] of ``x`` [..., D].

    The least scale is max|x| / 448, so that no code is beyond the largest; of PHASES scales from
    there to twice as much, rounded up to fp16, the one with the least squared error is taken, the
    smaller if in doubt. ``weights`` [..., D], if any, multiply squares of errors. Vectors beyond
    what the largest scale reaches saturate. Only a vector with a NaN reads back as NaN.
    """
    wide = x.float()
    least = wide.abs().amax(-1) / LARGEST_CODE
    codes, scale = _with_scale(wide, least)
    error = _squared_error(wide, codes, scale, weights)
    for phase in range(1, PHASES):
        others = _with_scale(wide, least * (1 + phase / PHASES))
        other_error = _squared_error(wide, *others, weights)
        better = other_error < error
        codes = torch.where(better.unsqueeze(-1), others[0], codes)
        scale = torch.where(better, others[1], scale)
        error = torch.where(better, other_error, error)
    return codes, scale


def _with_scale(wide: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``wide`` [..., D] for scales of at least ``least`` [...], if there are such."""
    exact = least.clamp(SMALLEST_SCALE, LARGEST_SCALE)
    nearest = exact.half()
    scale = (nearest.view(torch.int16) + (nearest.float() < exact)).view(torch.float16)
    scaled = wide * scale.float().reciprocal().unsqueeze(-1)
    return scaled.clamp(-LARGEST_CODE, LARGEST_CODE).to(KV_DTYPE).view(torch.uint8), scale


def _squared_error(wide: Tensor, codes: Tensor, scale: Tensor, weights: Tensor | None) -> Tensor:
    squares = (dequantize(codes, scale) - wide).square()
    return (squares if weights is None else squares * weights).sum(-1)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., D] of codes [..., D] and scales [...]; exact."""
    return codes.view(KV_DTYPE).float() * scale.float().unsqueeze(-1)


def page_views(kv_pages: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The same memory as codes uint8 [..., page_size, D] and scales fp16 [..., page_size]."""
    split = kv_pages.shape[-1] - page_size * SCALE_BYTES
    codes = kv_pages[..., :split].unflatten(-1, (page_size, -1))
    return codes, kv_pages[..., split:].view(torch.float16)
