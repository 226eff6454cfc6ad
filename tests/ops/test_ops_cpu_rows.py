"""Norms, activation and products of the CPU backend against the reference."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.api import Ops
from octavo.ops.cpu import linear
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.isa import detect_isa
from octavo.ops.cpu.pool import map_zeros

REFERENCE = Ops()
DTYPES = (torch.float32, torch.bfloat16)
WITH_WEIGHTS = [(dtype, dtype) for dtype in DTYPES] + [(torch.bfloat16, torch.float32)]
SIZES = (576, 33)  # whole vectors, single lanes


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    return CpuOps(isa=detect_isa(), threads=2, cache_dir=None)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    """Not ``exact``: the order of the sum may turn the last bit of a few."""
    rtol = 1e-6 if exact else 2**-7
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    assert exact or (found == expected).float().mean() > 0.99


@pytest.mark.parametrize(("dtype", "weight_dtype"), WITH_WEIGHTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 101])
def test_rms_norm(
    ops: CpuOps, dtype: torch.dtype, weight_dtype: torch.dtype, size: int, count: int
) -> None:
    x, weight = random(count, size, dtype=dtype), random(size, dtype=weight_dtype)
    kept = x.clone()
    got = ops.rms_norm(x, weight, 1e-5)
    assert_rounded_alike(got, REFERENCE.rms_norm(kept, weight, 1e-5), exact=weight_dtype is dtype)
    assert torch.equal(x, kept)


@pytest.mark.parametrize(("dtype", "weight_dtype"), WITH_WEIGHTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 101])
def test_add_rms_norm(
    ops: CpuOps, dtype: torch.dtype, weight_dtype: torch.dtype, size: int, count: int
) -> None:
    x, residual = random(count, size, dtype=dtype), random(count, size, dtype=dtype, scale=3)
    weight = random(size, dtype=weight_dtype)
    expected = REFERENCE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, expected[1])
    assert_rounded_alike(normed, expected[0], exact=weight_dtype is dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gated_activations(ops: CpuOps, dtype: torch.dtype, size: int, name: str) -> None:
    gate_up = random(101, 2 * size, dtype=dtype, scale=8)
    gate_up[0, :3] = torch.tensor([-100.0, 100.0, 0.0])
    got, expected = getattr(ops, name)(gate_up), getattr(REFERENCE, name)(gate_up)
    rtol = 2e-6 if dtype is torch.float32 else 1e-2
    atol = 1e-6 if name == "silu_mul" else 1e-5  # 1 + tanh cancels in the reference
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    exact = ((got - expected).abs() <= atol).float().mean()
    assert dtype is torch.float32 or exact > 0.999


def test_shapes_and_strides_of_inputs(ops: CpuOps) -> None:
    weight = random(64, dtype=torch.float32)
    x = random(5, 3, 128, dtype=torch.float32)[..., ::2]
    expected = REFERENCE.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
    sums = ops.add_rms_norm(x, x.clone(), weight, 1e-5)
    torch.testing.assert_close(sums, REFERENCE.add_rms_norm(x, x.clone(), weight, 1e-5))
    assert ops.rms_norm(x[:0], weight, 1e-5).shape == (0, 3, 64)
    assert ops.silu_mul(random(2, 3, 8, dtype=torch.float16)).dtype is torch.float16


def test_a_nan_is_not_lost(ops: CpuOps) -> None:
    for dtype in DTYPES:
        x = random(3, 64, dtype=dtype)
        x[1, 7] = float("nan")
        assert ops.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5)[1].isnan().all()
        assert ops.silu_mul(x)[1, 7].isnan()
        assert ops.silu_mul(x)[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: CpuOps, dtype: torch.dtype, bias: bool) -> None:
    weight = random(100, 72, dtype=dtype)
    b = random(100, dtype=dtype) if bias else None
    packed = ops.pack_linear(weight, b)
    for count in (1, 3, 64):
        x = random(count, 72, dtype=dtype)
        expected = torch.nn.functional.linear(
            x.double(), weight.double(), None if b is None else b.double()
        )
        rtol, atol = (1e-5, 1e-5) if dtype is torch.float32 else (1e-2, 1e-1)
        torch.testing.assert_close(ops.linear(x, packed).double(), expected, rtol=rtol, atol=atol)


def test_packed_weights_work_on_this_torch() -> None:
    """The private ops are there; when a new torch drops them this says so."""
    assert all(linear.packing_works(dtype) for dtype in DTYPES)
    assert not linear.packing_works(torch.float16)


def test_without_packing_products_are_plain(monkeypatch: pytest.MonkeyPatch, ops: CpuOps) -> None:
    monkeypatch.setattr(linear, "packing_works", lambda dtype: False)
    weight, bias, x = (random(*shape, dtype=torch.float32) for shape in ((8, 6), (8,), (3, 6)))
    packed = ops.pack_linear(weight, bias)
    assert torch.equal(ops.linear(x, packed), torch.nn.functional.linear(x, weight, bias))


def test_page_memory_is_zero_and_aligned() -> None:
    pool = map_zeros(7, 300_000, torch.bfloat16)
    assert pool.shape == (7, 300_000)
    assert pool.data_ptr() % 64 == 0
    assert not pool.any()
    pool[3] = 1
    assert pool.sum() == 300_000
    assert map_zeros(0, 5, torch.float32).shape == (0, 5)
