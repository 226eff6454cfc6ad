"""A window's attention costs what the window holds, however long the context is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops.api import GroupMeta, Ops
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.isa import detect_isa
from tests.fakes.paged import empty_kv

PAGE, WINDOW, DIM = 16, 40, 16
CONTEXTS = (160, 160 + 64 * PAGE, 160 + 4096 * PAGE)
QUERIES = (1, 21)


def cpu() -> Ops:
    return CpuOps(isa=detect_isa(), threads=1, cache_dir=None)


def triton() -> Ops:
    pytest.importorskip("triton")
    import tests.fakes.interpreter  # noqa: F401
    from octavo.ops.triton.backend import TritonOps
    from octavo.ops.triton.tiles import Card

    return TritonOps(Card.of(torch.device("cpu")))


def first_page(context: int, count: int) -> int:
    """The first one that a query of the last ``count`` tokens sees."""
    return max(0, context - count - WINDOW + 1) // PAGE


def one_row(context: int, count: int, written: int) -> GroupMeta:
    """``count`` new tokens at the end of ``context``, of which the last ``written`` are written.
    Its pages are 1, 2, …; those behind the window are the null page."""
    first = first_page(context, count)
    visible = range(1, -(-context // PAGE) - first + 1)
    places = torch.arange(context - written, context)
    return GroupMeta(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([context], dtype=torch.int32),
        page_table=torch.tensor([[0] * first + list(visible)], dtype=torch.int32),
        page=places // PAGE - first + 1,
        offset=places % PAGE,
        page_size=PAGE,
        max_query=count,
        max_context=context,
        window=WINDOW,
    )


def filled_pages(ops: Ops, context: int, count: int) -> Tensor:
    """Pages from the window's first one on, as ``ops`` orders them; the null page holds NaN."""
    kv = empty_kv(16, 1, 1, PAGE, DIM)
    written = context - first_page(context, count) * PAGE
    qkv = torch.randn(written, 3 * DIM, generator=torch.Generator().manual_seed(0))
    still = torch.tensor([[1.0] * 8 + [0.0] * 8]).expand(written, DIM).contiguous()
    meta = one_row(context, count, written)
    ops.rope_and_write(qkv, torch.arange(written), still, kv, 0, meta, 1, 1)
    return kv


@pytest.mark.parametrize("count", QUERIES)
@pytest.mark.parametrize("make", [Ops, cpu, triton], ids=["reference", "cpu", "triton"])
def test_pages_behind_the_window_are_not_read(make: Callable[[], Ops], count: int) -> None:
    """Contexts that end alike give the same to the last bit, with NaN behind the window."""
    ops, q = make(), torch.randn(count, 1, DIM, generator=torch.Generator().manual_seed(1))
    found = []
    for context in CONTEXTS if ops.name != "triton" else CONTEXTS[:2]:
        kv = filled_pages(ops, context, count)
        out = torch.full_like(q, float("nan"))
        ops.attend(q, kv, 0, one_row(context, count, count), out, 0.25)
        found.append(out)
    assert found[0].isfinite().all()
    assert all(torch.equal(out, found[0]) for out in found)


def test_a_plan_on_the_device_has_as_many_tiles_for_any_context() -> None:
    pytest.importorskip("triton")
    import tests.fakes.interpreter  # noqa: F401
    from octavo.ops.triton.plan import Cut, plan

    cut = Cut(low=0, high=1 << 30, tokens=8, tile=16, shares=7, least=1)
    tiles = {
        int(plan(one_row(context, count, count), cut, count, 1).totals[2])
        for count in QUERIES
        for context in CONTEXTS
    }
    assert len(tiles) == len(QUERIES)
