"""The KV cache as tensors: one pool of equal pages, seen by each layer group in its shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops import fp8
from octavo.ops.api import Ops


def allocate_kv(
    num_pages: int,
    group_layers: Sequence[int],
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> tuple[Tensor, ...]:
    """One tensor [P, L_g, 2, K, page_size, D] a group, all views of the same pages; for
    ``fp8.KV_DTYPE`` bytes in the shape of :mod:`octavo.ops.fp8`.

    A page is as large as its largest group needs and holds all layers of *one* group, so that
    swapping or sending it moves one range. The pages start as zeros: a masked read of memory
    that nothing wrote must not meet a NaN. Memory comes from ``ops``: on a CPU it is not taken
    before it is touched.
    """
    head: tuple[int, ...] = (page_size, head_dim)
    if dtype is fp8.KV_DTYPE:
        head, dtype = (fp8.head_bytes(page_size, head_dim),), torch.uint8
    per_layer = 2 * num_kv_heads * math.prod(head)
    pool = ops.new_pages(num_pages, max(group_layers) * per_layer, dtype, device)
    return tuple(
        pool[:, : layers * per_layer].view(num_pages, layers, 2, num_kv_heads, *head)
        for layers in group_layers
    )
