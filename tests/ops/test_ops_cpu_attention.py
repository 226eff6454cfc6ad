"""Paged attention and rope of the CPU backend against the reference."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octavo.ops import fp8
from octavo.ops.api import GroupMeta, Ops
from octavo.ops.cpu.attention import plan_tiles
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.fp8 import QUAD
from octavo.ops.cpu.isa import Isa, detect_isa
from tests.fakes.paged import Row, empty_kv, group_meta, permuted_pages

ISA = detect_isa()
PLAIN = dataclasses.replace(ISA, bf16_dot=False)
NARROW = dataclasses.replace(ISA, lanes=8, registers=16, bf16_dot=False)
MIXED = ((0, 50), (200, 1), (130, 7), (0, 1), (300, 17), (15, 2), (127, 1))  # (known, new) tokens


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    window: int = 0
    cap: float = 0.0
    rotated: int = 0  # 0: all of dim
    norms: bool = False
    norm_dtype: torch.dtype | None = None  # None: that of the activations
    rows: tuple[tuple[int, int], ...] = MIXED


SHAPES = {
    "smollm2": Shape(9, 3, 64, 16),
    "window": Shape(4, 4, 128, 32, window=20),
    "soft cap, norms": Shape(14, 2, 64, 64, cap=30.0, norms=True),
    "one kv head, all at once": Shape(8, 1, 256, 16, window=33, cap=5.0, norms=True),
    "fp32 norms": Shape(4, 1, 64, 16, window=33, norms=True, norm_dtype=torch.float32),
    "odd sizes": Shape(10, 2, 80, 4, rotated=40),
}


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> CpuOps:
    return CpuOps(isa=ISA, threads=2, cache_dir=tmp_path_factory.mktemp("kernels"))


def attend_steps(
    ops: Ops, shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Known tokens in one step, new ones in a second: its q and output, and the pages."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    pages = permuted_pages(
        [sum(row) for row in shape.rows], page_size=shape.page_size, num_pages=400, seed=seed
    )
    kv = empty_kv(400, 2, kv_heads, shape.page_size, dim, kv_dtype or dtype)
    rotated = shape.rotated or dim
    angles = torch.rand(512, rotated // 2, generator=generator) * 6
    angles = angles.double()  # in fp32 a process's first cosines may be off by 4e-4
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    norms = [torch.rand(dim, generator=generator) + 0.5 for _ in range(2)]
    norms = [weight.to(shape.norm_dtype or dtype) for weight in norms]
    old = [Row(range(known), 0, p) for (known, _), p in zip(shape.rows, pages, strict=True)]
    new = [Row(range(count), known, p) for (known, count), p in zip(shape.rows, pages, strict=True)]
    for rows in ([row for row in old if row.tokens], new):
        meta = group_meta(rows, page_size=shape.page_size, window=shape.window)
        positions = torch.cat([torch.arange(row.start, row.context) for row in rows])
        width = (heads + 2 * kv_heads) * dim
        qkv = torch.randn(len(positions), width, generator=generator).to(dtype)
        q_norm, k_norm = norms if shape.norms else (None, None)
        q = ops.rope_and_write(
            qkv, positions, cos_sin, kv, 1, meta, heads, kv_heads, q_norm, k_norm, 1e-6
        )
    out = torch.full((len(q) + 3, heads, dim), float("nan"), dtype=dtype)  # 3 of padding
    padded_q = torch.cat((q, q.new_zeros(3, heads, dim)))
    ops.attend(padded_q, kv, 1, meta, out, dim**-0.5, shape.cap)
    return q, out, kv


def check_equal(
    ops: Ops,
    shape: Shape,
    dtype: torch.dtype,
    tolerance: float,
    kv_dtype: torch.dtype | None = None,
) -> None:
    q, out, kv = attend_steps(ops, shape, dtype, kv_dtype)
    expected_q, expected, expected_kv = attend_steps(Ops(), shape, dtype, kv_dtype)
    torch.testing.assert_close(q, expected_q, rtol=tolerance, atol=tolerance)
    count = len(q)
    assert out[:count].isfinite().all(), "a row was not written, or read unwritten memory"
    assert out[count:].isnan().all(), "padding was written"
    torch.testing.assert_close(out[:count], expected[:count], rtol=tolerance, atol=tolerance)
    if kv_dtype is fp8.KV_DTYPE:
        assert torch.equal(in_plain_order(kv, shape), expected_kv)
    else:
        assert kv.isnan().sum() == expected_kv.isnan().sum(), "other elements than K and V changed"


def in_plain_order(kv: Tensor, shape: Shape) -> Tensor:
    """fp8 pages of the CPU kernels as the reference writes them."""
    plain, size, dim = kv.clone(), shape.page_size, shape.dim
    codes, _ = fp8.page_views(kv, size)
    target, _ = fp8.page_views(plain, size)
    quads = codes.flatten(-2)
    k, v = quads[:, :, 0].unflatten(-1, (dim // 4, size, 4)), quads[:, :, 1]
    target[:, :, 0] = k[..., QUAD].movedim(-2, -3).flatten(-2)
    target[:, :, 1] = v.unflatten(-1, (size // 4, dim, 4))[..., QUAD].mT.flatten(-3, -2)
    return plain


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("window", "fp32 norms")])
def test_equals_the_reference_in_fp32(ops: CpuOps, name: str) -> None:
    check_equal(ops, SHAPES[name], torch.float32, 2e-5)


@pytest.mark.parametrize("name", ["smollm2", "window", "fp32 norms"])
def test_equals_the_reference_in_bf16(ops: CpuOps, name: str) -> None:
    check_equal(ops, SHAPES[name], torch.bfloat16, 3e-2)


@pytest.mark.parametrize("name", ["one kv head, all at once", "odd sizes"])
def test_fp8_equals_the_reference_in_fp32(ops: CpuOps, name: str) -> None:
    check_equal(ops, SHAPES[name], torch.float32, 2e-5, fp8.KV_DTYPE)


def test_fp8_equals_the_reference_in_bf16(ops: CpuOps) -> None:
    _, out, _ = attend_steps(ops, SHAPES["smollm2"], torch.bfloat16, fp8.KV_DTYPE)
    _, expected, _ = attend_steps(Ops(), SHAPES["smollm2"], torch.bfloat16, fp8.KV_DTYPE)
    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2, equal_nan=True)


def test_fp8_extremes_are_written_as_by_the_reference(ops: CpuOps) -> None:
    shape = dataclasses.replace(SHAPES["smollm2"], rows=())
    sizes = [0.0, 1e-45, 1e-38, 3e-8, 1e-5, 2e-3, 1.0, 3e4, 3e7, 1e20, 1e37, math.inf]
    x = torch.randn(len(sizes) + 1, 15 * 64, generator=torch.Generator().manual_seed(0))
    x[:-1] *= torch.tensor(sizes)[:, None]
    x[:-1].nan_to_num_(0.0, math.inf, -math.inf)
    x[-1, 700] = math.nan  # of one head's keys
    still = torch.cat((torch.ones(16, 32), torch.zeros(16, 32)), 1)
    meta = group_meta([Row(range(len(x)), 0, [1])], page_size=16)
    pages = []
    for backend in (ops, Ops()):
        kv = empty_kv(2, 1, 3, 16, 64, fp8.KV_DTYPE)
        backend.rope_and_write(x, torch.arange(len(x)), still, kv, 0, meta, 9, 3)
        pages.append(kv)
    plain = in_plain_order(pages[0], shape)
    values = [fp8.dequantize(*fp8.page_views(kv, 16)) for kv in (plain, pages[1])]
    assert torch.equal(values[0].nan_to_num(9e9), values[1].nan_to_num(9e9))
    finite = values[0][1, 0].isfinite().all(-1)  # [K and V, head, token]
    assert finite[..., : len(sizes) - 1].all()
    assert finite[1, :, len(sizes) - 1].all()  # a turn makes NaNs of infinite keys
    assert finite[..., len(sizes)].sum() == 5


@pytest.mark.parametrize("isa", [PLAIN, NARROW], ids=["without dot products", "8 lanes"])
def test_other_instruction_sets_agree(isa: Isa) -> None:
    ops = CpuOps(isa=isa, threads=1, cache_dir=None)
    check_equal(ops, SHAPES["odd sizes"], torch.bfloat16, 2e-2)


def test_kv_may_be_narrower_than_queries(ops: CpuOps) -> None:
    shape = SHAPES["smollm2"]
    _, out, _ = attend_steps(ops, shape, torch.float32, torch.bfloat16)
    _, expected, _ = attend_steps(Ops(), shape, torch.float32, torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_and_runs_do_not_change_a_bit(ops: CpuOps, dtype: torch.dtype) -> None:
    shape = SHAPES["smollm2"]
    _, first, _ = attend_steps(ops, shape, dtype)
    for other in (ops, CpuOps(isa=ISA, threads=1, cache_dir=ops.cache_dir)):
        _, again, _ = attend_steps(other, shape, dtype)
        assert torch.equal(first.nan_to_num(9.0), again.nan_to_num(9.0))


def test_a_prompt_in_chunks_is_the_prompt_at_once(ops: CpuOps) -> None:
    shape = SHAPES["smollm2"]
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(300, (9 + 6) * 64, generator=generator)
    cos_sin = torch.rand(512, 64, generator=generator)
    pages = permuted_pages([300], page_size=16, num_pages=40)[0]
    results = []
    for cuts in ((0, 300), (0, 7, 23, 24, 150, 299, 300)):
        kv = empty_kv(40, 1, 3, 16, 64)
        parts = []
        for begin, end in itertools.pairwise(cuts):
            meta = group_meta([Row(range(begin, end), begin, pages)], page_size=16)
            positions = torch.arange(begin, end)
            q = ops.rope_and_write(qkv[begin:end], positions, cos_sin, kv, 0, meta, 9, 3)
            out = torch.empty_like(q)
            ops.attend(q, kv, 0, meta, out, shape.dim**-0.5)
            parts.append(out)
        results.append(torch.cat(parts))
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_scores_stay_finite(ops: CpuOps, dtype: torch.dtype) -> None:
    """Scores of ±10^4 and more: one key takes all."""
    kv = empty_kv(20, 1, 3, 16, 64, dtype)
    meta = group_meta([Row(range(150), 0, list(range(1, 11)))], page_size=16)
    qkv = torch.randn(150, (9 + 6) * 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    qkv[:, : 12 * 64] *= 100
    cos_sin = torch.cat((torch.ones(150, 32), torch.zeros(150, 32)), dim=1)
    q = ops.rope_and_write(qkv, torch.arange(150), cos_sin, kv, 0, meta, 9, 3)
    out = torch.empty_like(q)
    ops.attend(q, kv, 0, meta, out, 1.0)
    k, v = qkv.view(150, 15, 64)[:, 9:12].float(), qkv.view(150, 15, 64)[:, 12:].float()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(3, 1))
    hidden = torch.ones(150, 150, dtype=torch.bool).triu(1)
    best = scores.masked_fill(hidden, -torch.inf).argmax(-1)  # [H, Q]
    expected = torch.stack([v[best[h], h // 3] for h in range(9)], dim=1)
    assert out.isfinite().all()
    assert (out.float() - expected).abs().amax(-1).lt(1e-2).float().mean() > 0.99


def test_a_poisoned_query_poisons_its_own_row_only(ops: CpuOps) -> None:
    pages = permuted_pages([40, 40], page_size=16, num_pages=10)
    kv = empty_kv(10, 1, 1, 16, 64)
    rows = [Row(range(40), 0, p) for p in pages]
    meta = group_meta(rows, page_size=16)
    qkv, positions = torch.randn(80, 3 * 64), torch.arange(40).repeat(2)
    q = ops.rope_and_write(qkv, positions, torch.rand(64, 64), kv, 0, meta, 1, 1)
    q[5] = float("nan")
    out = torch.empty_like(q)
    ops.attend(q, kv, 0, meta, out, 0.125)
    assert out[5].isnan().all()
    assert out[40:].isfinite().all()


def test_strided_queries_and_output(ops: CpuOps) -> None:
    shape = dataclasses.replace(SHAPES["smollm2"], rows=((40, 1), (0, 5)))
    q, expected, kv = attend_steps(ops, shape, torch.float32)
    pages = permuted_pages([41, 5], page_size=16, num_pages=400)
    meta = group_meta([Row(range(1), 40, pages[0]), Row(range(5), 0, pages[1])], page_size=16)
    wide = torch.zeros(6, 9, 128)
    wide[:, :, ::2] = q
    out = torch.full((6, 9, 128), float("nan"))
    ops.attend(wide[:, :, ::2], kv, 1, meta, out[:, :, :64], 64**-0.5)
    assert torch.equal(out[:, :, :64], expected[:6])
    assert out[:, :, 64:].isnan().all()


def test_empty_rows(ops: CpuOps) -> None:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    kv = torch.randn(4, 1, 2, 3, 16, 64)
    meta = GroupMeta(
        ints(0, 0, 1, 1), ints(0, 20, 0), torch.tensor([[0, 0], [1, 2], [0, 0]]),
        torch.tensor([2]), torch.tensor([3]), page_size=16, max_query=1, max_context=20,
    )  # fmt: skip
    out = torch.full((1, 9, 64), float("nan"))
    ops.attend(torch.randn(1, 9, 64), kv, 0, meta, out, 0.125)
    assert out.isfinite().all()


def test_page_sizes_without_pair_order_run_on_the_reference(ops: CpuOps) -> None:
    check_equal(ops, Shape(2, 1, 64, 5, rows=((7, 1), (0, 9))), torch.bfloat16, 1e-6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 300)), min_size=1, max_size=12),
    st.integers(1, 17),
)
def test_tiles_cover_every_query_once(rows: list[tuple[int, int]], tile_tokens: int) -> None:
    counts = np.array([count for count, _ in rows])
    query_start = np.concatenate(([0], counts.cumsum()))
    context_len = counts + np.array([known for _, known in rows])
    ones, longer = plan_tiles(query_start, context_len, tile_tokens)
    seen = []
    for row, token, count, position in [*ones, *longer]:
        assert 1 <= count <= tile_tokens
        for t in range(count):
            assert position + t == rows[row][1] + token + t - query_start[row]
            seen.append(token + t)
    assert sorted(seen) == list(range(query_start[-1]))
    assert all(counts[row] == 1 for row in ones[:, 0])
    assert all(counts[row] > 1 for row in longer[:, 0])


GENERIC = """
import torch
from octavo.ops import fp8
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.isa import detect_isa
from tests.ops.test_ops_cpu_attention import SHAPES, check_equal
ops = CpuOps(isa=detect_isa("generic"), threads=1, cache_dir=None)
check_equal(ops, SHAPES["smollm2"], torch.float32, 2e-5)
check_equal(ops, SHAPES["odd sizes"], torch.float32, 2e-5, fp8.KV_DTYPE)
assert "ymm" not in "".join(k.library._library.get_asm_str() for k in ops.kernels)
"""


def test_generic_code_uses_no_wide_vectors_and_agrees() -> None:
    """In a process of its own: the instruction set is chosen once a process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", GENERIC], check=True, env=environment, timeout=120)
