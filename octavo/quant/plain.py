"""The unquantised linear: the checkpoint's weight, packed once as the backend likes it."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.api import Ops
from octavo.quant.base import Parameter


class PlainLinear:
    """Weight [out, in] and bias [out], in the model's dtype.

    The originals are let go once packed, so a backend that packs does not hold two copies.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, Parameter] = {}

    def create(
        self, out_size: int, in_size: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        self.parameters["weight"] = Parameter(weight, out_axis=0, in_axis=1)
        if bias:
            values = torch.empty(out_size, dtype=dtype, device=device)
            self.parameters["bias"] = Parameter(values, out_axis=0, in_axis=None)

    def after_load(self, ops: Ops) -> None:
        weight, bias = self.parameters.pop("weight"), self.parameters.pop("bias", None)
        self._ops = ops
        self._packed = ops.pack_linear(weight.tensor, None if bias is None else bias.tensor)

    def apply(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._packed)
