"""The draw: exact probabilities, from nothing but seed, index and id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.cpu.jit import default_cache_dir
from octavo.ops.sampling import select_sampling_ops
from octavo.ops.sampling.cpu import CpuSamplingOps
from octavo.ops.sampling.reference import (
    ALL_MASKED,
    BLOCK,
    NON_FINITE,
    OK,
    DrawParams,
    SamplingOps,
    exponentials,
    perturbed_scores,
    philox,
    score_gap,
)
from octavo.ops.sampling.rows import philox as philox_cpu

REFERENCE = SamplingOps()
CPU = CpuSamplingOps(threads=1, cache_dir=default_cache_dir())
BOTH = pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "numba"])

# Salmon et al.'s own known answers (Random123, kat_vectors): counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def params(rows: int, temperature: float = 1.0, **values) -> DrawParams:
    def full(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float64)

    return DrawParams(
        temperature=full(temperature),
        top_k=torch.full((rows,), values.get("top_k", 0)),
        top_p=full(values.get("top_p", 1.0)),
        min_p=full(values.get("min_p", 0.0)),
        seed=values.get("seed", torch.arange(rows)),
        index=values.get("index", torch.zeros(rows, dtype=torch.int64)),
        all_greedy=temperature == 0,
    )


def take(p: DrawParams, rows: Tensor) -> DrawParams:
    return DrawParams(
        p.temperature[rows], p.top_k[rows], p.top_p[rows], p.min_p[rows], p.seed[rows],
        p.index[rows], p.all_greedy,
    )  # fmt: skip


def random_logits(rows: int, size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_papers_numbers(counter, key, result):
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    expected = tuple(int(word, 16) for word in result.split())
    packed = np.uint64(low | high << 32)
    found = philox(
        torch.tensor([packed.astype(np.int64)]), tuple(torch.tensor([word]) for word in words)
    )
    assert tuple(int(word) for word in found) == expected
    assert tuple(philox_cpu(packed, *(np.uint64(word) for word in words))) == expected


def test_noise_is_exponential_for_every_id():
    """Kolmogorov-Smirnov on fixed seeds: nothing here can vary from run to run."""
    noise = exponentials(torch.arange(200), torch.arange(200) * 3, 5 * BLOCK).numpy()
    for sample in (noise.ravel(), noise[:, 7], noise[:, ::BLOCK].ravel(), noise[3]):
        ordered = 1.0 - np.exp(-np.sort(sample))
        steps = np.arange(1, len(ordered) + 1) / len(ordered)
        assert np.abs(ordered - steps).max() < 1.63 / np.sqrt(len(ordered))


def test_noise_of_two_ids_is_independent_also_within_a_block():
    noise = exponentials(torch.arange(4000), torch.zeros(4000, dtype=torch.int64), 2 * BLOCK)
    uniform = 1.0 - torch.exp(-noise)
    for one, other in [(0, 1), (5, BLOCK - 1), (0, BLOCK), (3, 2 * BLOCK - 1)]:
        quarter = ((uniform[:, one] < 0.5) & (uniform[:, other] < 0.5)).double().mean()
        assert abs(quarter - 0.25) < 0.03
        assert abs(np.corrcoef(uniform[:, one], uniform[:, other])[0, 1]) < 0.06


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_the_probabilities(temperature):
    draws, size = 20_000, 2 * BLOCK + 37
    row = random_logits(1, size, scale=2.0)
    ids, _ = CPU.draw(row.expand(draws, -1).contiguous(), params(draws, temperature))
    found = np.bincount(ids, minlength=size) / draws
    expected = torch.softmax(row[0].double() / temperature, -1).numpy()
    assert (np.abs(found - expected) <= 4.5 * np.sqrt(expected / draws) + 1 / draws).all()


def test_successive_draws_of_one_seed_are_independent():
    draws = 4000
    row = random_logits(1, 50, scale=1.0)
    at = params(
        draws, seed=torch.full((draws,), 2**63 - 5), index=torch.arange(draws, dtype=torch.int64)
    )
    ids, _ = CPU.draw(row.expand(draws, -1).contiguous(), at)
    same = (ids[1:] == ids[:-1]).double().mean()
    expected = torch.softmax(row[0].double(), -1).square().sum()
    assert abs(same - expected) < 0.02


@pytest.mark.parametrize("size", [1, 2, 63, BLOCK, BLOCK + 1, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 8.0])
def test_cpu_draws_what_the_reference_draws(size, scale):
    rows = 40
    logits = random_logits(rows, size, scale=scale)
    at = params(rows, 0.8, seed=torch.arange(rows) * 7919 - 3, index=torch.arange(rows) * 5)
    expected, _ = REFERENCE.draw(logits, at)
    assert torch.equal(CPU.draw(logits, at)[0], expected)


@BOTH
def test_a_row_does_not_depend_on_the_batch(ops):
    rows = 24
    logits = random_logits(rows, 1500)
    at = params(rows, 0.9, top_p=0.8, seed=torch.arange(rows) * 31, index=torch.arange(rows))
    whole, _ = ops.draw(logits, at)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.draw(logits[order], take(at, order))[0], whole[order])
    for row in range(0, rows, 5):
        one = torch.tensor([row])
        assert torch.equal(ops.draw(logits[one], take(at, one))[0], whole[one])


def test_threads_do_not_change_ids():
    rows, size = 64, 4096
    logits = random_logits(rows, size)
    many = CpuSamplingOps(threads=2, cache_dir=default_cache_dir())
    at = params(rows, 1.0, top_p=0.9)
    assert torch.equal(many.draw(logits, at)[0], CPU.draw(logits, at)[0])


def test_seed_uses_all_64_bits_and_sign():
    logits = torch.zeros(4, 4096)
    seeds = torch.tensor([1, 1 + 2**32, -1, 2**63 - 1])
    ids, _ = CPU.draw(logits, params(4, seed=seeds))
    assert len(set(ids.tolist())) == 4
    assert torch.equal(ids, REFERENCE.draw(logits, params(4, seed=seeds))[0])


def test_small_errors_of_logits_change_a_sample_only_at_a_small_gap():
    rows = 400
    logits = random_logits(rows, 600, scale=1.0)
    at = params(rows, 0.7)
    ids, _ = CPU.draw(logits, at)
    shaken, _ = CPU.draw(logits + 1e-5 * random_logits(rows, 600, seed=2, scale=1.0), at)
    changed = ids != shaken
    assert (score_gap(logits, at)[changed] < 1e-4 / 0.7).all()
    assert not changed.all()


def test_score_gap_is_that_of_the_two_best():
    logits = random_logits(3, 100)
    scores = perturbed_scores(logits, params(3)).sort(-1, descending=True).values
    assert torch.equal(score_gap(logits, params(3)), scores[:, 0] - scores[:, 1])
    assert torch.isinf(score_gap(logits, params(3, top_k=1))).all()
    greedy = score_gap(torch.tensor([[1.0, 3.0, 2.5]]), params(1, 0.0))
    assert greedy.tolist() == [0.5]


@BOTH
def test_greedy_takes_the_lowest_id_on_ties(ops):
    logits = torch.full((4, 300), -1.0)
    logits[0, [7, 200, 299]] = 2.0
    logits[1, [299]] = 2.0
    logits[2] = 0.0
    logits[3, 5], logits[3, 4] = 0.0, -0.0  # zeros tie whatever their sign
    ids, status = ops.draw(logits, params(4, 0.0))
    assert ids.tolist() == [7, 299, 0, 4]
    assert status.tolist() == [OK] * 4


@BOTH
def test_greedy_and_sampled_rows_share_a_batch(ops):
    logits = random_logits(4, 500)
    at = params(4, 1.0)
    at.temperature = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    ids, _ = ops.draw(logits, at)
    assert ids[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert torch.equal(ids[1::2], REFERENCE.draw(logits, params(4))[0][1::2])


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_are_told_and_their_neighbours_drawn(ops, temperature):
    negative_nan = torch.tensor([0xFFC00000], dtype=torch.uint32).view(torch.float32)
    logits = random_logits(7, 400)
    clean, _ = ops.draw(logits, params(7, temperature, top_p=0.9))
    logits[1, 399] = torch.nan
    logits[2, 0] = negative_nan[0]
    logits[3, 128] = torch.inf
    logits[4] = -torch.inf
    logits[5, :10] = -torch.inf  # some ids are impossible: no fault
    ids, status = ops.draw(logits, params(7, temperature, top_p=0.9))
    assert status.tolist() == [OK, NON_FINITE, NON_FINITE, NON_FINITE, ALL_MASKED, OK, OK]
    assert torch.equal(ids[[0, 6]], clean[[0, 6]])
    assert ids[5] >= 10
    assert ((ids >= 0) & (ids < 400)).all()
    assert ops.status(logits, torch.tensor([6, 4, 1])).tolist() == [OK, ALL_MASKED, NON_FINITE]


@BOTH
def test_impossible_ids_are_never_drawn(ops):
    logits = torch.full((300, 260), -torch.inf)
    logits[:, [3, 250]] = 0.0
    ids, _ = ops.draw(logits, params(300, 30.0, top_k=100))
    assert set(ids.tolist()) == {3, 250}


@BOTH
def test_extreme_temperatures(ops):
    logits = random_logits(64, 300)
    cold, _ = ops.draw(logits, params(64, 1e-300, top_p=0.9))
    assert torch.equal(cold, logits.argmax(-1))
    hot, _ = ops.draw(logits, params(64, 2.0**15, top_p=0.999))
    assert len(set(hot.tolist())) > 40


def test_the_device_chooses_the_operations():
    assert select_sampling_ops(torch.device("cpu"), threads=1).name == "numba"
    assert select_sampling_ops(torch.device("meta")).name == "reference"
