"""Penalties and log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.cpu.jit import default_cache_dir
from octavo.ops.sampling.cpu import CpuSamplingOps
from octavo.ops.sampling.reference import PROMPT_FLAG, PenaltyParams, SamplingOps

REFERENCE = SamplingOps()
CPU = CpuSamplingOps(threads=1, cache_dir=default_cache_dir())
BOTH = pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "numba"])


def penalties(rows: list[int], repetition, frequency, presence) -> PenaltyParams:
    def full(value) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float32).expand(len(rows)).contiguous()

    return PenaltyParams(
        torch.tensor(rows), torch.arange(len(rows)), full(repetition), full(frequency),
        full(presence),
    )  # fmt: skip


@BOTH
def test_order_and_reach_of_the_three_penalties(ops):
    """Repetition first and on prompt and output; frequency and presence on output only."""
    logits = torch.tensor([[5.0, 5.0, 5.0, 5.0, 5.0], [2.0, 1.0, -1.0, 0.5, 0.0]])
    counts = torch.zeros(1, 5, dtype=torch.int32)
    counts[0, 0] = 2
    counts[0, 2] = PROMPT_FLAG
    ops.penalise(logits, counts, penalties([1], 2.0, 0.5, 0.25))
    assert logits[1].tolist() == [-0.25, 1.0, -2.0, 0.5, 0.0]
    assert logits[0].tolist() == [5.0] * 5


def test_cpu_penalties_are_bit_equal_to_the_reference():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 777, generator=generator) * 5
    logits[3, 5] = -torch.inf
    counts = torch.randint(0, 4, (6, 777), generator=generator, dtype=torch.int32)
    counts += PROMPT_FLAG * torch.randint(0, 2, (6, 777), generator=generator, dtype=torch.int32)
    at = penalties(
        [8, 0, 3, 4, 1, 6],
        torch.tensor([1.3, 0.4, 7.0, 1.0, 1.1, 1.0]),
        torch.tensor([0.0, 1.05, -2.0, 0.1, 0.0, 0.0]),
        torch.tensor([0.7, 0.0, 2.0, -0.3, 0.0, 0.0]),
    )
    expected = logits.clone()
    REFERENCE.penalise(expected, counts, at)
    untouched = logits[[2, 5, 7]].clone()
    CPU.penalise(logits, counts, at)
    assert torch.equal(logits, expected)
    assert torch.equal(logits[[2, 5, 7]], untouched)


@BOTH
@pytest.mark.parametrize("k", [0, 1, 5, 20, 999])
def test_log_probabilities_equal_a_log_softmax(ops, k):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 500, generator=generator) * 4
    targets = torch.randint(0, 500, (6,), generator=generator)
    found = ops.top_logprobs(logits, targets, k)
    expected = torch.log_softmax(logits.double(), -1)
    best = logits.argsort(dim=-1, descending=True, stable=True)
    k = min(k, 500)
    assert torch.equal(found.ids, best[:, :k])
    np.testing.assert_allclose(found.values, expected.gather(-1, best[:, :k]), atol=1e-9)
    np.testing.assert_allclose(found.target, expected.gather(-1, targets[:, None])[:, 0], atol=1e-9)
    ranks = [1 + best[row].tolist().index(int(targets[row])) for row in range(6)]
    assert found.rank.tolist() == ranks


@BOTH
def test_log_probabilities_put_the_lowest_id_first_on_ties(ops):
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf, 2.0, 1.0]])
    found = ops.top_logprobs(logits, torch.tensor([4]), 5)
    assert found.ids.tolist() == [[1, 2, 4, 0, 5]]
    assert found.rank.tolist() == [3]
    found = ops.top_logprobs(logits, torch.tensor([3]), 6)
    assert found.target.tolist() == [-torch.inf]
    assert found.ids[0, 5] == 3
    assert found.rank.tolist() == [6]


def test_cpu_log_probabilities_of_peaked_rows_are_accurate():
    logits = torch.full((1, 5000), -40.0)
    logits[0, 77] = 60.0
    found = CPU.top_logprobs(logits, torch.tensor([3]), 1)
    assert found.values[0, 0] == pytest.approx(0.0, abs=1e-12)
    assert found.target[0] == pytest.approx(-100.0, rel=1e-12)
