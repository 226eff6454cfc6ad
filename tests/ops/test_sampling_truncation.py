"""Truncation equals a float64 sort, ties included."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.cpu.jit import default_cache_dir
from octavo.ops.sampling.cpu import CpuSamplingOps
from octavo.ops.sampling.reference import (
    BLOCK,
    TOP_P_SLACK,
    DrawParams,
    SamplingOps,
    retained,
)
from octavo.ops.sampling.rows import NO_CUT, cut_top_k, cut_top_p, scan

REFERENCE = SamplingOps()
CPU = CpuSamplingOps(threads=1, cache_dir=default_cache_dir())


def sorted_reference(logits, temperature, top_k, top_p, min_p) -> set[int]:
    """Straight from the definition, one id after the other, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    best = float(logits[order[0]])
    weight = {i: math.exp((float(logits[i]) - best) / temperature) for i in order}
    if top_k:
        order = order[:top_k]
    if top_p < 1.0:
        total, reached, kept = math.fsum(weight[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            reached += weight[i]
            if reached >= top_p * (1.0 - TOP_P_SLACK) * total:
                break
        order = kept
    floor = math.log(min_p) if min_p > 0 else -math.inf
    return {i for i in order if (float(logits[i]) - best) / temperature >= floor}


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> DrawParams:
    def full(value):
        return torch.full((rows,), value, dtype=torch.float64)

    return DrawParams(
        full(temperature), torch.full((rows,), top_k), full(top_p), full(min_p),
        torch.arange(rows), torch.zeros(rows, dtype=torch.int64),
    )  # fmt: skip


# Few different values, so that most examples have ties, at the cut too.
TIED = st.lists(st.sampled_from([-2.0, -1.0, 0.0, -0.0, 0.5, 1.0, 1.5]), min_size=1, max_size=14)
FREE = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=300)
CUTS = {
    "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    "top_k": st.integers(0, 20),
    "top_p": st.one_of(
        st.sampled_from([1.0, 0.5, 0.25, 0.2, 0.1, 0.75, 0.999999, 1e-300]), st.floats(0.01, 1.0)
    ),
    "min_p": st.one_of(st.just(0.0), st.sampled_from([1.0, 0.5]), st.floats(0.001, 1.0)),
}


@settings(max_examples=200)
@given(st.one_of(TIED, FREE), st.fixed_dictionaries(CUTS))
def test_retained_equals_a_sort(values, cuts):
    logits = torch.tensor([values])
    keep = retained(logits, params(1, **cuts))[0]
    assert set(keep.nonzero()[:, 0].tolist()) == sorted_reference(values, **cuts)


@settings(max_examples=200)
@given(st.one_of(TIED, FREE), st.fixed_dictionaries(CUTS))
def test_cpu_draws_only_and_all_of_what_is_retained(values, cuts):
    """Many seeds of one row: the same winners, so the same ids were in the race."""
    rows = 48
    logits = torch.tensor([values]).expand(rows, -1).contiguous()
    at = params(rows, **cuts)
    expected, _ = REFERENCE.draw(logits, at)
    ids, _ = CPU.draw(logits, at)
    assert torch.equal(ids, expected)
    assert set(ids.tolist()) <= sorted_reference(values, **cuts)


def cut_ids(row: np.ndarray, cut: int) -> set[int]:
    """Ids up to a cut code: higher logits, and equal ones up to the id."""
    if cut == NO_CUT:
        return set(range(len(row)))
    last = int(cut) & 0xFFFFFFFF
    ids = np.arange(len(row))
    return set(ids[(row > row[last]) | ((row == row[last]) & (ids <= last))].tolist())


def sampled_row(kind: str, size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "peaky":  # like a language model's: a wide bulk, a few far above it
        row = rng.normal(0.0, 3.0, size)
        row[rng.integers(0, size, 40)] += rng.exponential(6.0, 40)
    elif kind == "flat":
        row = rng.normal(0.0, 1e-2, size)
    elif kind == "tied":
        row = np.round(rng.normal(0.0, 2.0, size))
    else:
        row = np.zeros(size)
    return row.astype(np.float32)


def sort_cut(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    order = np.argsort(-row, kind="stable")[: top_k or len(row)]
    weight = np.exp((row[order].astype(np.float64) - float(row.max())) / temperature)
    mass = np.cumsum(weight)
    last = int(np.searchsorted(mass, top_p * (1.0 - TOP_P_SLACK) * mass[-1]))
    return set(order[: last + 1].tolist())


@pytest.mark.parametrize("kind", ["peaky", "flat", "tied", "equal"])
@pytest.mark.parametrize("size", [BLOCK - 3, 3 * BLOCK, 49_152])
def test_cuts_of_whole_vocabularies_equal_a_sort(kind, size):
    row = sampled_row(kind, size, seed=size)
    block_max = np.empty(-(-size // BLOCK), np.int32)
    best = scan(row.view(np.int32), block_max)
    scratch = np.empty(size + 1, np.int64), np.empty(size + 1, np.float64)
    for temperature in (0.3, 0.7, 1.5):
        for top_p in (0.01, 0.5, 0.95, 0.999):
            cut = cut_top_p(row, block_max, best, top_p, temperature, *scratch)
            assert cut_ids(row, cut) == sort_cut(row, temperature, 0, top_p)
        for top_k in (1, 2, 50, size // 2, size - 1):
            for top_p in (0.6, 1.0):
                cut = cut_top_k(row, block_max, best, top_k, top_p, temperature, *scratch)
                expected = sort_cut(row, temperature, top_k, top_p) if top_p < 1.0 else None
                first = set(np.argsort(-row, kind="stable")[:top_k].tolist())
                assert cut_ids(row, cut) == (first if expected is None else expected)


def test_top_p_next_to_one_drops_no_more_than_it_may():
    """There the lightest ids weigh less than the rounding of a sum, so only mass is exact."""
    row = sampled_row("tied", 49_152, seed=1)
    block_max = np.empty(-(-len(row) // BLOCK), np.int32)
    best = scan(row.view(np.int32), block_max)
    scratch = np.empty(len(row) + 1, np.int64), np.empty(len(row) + 1, np.float64)
    cut = cut_top_p(row, block_max, best, 1.0 - 1e-12, 0.3, *scratch)
    dropped = sorted(set(range(len(row))) - cut_ids(row, cut))
    weight = np.exp((row.astype(np.float64) - float(row.max())) / 0.3)
    assert weight[dropped].sum() <= 1.1 * TOP_P_SLACK * weight.sum()


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "numba"])
def test_neutral_and_narrowest_values(ops):
    rows, size = 200, 400
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, size, generator=generator)
    free, _ = ops.draw(logits, params(rows))
    for neutral in ({"top_k": size}, {"top_k": size + 5}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(ops.draw(logits, params(rows, **neutral))[0], free)
    best = logits.argmax(-1)
    for narrow in ({"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1.0}):
        assert torch.equal(ops.draw(logits, params(rows, **narrow))[0], best)
    assert not torch.equal(free, best)


def test_a_tie_at_the_cut_keeps_the_lowest_ids():
    logits = torch.zeros(300, 10)
    for cuts in ({"top_k": 3}, {"top_p": 0.3}):  # 0.3 of ten equal ids is three of them
        ids, _ = CPU.draw(logits, params(300, **cuts))
        assert set(ids.tolist()) == {0, 1, 2}
    ids, _ = CPU.draw(logits, params(300, top_k=4, top_p=0.5))
    assert set(ids.tolist()) == {0, 1}
