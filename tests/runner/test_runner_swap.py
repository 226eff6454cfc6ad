"""Pages go to host memory and come back whole, in the order that plans promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.ops import fp8
from octavo.ops.api import Ops
from octavo.ops.cpu.pool import map_zeros
from octavo.runner.kv import allocate_kv
from octavo.runner.swap import HostPages, locked_memory

PAGES, HOST_PAGES = 9, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_kv(
    dtype: torch.dtype, group_layers: tuple[int, ...] = (3, 2), device: str = "cpu"
) -> tuple[Tensor, ...]:
    return allocate_kv(PAGES, group_layers, 2, 16, 8, dtype, torch.device(device), Ops())


def fill(kv: tuple[Tensor, ...]) -> list[Tensor]:
    """Random bytes in every page; copies of what the groups see."""
    for group in kv:
        group.view(torch.uint8).random_(0, 100)
    return [group.clone() for group in kv]


def same(kv: tuple[Tensor, ...], page: int, before: list[Tensor], was: int) -> bool:
    return all(torch.equal(now[page], then[was]) for now, then in zip(kv, before, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, fp8.KV_DTYPE])
def test_a_page_comes_back_whole_wherever_it_goes(dtype: torch.dtype, device: str) -> None:
    kv = make_kv(dtype, device=device)
    before = fill(kv)
    host = HostPages(kv, HOST_PAGES, Ops())
    host.swap(StepPlan(0, swap_out_pages=[3, 8, 5], swap_out_hosts=[4, 1, 2]))
    for group in kv:
        group.zero_()
    host.swap(StepPlan(1, swap_in_hosts=[1, 4], swap_in_pages=[2, 7]))
    host.swap(StepPlan(2, swap_in_hosts=[2], swap_in_pages=[1]))
    assert same(kv, 2, before, was=8)
    assert same(kv, 7, before, was=3)
    assert same(kv, 1, before, was=5)
    assert not any(group[page].any() for group in kv for page in (0, 3, 4, 5, 6, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, fp8.KV_DTYPE])
def test_memory_that_was_locked_before(dtype: torch.dtype) -> None:
    kv = make_kv(dtype, device="cuda")
    before = fill(kv)
    page_bytes = HostPages(kv, 1, Ops()).page_bytes
    host = HostPages(kv, HOST_PAGES, Ops(), locked_memory(HOST_PAGES + 3, page_bytes))
    assert host._host.is_pinned()
    host.swap(StepPlan(0, swap_out_pages=[3, 8], swap_out_hosts=[4, 1]))
    for group in kv:
        group.zero_()
    host.swap(StepPlan(1, swap_in_hosts=[4], swap_in_pages=[2]))
    assert same(kv, 2, before, was=3)


def test_a_page_that_leaves_makes_room_for_one_that_returns_in_the_same_step() -> None:
    kv = make_kv(torch.float32)
    before = fill(kv)
    host = HostPages(kv, HOST_PAGES, Ops())
    host.swap(StepPlan(0, swap_out_pages=[6], swap_out_hosts=[3]))
    host.swap(StepPlan(1, [], swap_out_pages=[2], swap_out_hosts=[1],
                       swap_in_hosts=[3], swap_in_pages=[2]))  # fmt: skip
    assert same(kv, 2, before, was=6)
    host.swap(StepPlan(2, swap_in_hosts=[1], swap_in_pages=[5]))
    assert same(kv, 5, before, was=2)


def test_host_pages_are_as_large_as_the_largest_groups() -> None:
    for dtype, element in ((torch.float32, 32), (fp8.KV_DTYPE, 10)):  # 8 codes and a scale
        assert HostPages(make_kv(dtype), 1, Ops()).page_bytes == 3 * 2 * 2 * 16 * element


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("host_pages", [1, 3, 50])
def test_a_measurement_takes_time_and_leaves_zeros(host_pages: int, device: str) -> None:
    kv = make_kv(torch.float32, device=device)
    fill(kv)
    host = HostPages(kv, host_pages, Ops())
    assert 0 < host.measure() < 1
    touched = min(host_pages, PAGES - 1)
    assert not any(group[1 : touched + 1].any() for group in kv)


def test_memory_of_the_host_is_not_taken_before_it_is_touched() -> None:
    class Mapped(Ops):
        def new_pages(self, num_pages, page_elements, dtype, device):
            return map_zeros(num_pages, page_elements, dtype)

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    kv = make_kv(torch.float32, (30,))
    before = resident()
    host = HostPages(kv, 10_000, Mapped())
    assert host.page_bytes * 10_000 > 512 * 2**20
    assert resident() - before < 32 * 2**20
