"""The Triton draw is the reference's: in Triton's interpreter, or on a GPU if there is one."""
# ruff: noqa: E402  (without Triton, nothing here can be imported)

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

import tests.fakes.interpreter  # noqa: F401
from octavo.ops.sampling.gpu import TritonSamplingOps
from octavo.ops.sampling.reference import (
    ALL_MASKED,
    BLOCK,
    NON_FINITE,
    OK,
    DrawParams,
    SamplingOps,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = SamplingOps()
OPS = TritonSamplingOps(tile=256, kept=32)  # small, so that short rows are searched in parts


def params(rows: int, **values) -> DrawParams:
    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> Tensor:
        value = torch.as_tensor(values.get(name, default), dtype=dtype)
        return value.expand(rows).contiguous().to(DEVICE)

    return DrawParams(
        column("temperature", 0.8),
        column("top_k", 0, torch.int64),
        column("top_p", 1.0),
        column("min_p", 0.0),
        (torch.arange(rows) * 7919 - 3).to(DEVICE),
        (torch.arange(rows) * 5).to(DEVICE),
    )


def random_logits(rows: int, size: int, scale: float, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=draw) * scale).to(DEVICE)


def assert_same(logits: Tensor, at: DrawParams) -> None:
    ids, status = OPS.draw(logits, at)
    expected, expected_status = REFERENCE.draw(logits, at)
    assert status.tolist() == expected_status.tolist()
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize(("size", "scale"), [(1, 1.0), (BLOCK + 1, 0.0), (2100, 0.01), (2100, 8.0)])
def test_draws_what_the_reference_draws(size: int, scale: float) -> None:
    temperature = [0.0, 0.8, 1e-300, 50.0, 0.3]
    assert_same(random_logits(5, size, scale), params(5, temperature=temperature))


TRUNCATIONS = {
    "top_k": [0, 40, 901, 7],
    "top_p": [0.0001, 0.9, 0.3, 1 - 1e-12],
    "min_p": [0.0, 1.0, 0.01, 0.5],
}


@pytest.mark.parametrize("scale", [0.001, 3.0])
@pytest.mark.parametrize("names", [("top_k", "top_p"), ("top_p",), ("top_k", "min_p")])
def test_truncated_rows(names: tuple[str, ...], scale: float) -> None:
    logits = random_logits(4, 1000, scale, seed=1)
    assert_same(logits, params(4, **{name: TRUNCATIONS[name] for name in names}))


def test_ties_at_the_cut_keep_the_lowest_ids() -> None:
    """Retained ids are told by draws at a temperature at which each is as likely."""
    logits = torch.zeros(2, 400, device=DEVICE)
    logits[:, 300:350] = 1.0
    logits[:, :9] = -1.0
    at = params(2, temperature=1e4, top_k=53)
    assert_same(logits, at)
    assert set(OPS.draw(logits, at)[0].tolist()) <= {9, 10, 11, *range(300, 350)}
    assert_same(logits, params(2, temperature=1e4, top_p=0.4))
    assert_same(logits[:1] * 0.0, params(1, top_p=0.25))


def test_cuts_at_round_shares() -> None:
    logits = torch.full((2, 300), -torch.inf, device=DEVICE)
    logits[:, [3, 70, 200, 299]] = torch.tensor([0.0, 0.0, 0.0, 0.0], device=DEVICE)
    assert_same(logits, params(2, temperature=3.0, top_p=0.5))
    assert_same(logits, params(2, temperature=3.0, top_k=9, top_p=0.75))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_are_told_and_their_neighbours_drawn(temperature: float) -> None:
    logits = random_logits(7, 400, 3.0)
    at = params(7, temperature=temperature, top_p=0.9)
    clean, _ = OPS.draw(logits, at)
    logits[1, 399] = torch.nan
    logits[2, 0] = torch.tensor(0xFFC00000 - 2**32, dtype=torch.int32).view(torch.float32)
    logits[3, 128] = torch.inf
    logits[4] = -torch.inf
    logits[5, :10] = -torch.inf
    ids, status = OPS.draw(logits, at)
    assert status.tolist() == [OK, NON_FINITE, NON_FINITE, NON_FINITE, ALL_MASKED, OK, OK]
    assert ids[[0, 6]].tolist() == clean[[0, 6]].tolist()
    assert ids[5] >= 10
    assert ((ids >= 0) & (ids < 400)).all()


def test_zeros_tie_whatever_their_sign() -> None:
    logits = torch.full((1, 300), -1.0, device=DEVICE)
    logits[0, 5], logits[0, 4], logits[0, 290] = 0.0, -0.0, 0.0
    assert OPS.draw(logits, params(1, temperature=0.0))[0].tolist() == [4]
