"""fp8 pages: what quantising loses, and attention over what is left."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.core.capacity import cache_layout
from octavo.ops import fp8
from octavo.ops.api import Ops
from octavo.runner.kv import allocate_kv
from tests.fakes.paged import Row, empty_kv, group_meta, permuted_pages
from tests.fakes.tiny_models import tiny_spec

HEADS, KV_HEADS, DIM, LAYER = 6, 2, 8, 1


def half_ulp(codes: Tensor) -> Tensor:
    """Half the distance from the e4m3 numbers |codes| to the next: 3 bits after the first, and
    2^-9 between the smallest."""
    exponent = codes.abs().double().clamp_min(2.0**-6).log2().floor()
    return 2.0 ** (exponent - 4)


def dequantized(x: Tensor, weights: Tensor | None = None) -> Tensor:
    return fp8.dequantize(*fp8.quantize(x, weights))


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from([-148, -60, -40, -24, -12, 0, 5, 15, 22]))
def test_an_element_is_off_by_at_most_half_a_unit_in_the_last_place(seed: int, power: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 64, generator=generator) * torch.rand(4, 64, generator=generator) ** 8
    x = (x.double() * 2.0**power).float()
    codes, scale = fp8.quantize(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    code = codes.view(fp8.KV_DTYPE).float()
    error = (fp8.dequantize(codes, scale).double() - x.double()).abs() / scale.double()[:, None]
    assert (error <= half_ulp(code) * (1 + 1e-6)).all()


def test_of_the_scales_tried_the_best_is_taken() -> None:
    """Least scales of few bits, so that none is rounded to fp16."""
    torch.manual_seed(0)
    least = 2.0 ** torch.randint(-12, 10, (300, 1)) * (1 + torch.randint(32, (300, 1)) / 32)
    most = least * fp8.LARGEST_CODE
    x = (torch.randn(300, 64) * most / 3).clamp(-most, most)
    x[:, :1] = most

    def error(values: Tensor) -> Tensor:
        return (values.double() - x).square().sum(-1)

    scales = [least * (1 + phase / fp8.PHASES) for phase in range(fp8.PHASES)]
    errors = torch.stack([error((x / s).to(fp8.KV_DTYPE).float() * s) for s in scales])
    found = error(dequantized(x))
    torch.testing.assert_close(found, errors.amin(0), rtol=1e-3, atol=0)
    assert found.mean() < 0.8 * errors[0].mean()


def test_keys_are_exact_where_their_queries_are_large() -> None:
    """Scores of queries that are large in few features, by keys of any, lose less with weights."""
    torch.manual_seed(0)
    sizes = torch.rand(1, 2, 64) ** 8
    q = (torch.randn(500, 4, 64) * sizes.repeat_interleave(2, 1)).float()
    k = torch.randn(500, 2, 64)
    weights = fp8.key_weights(q, 2)
    assert weights.shape == k.shape

    def lost(keys: Tensor) -> float:
        off = (keys - k).repeat_interleave(2, 1)
        return torch.einsum("thd,shd->hts", q, off).square().mean().item()

    assert lost(dequantized(k, weights)) < 0.75 * lost(dequantized(k))


def test_extremes_stay_finite_and_saturate() -> None:
    most = fp8.LARGEST_CODE * fp8.LARGEST_SCALE
    largest = torch.finfo(torch.float32).max
    for x, expected in (
        ([0.0, -0.0], [0.0, 0.0]),
        ([1e-45, -1e-40], [0.0, 0.0]),
        ([most, -most / 2], [most, -most / 2]),
        ([largest, -2 * most], [most, -most]),
        ([math.inf, -most], [most, -most]),
    ):
        assert dequantized(torch.tensor([x])).tolist() == [expected]
    assert dequantized(torch.tensor([[math.nan, 1.0]])).isnan().all()
    assert dequantized(torch.tensor([3e4, -7.0]).half()).isfinite().all()


def rows_of(spans: list[tuple[int, int]], page_size: int) -> tuple[list[Row], int]:
    lengths = [start + count for start, count in spans]
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    pages = permuted_pages(lengths, page_size=page_size, num_pages=num_pages)
    return [Row([0] * n, at, pages[i]) for i, (at, n) in enumerate(spans)], num_pages


def attention64(q: Tensor, k: Tensor, v: Tensor, first: int, window: int, scale: float) -> Tensor:
    """float64 [Q, H, D] of queries from position ``first`` on over [C, K, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,chd->hqc", q.double(), k) * scale
    key, query = torch.arange(len(k)), torch.arange(first, first + len(q))[:, None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


@pytest.mark.parametrize(("page_size", "window"), [(16, 0), (32, 7), (64, 33)])
def test_attention_is_that_of_the_dequantised_values(page_size: int, window: int) -> None:
    torch.manual_seed(0)
    ops = Ops()
    rows, num_pages = rows_of([(0, 37), (0, 1), (0, 80)], page_size)
    kv = empty_kv(num_pages, LAYER + 1, KV_HEADS, page_size, DIM, fp8.KV_DTYPE)
    meta = group_meta(rows, page_size=page_size, window=window)
    tokens = sum(len(row.tokens) for row in rows)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    still = torch.cat((torch.ones(99, DIM // 2), torch.zeros(99, DIM // 2)), 1)  # no rotation
    positions = torch.cat([torch.arange(row.context) for row in rows])
    q = ops.rope_and_write(qkv, positions, still, kv, LAYER, meta, HEADS, KV_HEADS)
    out = torch.full_like(q, math.nan)
    ops.attend(q, kv, LAYER, meta, out, 0.3)
    k, v = qkv.view(tokens, -1, DIM)[:, HEADS:].split(KV_HEADS, 1)
    k, v = dequantized(k, fp8.key_weights(q, KV_HEADS)), dequantized(v)
    begin = 0
    for row in rows:
        part = slice(begin, begin + len(row.tokens))
        expected = attention64(q[part], k[part], v[part], 0, window, 0.3)
        torch.testing.assert_close(out[part].double(), expected, rtol=0, atol=2e-6)
        begin = part.stop
    untouched = (kv == 0xFF).all(-1)
    assert untouched[:, 0].all(), "another layer was written"
    assert untouched[0].all(), "the null page was written"


def test_a_page_is_one_row_of_the_pool_and_means_the_same_elsewhere() -> None:
    """Copying rows of the pool, as swapping does, moves codes and scales together."""
    layers, page_size = [2, 1], 16
    kv = allocate_kv(9, layers, KV_HEADS, page_size, DIM, fp8.KV_DTYPE, torch.device("cpu"), Ops())
    spec = tiny_spec(num_kv_heads=KV_HEADS, head_dim=DIM)
    layout = cache_layout(spec, "fp8", page_size)
    pool = torch.as_strided(kv[0], (9, layout.page_bytes), (layout.page_bytes, 1))
    assert pool.untyped_storage().nbytes() == 9 * layout.page_bytes
    rows, _ = rows_of([(0, 30)], page_size)
    meta = group_meta(rows, page_size=page_size)
    qkv, table = torch.randn(30, (HEADS + 2 * KV_HEADS) * DIM), torch.rand(64, DIM)
    q = Ops().rope_and_write(qkv, torch.arange(30), table, kv[0], 1, meta, HEADS, KV_HEADS)
    before, after = torch.empty_like(q), torch.empty_like(q)
    Ops().attend(q, kv[0], 1, meta, before, 0.3)
    moved = [7, 8]
    pool[moved] = pool[list(rows[0].pages)].clone()
    pool[list(rows[0].pages)] = 0xFF
    meta = group_meta([Row(rows[0].tokens, 0, moved)], page_size=page_size)
    Ops().attend(q, kv[0], 1, meta, after, 0.3)
    assert torch.equal(before, after)
