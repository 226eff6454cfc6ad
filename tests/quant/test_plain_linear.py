from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from octavo.ops.api import Ops
from octavo.quant.plain import PlainLinear


class PackingOps(Ops):
    """Packs into a tensor of its own, as a fast backend does."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> object:
        return weight.t().contiguous(), bias

    def linear(self, x: Tensor, packed: object) -> Tensor:
        weight, bias = packed  # type: ignore[misc]
        return x @ weight + (0 if bias is None else bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ops", [Ops(), PackingOps()], ids=["reference", "packing"])
def test_apply_multiplies_and_the_original_is_let_go(ops: Ops, bias: bool) -> None:
    torch.manual_seed(0)
    method = PlainLinear()
    method.create(5, 3, bias=bias, dtype=torch.float32, device=torch.device("cpu"))
    assert set(method.parameters) == ({"weight", "bias"} if bias else {"weight"})
    for parameter in method.parameters.values():
        parameter.tensor.normal_()
    weight = method.parameters["weight"].tensor.clone()
    offset = method.parameters["bias"].tensor.clone() if bias else torch.zeros(5)
    original = weakref.ref(method.parameters["weight"].tensor)
    del parameter
    method.after_load(ops)
    assert not method.parameters
    assert (original() is None) == isinstance(ops, PackingOps)
    x = torch.randn(4, 3)
    torch.testing.assert_close(method.apply(x), x @ weight.t() + offset)
