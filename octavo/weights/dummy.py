"""Random weights: a model of the right shape without its checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

UNIFORM_BOUND = 1e-3
NORMAL_STD = 0.02
MAX_DRAWS = 262_147  # a prime, so that repeats of the block never line up with rows


class DummySource:
    """Tensors of the given shapes, each a function of (seed, name) alone.

    "dummy" is uniform in ±1e-3; "dummy:normal" has standard deviation 0.02 and norms of 1. They
    come on ``device``, the same numbers on each.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        load_format: str,
        seed: int,
        device: str = "cpu",
    ) -> None:
        self.shapes = dict(shapes)
        self._device = device
        self._normal = load_format == "dummy:normal"
        self._seed = seed

    def file_of(self, name: str) -> str:
        return "random weights"

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """In ``dtype`` (None: fp32). Large tensors repeat one block of draws."""
        for name, shape in self.shapes.items():
            yield name, self._draw(name, shape, dtype or torch.float32)

    def _draw(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._normal and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        size = math.prod(shape)
        block = torch.empty(min(size, MAX_DRAWS))
        if self._normal:
            block.normal_(0.0, NORMAL_STD, generator=generator)
        else:
            block.uniform_(-UNIFORM_BOUND, UNIFORM_BOUND, generator=generator)
        block = block.to(self._device, dtype)
        return block.repeat(-(-size // len(block)))[:size].view(shape)
