"""Triton kernels against the reference: in Triton's interpreter, or on a GPU if there is one.

The interpreter computes bf16 wrongly, so types are fp32 and fp16. Pages that nobody wrote hold
NaN, and so do outputs before they are written.
"""
# ruff: noqa: E402  (without Triton, nothing here can be imported)

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

import tests.fakes.interpreter  # noqa: F401
from octavo.ops import fp8
from octavo.ops.api import GroupMeta, Ops
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.fp8 import ordered, restored
from octavo.ops.triton.plan import Cut, Work, plan
from octavo.ops.triton.tiles import H200, AttentionTiles, Card, CardTiles, Tile, pick, tiles_for
from tests.fakes.paged import Row, empty_kv, group_meta, permuted_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CARD = Card.of(DEVICE)
LAYER = 1
NAN = float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def small_tiles(programs: int = 1, rows: int = 32) -> CardTiles:
    """As in production, with tiles that a few dozen tokens fill."""
    many = Tile(rows=rows, tokens=32, warps=4, ahead=1, programs=programs)
    few = Tile(rows=16, tokens=16, warps=1, ahead=1, programs=programs)
    plain = AttentionTiles({256: few}, {256: many}, {256: many})
    wider = AttentionTiles({256: replace(few, rows=8, tokens=32)}, {256: many}, {256: many})
    return replace(H200, plain=plain, fp8=wider)


def case(
    spans: list[tuple[int, int]], shape: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Row]]:
    """Queries, a filled cache and rows of ``count`` new tokens from ``start`` on."""
    heads, kv_heads, dim = shape
    lengths = [start + count for start, count in spans]
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    pages = permuted_pages(lengths, page_size=page_size, num_pages=num_pages)
    rows = [Row([0] * count, start, pages[i]) for i, (start, count) in enumerate(spans)]
    kv = empty_kv(num_pages, 2, kv_heads, page_size, dim, dtype)
    for row in rows:
        for position in range(row.context):
            place = (row.pages[position // page_size], LAYER, slice(None), slice(None))
            kv[(*place, position % page_size)] = torch.randn(2, kv_heads, dim).to(dtype)
    q = torch.randn(sum(count for _, count in spans), heads, dim)
    return q.to(DEVICE, dtype), kv.to(DEVICE), rows


def fp8_pages(kv: Tensor) -> Tensor:
    """The same in fp8, with values of very different sizes; still NaN where nobody wrote."""
    sizes = torch.logspace(-4, 1, kv.shape[4], device=kv.device)[:, None]
    kv = torch.cat((kv[:, :, :1], kv[:, :, 1:] * sizes.to(kv.dtype)), 2)
    codes, scales = fp8.quantize(kv)
    return torch.cat((codes.flatten(-2), scales.contiguous().view(torch.uint8)), -1)


def on_device(meta: GroupMeta) -> GroupMeta:
    names = ("query_start", "context_len", "page_table", "page", "offset")
    return replace(meta, **{name: getattr(meta, name).to(DEVICE) for name in names}, cache={})


def wild(meta: GroupMeta, rows: list[Row]) -> GroupMeta:
    """With nonsense where the table may hold anything."""
    table = meta.page_table.clone()
    for index, row in enumerate(rows):
        first = max(0, row.start - meta.window + 1) if meta.window else 0
        table[index, : first // meta.page_size] = 1 << 30
        table[index, -(-row.context // meta.page_size) :] = -(1 << 30)
    return on_device(replace(meta, page_table=table))


def assert_attends(
    spans: list[tuple[int, int]],
    shape: tuple[int, int, int] = (4, 2, 16),
    *,
    page_size: int = 16,
    window: int = 0,
    soft_cap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    ops: TritonOps | None = None,
    in_fp8: bool = False,
) -> None:
    torch.manual_seed(0)
    ops = ops or TritonOps(CARD, tiles=small_tiles())
    q, kv, rows = case(spans, shape, page_size, dtype)
    wide = kv.float()
    if in_fp8:
        wide = fp8_pages(kv)
        kv = ordered(wide, page_size)
    meta = group_meta(rows, page_size=page_size, window=window)
    scale = 0.3
    expected, out, again = (torch.full(q.shape, NAN, device=DEVICE) for _ in range(3))
    Ops().attend(q.float(), wide, LAYER, on_device(meta), expected, scale, soft_cap)
    out, again = out.to(dtype), again.to(dtype)
    step = wild(meta, rows)
    ops.attend(q, kv, LAYER, step, out, scale, soft_cap)
    ops.attend(q, kv, LAYER, step, again, scale, soft_cap)  # what is planned once serves twice
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=TOLERANCE[dtype] * 5)
    assert torch.equal(out, again)


DECODES = [(70, 1), (3, 1), (0, 1), (129, 1), (31, 1)]
MIXED = [(70, 1), (0, 40), (33, 3), (10, 2), (50, 37), (15, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (20, 0.0), (0, 2.0), (17, 30.0)])
@pytest.mark.parametrize("spans", [DECODES, MIXED], ids=["decode", "mixed"])
def test_attend_equals_the_reference(
    spans: list[tuple[int, int]], window: int, soft_cap: float, dtype: torch.dtype
) -> None:
    assert_attends(spans, window=window, soft_cap=soft_cap, dtype=dtype)


@pytest.mark.parametrize("capability", sorted({80, max(80, CARD.capability)}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("spans", "shape", "page_size", "window"),
    [(DECODES, (4, 2, 16), 16, 0), (MIXED, (6, 2, 24), 32, 20)],
    ids=["decode", "mixed"],
)
def test_fp8_equals_the_reference(
    spans: list[tuple[int, int]], shape: tuple[int, int, int], page_size: int, window: int,
    dtype: torch.dtype, capability: int,
) -> None:  # fmt: skip
    """Codes decoded by their bits and, where this card has it, by an instruction."""
    ops = TritonOps(replace(CARD, capability=capability), tiles=small_tiles(), early=False)
    sizes = {"page_size": page_size, "window": window}
    assert_attends(spans, shape, **sizes, dtype=dtype, ops=ops, in_fp8=True)


@pytest.mark.parametrize("page_size", [32, 64])
def test_tiles_do_not_depend_on_the_page_size(page_size: int) -> None:
    assert_attends(MIXED, page_size=page_size, window=40)


@pytest.mark.parametrize("shape", [(3, 3, 16), (6, 2, 24), (5, 1, 16), (20, 1, 16)])
def test_odd_groups_and_head_sizes(shape: tuple[int, int, int]) -> None:
    assert_attends(MIXED[:4], shape)


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 23])
def test_any_number_of_shares_gives_the_same(multiprocessors: int) -> None:
    card = replace(CARD, multiprocessors=multiprocessors)
    assert_attends(DECODES, ops=TritonOps(card, tiles=small_tiles(2)))


def test_few_units_of_many_queries_are_split_over_programs() -> None:
    ops = TritonOps(replace(CARD, multiprocessors=12), tiles=small_tiles())
    assert_attends([(60, 20), (0, 9)], ops=ops)
    assert_attends([(60, 20), (0, 9)], ops=ops, window=30)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_large_units_meet_whole_tiles_without_a_mask(in_fp8: bool) -> None:
    ops = TritonOps(CARD, tiles=small_tiles(rows=64))
    assert_attends([(70, 30), (0, 40)], ops=ops, in_fp8=in_fp8)


def test_large_units_in_fp8_behind_a_window() -> None:
    ops = TritonOps(CARD, tiles=small_tiles(rows=64))
    assert_attends([(70, 30), (0, 40)], (6, 2, 32), window=20, soft_cap=5.0, ops=ops, in_fp8=True)


def test_attend_leaves_padding_alone_and_skips_empty_rows() -> None:
    torch.manual_seed(0)
    q, kv, rows = case([(3, 1), (40, 1)], (4, 2, 16), 16, torch.float32)
    meta = group_meta(rows, page_size=16)
    meta.query_start = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    meta.context_len = torch.tensor([4, 0, 41, 0], dtype=torch.int32)
    meta.page_table = torch.stack([meta.page_table[i] for i in (0, 0, 1, 0)])
    q = torch.cat((q, q))
    out, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    Ops().attend(q, kv, LAYER, on_device(meta), expected, 1.0)
    TritonOps(CARD, tiles=small_tiles()).attend(q, kv, LAYER, on_device(meta), out, 1.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    assert (out[2:] == 7.0).all()


def test_a_step_without_any_query_writes_nothing() -> None:
    q, kv, rows = case([(3, 1)], (4, 2, 16), 16, torch.float32)
    meta = group_meta(rows, page_size=16)
    meta.query_start = torch.zeros(2, dtype=torch.int32)
    meta.context_len = torch.zeros(1, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    TritonOps(CARD, tiles=small_tiles()).attend(q, kv, LAYER, on_device(meta), out, 1.0)
    assert (out == 7.0).all()


def lengths(line: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(line)]


def planned(spans: list[tuple[int, int]], cut: Cut, window: int, kv_heads: int) -> Work:
    """The device's plan against the same sums on the host."""
    rows = [Row([0] * count, start, [1]) for start, count in spans]
    tokens = sum(count for _, count in spans)
    counts = torch.tensor([0] + [count for _, count in spans]).cumsum(0).to(torch.int32)
    contexts = torch.tensor([row.context for row in rows], dtype=torch.int32)
    empty = torch.zeros(1, dtype=torch.int64)
    meta = GroupMeta(counts, contexts, empty, empty, empty, 16, 99, 999, window)
    work = plan(on_device(meta), cut, tokens, kv_heads)
    units, line = [], [0]
    for index, (start, count) in enumerate(spans):
        if cut.low < count <= cut.high:
            for skipped in range(0, count, cut.tokens):
                position, size = start + skipped, min(cut.tokens, count - skipped)
                first = max(0, position - window + 1) // cut.tile if window else 0
                units.append([index, int(counts[index]) + skipped, position, size])
                line.append(line[-1] - (-(position + size) // cut.tile) - first)
    share = max(-(-line[-1] * kv_heads // cut.shares), cut.least)
    exact, share = share, int(work.totals[1])
    assert share == exact or (exact < share <= exact * 17 / 16 and len(set(lengths(line))) == 1)
    assert work.totals.tolist() == [len(units), share, line[-1] * kv_heads]
    assert work.units[:, : len(units)].T.tolist() == units
    assert work.tiles_before[: len(units) + 1].tolist() == line
    assert (work.arrived[: len(units) * kv_heads] == 0).all()
    for index in range(cut.shares):
        if index * share < line[-1] * kv_heads:
            unit = max(u for u in range(len(units)) if line[u] * kv_heads <= index * share)
            found = work.starts[:, index].tolist()
            assert found == [unit, *units[unit], line[unit], line[unit + 1] - line[unit]]
    return work


@pytest.mark.parametrize("window", [0, 50])
def test_the_plan_covers_each_tile_once(window: int) -> None:
    spans = [(0, 1), (5, 0), (900, 1), (0, 700), (33, 3), (64, 64), (7, 1), (100, 65)]
    planned(spans, Cut(0, 1, 1, 16, 24, 1), window, 3)
    planned(spans, Cut(1, 1 << 30, 32, 64, 5, 2), window, 2)
    planned(spans * 80, Cut(0, 4, 4, 16, 600, 1), window, 2)
    planned([(2, 0)], Cut(0, 1, 1, 16, 4, 1), window, 2)


@pytest.mark.parametrize(("rows", "shares", "share"), [(8, 17, 64), (7, 17, 53), (4, 128, 4)])
def test_even_units_are_not_cut_by_a_hair(rows: int, shares: int, share: int) -> None:
    """Units of 64 tiles and 2 heads: 60.2, 52.7 (too far from 64) and 4 tiles a share."""
    work = planned([(1023, 1)] * rows, Cut(0, 1, 1, 16, shares, 1), 0, 2)
    assert work.totals.tolist() == [rows, share, rows * 128]


def test_a_unit_bound_holds_for_any_lengths() -> None:
    cut = Cut(low=4, high=1 << 30, tokens=32, tile=64, shares=1, least=1)
    counts = [5, 33, 64, 4, 1, 200]
    needed = sum(-(-count // 32) for count in counts if count > 4)
    assert needed <= cut.max_units(sum(counts), len(counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_equal_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops, reference = TritonOps(CARD), Ops()
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    wide = torch.randn(5, 200).to(DEVICE, dtype)
    x, residual = wide[:, :100], torch.randn(5, 100).to(DEVICE, dtype)
    weight = torch.rand(100).to(DEVICE, dtype)
    assert not x.is_contiguous()
    for given in (x, x.view(5, 1, 100)):
        found = ops.rms_norm(given, weight, 1e-5)
        torch.testing.assert_close(found, reference.rms_norm(given, weight, 1e-5), **close)
    for found, expected in zip(
        ops.add_rms_norm(x.contiguous(), residual.clone(), weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(ops.silu_mul(wide), reference.silu_mul(wide), **close)
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x), **close)
    torch.testing.assert_close(ops.gelu_mul(wide), reference.gelu_mul(wide), **close)
    ids = torch.tensor([4, 0, 4, 2], device=DEVICE)
    assert torch.equal(ops.embedding(ids, x), x[ids])
    assert ops.embedding(ids[:0], x).shape == (0, 100)
    assert ops.rms_norm(x[:0], weight, 1e-5).shape == ops.silu_mul(wide[:0]).shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("dim", "rope_dim", "norms"), [(16, 16, 2), (24, 8, 1), (16, 16, 0)])
def test_rope_and_write(dim: int, rope_dim: int, norms: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads, kv_heads = 5, 2
    rows = [Row([0] * 3, 14, [3, 4]), Row([0], 0, [2])]
    meta = on_device(group_meta(rows, page_size=16))
    qkv = torch.randn(4, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
    positions = torch.tensor([14, 15, 16, 0], device=DEVICE)
    angles = torch.rand(32, rope_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    weights = [torch.rand(dim).to(DEVICE, dtype) for _ in range(norms)]
    results = []
    for ops in (TritonOps(CARD), Ops()):
        kv = empty_kv(6, 2, kv_heads, 16, dim, dtype).to(DEVICE)
        q = ops.rope_and_write(
            qkv, positions, table, kv, LAYER, meta, heads, kv_heads, *weights, eps=1e-3
        )
        results.append((q, kv))
    for found, expected in zip(*results, strict=True):
        tolerance = 2 * TOLERANCE[dtype]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("dim", "rope_dim"), [(16, 16), (24, 8)])
def test_fp8_is_written_as_by_the_reference(dim: int, rope_dim: int) -> None:
    torch.manual_seed(0)
    heads, kv_heads, count = 4, 2, 12
    meta = on_device(group_meta([Row([0] * count, 14, [3, 4])], page_size=16))
    qkv = torch.randn(count, (heads + 2 * kv_heads) * dim)
    sizes = [0.0, 1e-38, 3e-8, 1e-5, 2e-3, 1.0, 3.0, 3e4, 3e7, 1e20, 1e37, NAN]
    qkv = (qkv * torch.tensor(sizes)[:, None]).to(DEVICE)
    angles = torch.rand(32, rope_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.arange(14, 14 + count, device=DEVICE)
    pages = []
    for ops in (TritonOps(CARD), Ops()):
        kv = empty_kv(6, 2, kv_heads, 16, dim, fp8.KV_DTYPE).to(DEVICE)
        ops.rope_and_write(qkv, positions, table, kv, LAYER, meta, heads, kv_heads)
        pages.append(kv)
    pages[0] = restored(pages[0], 16)
    found, expected = (fp8.dequantize(*fp8.page_views(kv, 16)) for kv in pages)
    # Products may be fused with sums: now and then one falls on the other side of a tie.
    torch.testing.assert_close(found, expected, rtol=0.15, atol=1e-10, equal_nan=True)
    written, should = (x[meta.page, LAYER, :, :, meta.offset] for x in (found, expected))
    assert written[:-1].isfinite().all()
    assert written[-1].isnan().all()
    same = ((written - should).abs() <= should.abs() * 2.0**-9)[:-1]  # but for a scale's last bit
    assert same.float().mean() > 0.99


def test_tiles_are_picked_by_card_head_size_and_group() -> None:
    newer = Card("B", 100, 148, 232448)
    assert tiles_for(newer) is H200
    assert tiles_for(replace(newer, capability=89)).capability == 80
    assert tiles_for(replace(newer, capability=75)).capability == 80
    assert pick(H200.plain.few, 96, 4) is not None
    assert pick(H200.plain.few, 96, 4).tokens == H200.plain.few[128].tokens
    assert pick(H200.plain.few, 64, 71).rows == 128


def test_tiles_shrink_to_the_shared_memory() -> None:
    tile = Tile(rows=128, tokens=64, warps=8, ahead=2, programs=1)
    assert tile.fitted(128, 2, 232448) == tile
    assert tile.fitted(128, 2, 100_000).ahead == 1
    small = tile.fitted(256, 4, 200_000)
    assert (small.ahead, small.tokens) == (1, 16)
