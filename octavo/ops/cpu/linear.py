"""Products of oneDNN on weights that were laid out for it once.

``torch.ops.mkldnn._reorder_linear_weight`` and ``_linear_pointwise`` are private, so they are
tried before they are used; without them products are plain ``F.linear``.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PackedLinear:
    """A [N, K] weight: oneDNN's own layout (``packed``) or the plain tensor."""

    weight: Tensor
    bias: Tensor | None
    packed: bool


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Lay ``weight`` out for products. The caller drops its own to have one copy in memory."""
    if not packing_works(weight.dtype):
        return PackedLinear(weight, bias, packed=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return PackedLinear(packed, bias, packed=True)


def apply_linear(x: Tensor, linear: PackedLinear) -> Tensor:
    if linear.packed:
        return torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "none", [], "")
    return functional.linear(x, linear.weight, linear.bias)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Try packed products of odd sizes, with and without bias, against plain ones."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.float32, torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 80), (48,), (7, 80))
    )
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        for b in (bias, None):
            for rows in (x, x[:1]):
                got = torch.ops.mkldnn._linear_pointwise(rows, packed, b, "none", [], "")
                expected = functional.linear(
                    rows.float(), weight.float(), None if b is None else b.float()
                )
                if got.shape != expected.shape or not torch.allclose(
                    got.float(), expected, rtol=2e-2, atol=2e-1
                ):
                    raise ValueError("a packed product differs from the plain one")
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        log.warning("oneDNN's packed products do not work here (%s): plain ones are used.", error)
        return False
    return True
