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
# Scales are positive fp16: no division by zero, and no infinity.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0


def head_bytes(page_size: int, head_dim: int) -> int:
    """Bytes of the keys, or values, of one KV head in a page of one layer."""
    return page_size * (head_dim + SCALE_BYTES)


def is_fp8(kv_pages: Tensor) -> bool:
    """Whether pages hold codes and scales rather than plain numbers."""
    return kv_pages.dtype is torch.uint8


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D] and scales fp16 [...] of ``x`` [..., D].

    A scale is max|x| / 448, rounded up to fp16, so no code is beyond the largest; vectors beyond
    what the largest scale reaches saturate. Only a vector with a NaN reads back as NaN.
    """
    wide = x.float()
    exact = (wide.abs().amax(-1) / LARGEST_CODE).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    nearest = exact.half()
    scale = (nearest.view(torch.int16) + (nearest.float() < exact)).view(torch.float16)
    scaled = wide * scale.float().reciprocal().unsqueeze(-1)
    codes = scaled.clamp(-LARGEST_CODE, LARGEST_CODE).to(KV_DTYPE)
    return codes.view(torch.uint8), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., D] of codes [..., D] and scales [...]; exact."""
    return codes.view(KV_DTYPE).float() * scale.float().unsqueeze(-1)


def page_views(kv_pages: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The same memory as codes uint8 [..., page_size, D] and scales fp16 [..., page_size]."""
    split = kv_pages.shape[-1] - page_size * SCALE_BYTES
    codes = kv_pages[..., :split].unflatten(-1, (page_size, -1))
    return codes, kv_pages[..., split:].view(torch.float16)
