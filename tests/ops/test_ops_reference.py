"""The reference operations against plain formulas and torch's own attention on dense inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.ops.api import GroupMeta, Ops
from tests.fakes.paged import Row, empty_kv, group_meta, permuted_pages

HEADS, KV_HEADS, DIM = 6, 2, 8
LAYER = 1


def paged_rows(spans: list[tuple[int, int]], page_size: int, seed: int = 0) -> list[Row]:
    """Rows of ``count`` new tokens from ``start`` on, with scattered pages."""
    lengths = [start + count for start, count in spans]
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    pages = permuted_pages(lengths, page_size=page_size, num_pages=num_pages, seed=seed)
    return [Row([0] * count, start, pages[i]) for i, (start, count) in enumerate(spans)]


def filled_kv(rows: list[Row], page_size: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """A cache holding random keys and values of the rows' contexts, and those [C, K, D]."""
    num_pages = 1 + max(page for row in rows for page in row.pages)
    kv = empty_kv(num_pages, LAYER + 1, KV_HEADS, page_size, DIM)
    dense = []
    for row in rows:
        k, v = torch.randn(2, row.context, KV_HEADS, DIM)
        for position in range(row.context):
            page, offset = row.pages[position // page_size], position % page_size
            kv[page, LAYER, 0, :, offset] = k[position]
            kv[page, LAYER, 1, :, offset] = v[position]
        dense.append((k, v))
    return kv, dense


def dense_attention(q: Tensor, k: Tensor, v: Tensor, row: Row, window: int, scale: float) -> Tensor:
    query = torch.arange(row.start, row.context)[:, None]
    key = torch.arange(row.context)
    mask = (key <= query) & ((key > query - window) if window else torch.tensor(True))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


@settings(max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
    page_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 1, 7, 16, 33]),
)
def test_attend_equals_torch_on_dense_inputs(
    spans: list[tuple[int, int]], page_size: int, window: int
) -> None:
    torch.manual_seed(0)
    rows = paged_rows(spans, page_size)
    kv, dense = filled_kv(rows, page_size)
    counts = [len(row.tokens) for row in rows]
    q = torch.randn(sum(counts), HEADS, DIM)
    out = torch.full_like(q, float("nan"))
    meta = group_meta(rows, page_size=page_size, window=window)
    Ops().attend(q, kv, LAYER, meta, out, scale=0.3)
    expected = [
        dense_attention(part, k, v, row, window, 0.3)
        for part, (k, v), row in zip(q.split(counts), dense, rows, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=1e-5)


def test_soft_cap_bounds_scores_before_the_softmax() -> None:
    torch.manual_seed(0)
    rows = paged_rows([(20, 1)], 16)
    kv, [(k, v)] = filled_kv(rows, 16)
    q, out = torch.randn(1, HEADS, DIM) * 10, torch.empty(1, HEADS, DIM)
    Ops().attend(q, kv, LAYER, group_meta(rows, page_size=16), out, scale=1.0, soft_cap=2.0)
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = 2.0 * torch.tanh(k[:, kv_head] @ q[0, head] / 2.0)
        torch.testing.assert_close(out[0, head], scores.softmax(0) @ v[:, kv_head])


def test_attend_leaves_padding_alone_and_skips_empty_rows() -> None:
    rows = paged_rows([(3, 2)], 16)
    kv, _ = filled_kv(rows, 16)
    meta = group_meta(rows, page_size=16)
    meta.query_start = torch.tensor([0, 2, 2], dtype=torch.int32)
    meta.context_len = torch.tensor([5, 0], dtype=torch.int32)
    meta.page_table = torch.cat((meta.page_table, torch.zeros_like(meta.page_table)))
    out = torch.full((4, HEADS, DIM), 7.0)
    Ops().attend(torch.randn(4, HEADS, DIM), kv, LAYER, meta, out, scale=1.0)
    assert out[:2].isfinite().all()
    assert (out[2:] == 7.0).all()


def rotated(x: Tensor, position: int, dim: int) -> Tensor:
    """One vector, pair by pair, as complex numbers turned by position / 10000^(2i/dim)."""
    turned = x.clone().double()
    for i in range(dim // 2):
        angle = position / 10_000 ** (2 * i / dim)
        pair = complex(x[i].item(), x[i + dim // 2].item()) * complex(
            math.cos(angle), math.sin(angle)
        )
        turned[i], turned[i + dim // 2] = pair.real, pair.imag
    return turned.float()


def rope_inputs(rope_dim: int) -> tuple[Tensor, Tensor, Tensor, GroupMeta, Tensor]:
    torch.manual_seed(0)
    rows = paged_rows([(14, 4), (0, 3)], 16)
    qkv = torch.randn(7, (HEADS + 2 * KV_HEADS) * DIM)
    positions = torch.cat([torch.arange(row.start, row.context) for row in rows])
    angles = torch.outer(
        torch.arange(32.0), 10_000 ** (-torch.arange(0, rope_dim, 2).float() / rope_dim)
    )
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    kv = empty_kv(1 + max(page for row in rows for page in row.pages), 2, KV_HEADS, 16, DIM)
    return qkv, positions, table, group_meta(rows, page_size=16), kv


@pytest.mark.parametrize("rope_dim", [DIM, DIM // 2])
def test_rope_and_write(rope_dim: int) -> None:
    qkv, positions, table, meta, kv = rope_inputs(rope_dim)
    q = Ops().rope_and_write(qkv, positions, table, kv, LAYER, meta, HEADS, KV_HEADS)
    assert q.shape == (7, HEADS, DIM)
    heads = qkv.view(7, -1, DIM)
    for token, position in enumerate(positions.tolist()):
        written = kv[meta.page[token], LAYER, :, :, meta.offset[token]]
        for head in range(HEADS):
            expected = rotated(heads[token, head], position, rope_dim)
            torch.testing.assert_close(q[token, head], expected)
        for head in range(KV_HEADS):
            expected = rotated(heads[token, HEADS + head], position, rope_dim)
            torch.testing.assert_close(written[0, head], expected)
            value = heads[token, HEADS + KV_HEADS + head]
            torch.testing.assert_close(written[1, head], value, rtol=0, atol=0)
    assert kv.isfinite().sum().item() == 7 * 2 * KV_HEADS * DIM  # and nothing else was written


def test_q_and_k_are_normed_before_they_are_rotated() -> None:
    qkv, positions, table, meta, kv = rope_inputs(DIM)
    weights = torch.rand(2, DIM)
    q = Ops().rope_and_write(
        qkv, positions, table, kv, LAYER, meta, HEADS, KV_HEADS, weights[0], weights[1], 1e-3
    )
    for x, weight, found in (
        (qkv.view(7, -1, DIM)[5, 0], weights[0], q[5, 0]),
        (qkv.view(7, -1, DIM)[5, HEADS], weights[1], kv[meta.page[5], LAYER, 0, 0, 1]),
    ):
        normed = weight * x / (x.square().mean() + 1e-3).sqrt()
        torch.testing.assert_close(found, rotated(normed, 1, DIM))


def test_add_rms_norm_and_silu_mul() -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 12), torch.randn(5, 12), torch.rand(12)
    total = x + residual
    normed, new = Ops().add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(new, total)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (12,), weight, eps=1e-5))
    gate, up = x.split(6, dim=-1)
    torch.testing.assert_close(Ops().silu_mul(x), gate * gate.sigmoid() * up)
    cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(Ops().gelu_mul(x), gate * (1 + cubic.tanh()) / 2 * up)


def test_a_norm_weight_in_fp32_multiplies_before_the_rounding() -> None:
    x, weight = torch.randn(5, 12).bfloat16(), torch.rand(12)
    exact = torch.nn.functional.rms_norm(x.float(), (12,), weight, eps=1e-5)
    assert torch.equal(Ops().rms_norm(x, weight, 1e-5), exact.bfloat16())
