"""LinearMethod: how a linear layer stores its weight and multiplies by it, in three verbs.

A layer creates its method's parameters, the loader fills them, ``after_load`` turns them into
what the device wants, ``apply`` multiplies. A method knows one rank's share and nothing of
ranks: the layer cuts checkpoint tensors along the axes that each parameter declares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from octavo.ops.api import Ops


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor to fill from a checkpoint, and which of its axes run over outputs and inputs."""

    tensor: Tensor
    out_axis: int | None
    in_axis: int | None


class LinearMethod(Protocol):
    parameters: dict[str, Parameter]  # by checkpoint suffix ("weight", "bias", …)

    def create(
        self, out_size: int, in_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate :attr:`parameters`, unfilled."""

    def after_load(self, ops: Ops) -> None:
        """Called once, when all parameters are filled and before any :meth:`apply`; lets go of
        the parameters that are no longer needed."""

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, in_size] to [T, out_size]."""
