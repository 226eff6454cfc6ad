"""Where a checkpoint tensor goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WeightSlot:
    """A tensor that a model wants, by its full checkpoint ``shape``; ``load`` keeps a share."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
