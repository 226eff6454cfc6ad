"""Products of a few rows, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import tests.fakes.interpreter  # noqa: F401
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import H200, Card, RowTiles, VectorTile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILES = replace(H200, rows=RowTiles(vector=VectorTile(rows=4, first=256, columns=128, count=4)))
OPS = TritonOps(Card.of(DEVICE), tiles=TILES)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [128, 256, 768])
@pytest.mark.parametrize("bias", [False, True])
def test_a_few_rows_times_a_weight(count: int, size: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2 * size, generator=draw).half().to(DEVICE)[:, :size]
    weight = torch.randn(37, size, generator=draw).half().to(DEVICE)
    added = torch.randn(37, generator=draw).half().to(DEVICE) if bias else None
    assert OPS._is_vector(x, weight)
    packed = OPS.pack_linear(weight, added)
    expected = x.double() @ weight.double().t() + (0.0 if added is None else added.double())
    found = OPS.linear(x, packed)
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-2)


def test_other_products_are_the_librarys() -> None:
    weight = torch.randn(8, 96).to(DEVICE)
    assert not OPS._is_vector(torch.randn(1, 96).half().to(DEVICE), weight.half())
    assert not OPS._is_vector(torch.randn(3, 128).half().to(DEVICE), weight.half())
    assert not OPS._is_vector(torch.randn(8, 128).half().to(DEVICE), weight.half())
    x = torch.randn(1, 96).to(DEVICE)
    assert torch.equal(OPS.linear(x, (weight, None)), torch.nn.functional.linear(x, weight))
