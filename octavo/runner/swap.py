"""Swap: pages of the KV cache to host memory and back, whole rows of the pool."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.core.plan import StepPlan
from octavo.ops.api import Ops

SAMPLE_BYTES = 16 * 2**20  # what a measurement copies: more than a cache next to a core holds
SAMPLE_ROUNDS = 3


def locked_memory(num_pages: int, page_bytes: int) -> Tensor:
    """Page-locked bytes [num_pages, page_bytes] of a GPU's host, unlocked when the tensor goes.

    Touched first: locking, which the device's other work may have to wait for, is short then.
    Raises RuntimeError where so much cannot be locked.
    """
    memory = torch.zeros(num_pages, page_bytes, dtype=torch.uint8)
    driver: Any = torch.cuda.cudart()
    code = int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes: CUDA error {code}")
    unlock = weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())
    unlock.atexit = False  # then the driver may be gone
    return memory


class HostPages:
    """``num_pages`` pages of host memory beside the pool that ``kv`` are views of.

    A page moves with all layers, and with its scales if it has any. Copies are queued in plan
    order on the stream that computes, so a page is whole when it leaves and when it is read.
    Each rank keeps the host pages of its own pool. Memory on a GPU's host is page-locked; on a
    CPU it is not taken before it is touched.
    """

    def __init__(
        self, kv: Sequence[Tensor], num_pages: int, ops: Ops, memory: Tensor | None = None
    ) -> None:
        """``kv`` as :func:`octavo.runner.kv.allocate_kv` returns it. ``memory``, if it has been
        taken already: bytes [more than num_pages, bytes of a page]."""
        self._pool = max(kv, key=lambda group: group[0].numel()).flatten(1)  # [P, page]
        row, dtype = self._pool.shape[1], self._pool.dtype
        self.num_pages = num_pages
        self.page_bytes = row * dtype.itemsize
        self._memory = memory  # locked as long as this very object lives
        if memory is not None:  # row 0 is not used: host pages are numbered from 1
            self._host = memory.view(dtype)
        elif self._pool.is_cuda:
            self._host = torch.empty(num_pages + 1, row, dtype=dtype, pin_memory=True)
        else:
            self._host = ops.new_pages(num_pages + 1, row, dtype, self._pool.device)

    def swap(self, plan: StepPlan) -> None:
        """Copy what ``plan`` asks for: out first, then in."""
        self._copy(self._pool, plan.swap_out_pages, self._host, plan.swap_out_hosts)
        self._copy(self._host, plan.swap_in_hosts, self._pool, plan.swap_in_pages)

    def measure(self) -> float:
        """Seconds that one page takes, out or in. Only while no page is in use: it is lost."""
        count = min(self.num_pages, len(self._pool) - 1, max(1, SAMPLE_BYTES // self.page_bytes))
        rows = list(range(1, count + 1))
        self._pool[1 : count + 1].zero_()
        trip = StepPlan(
            0, swap_out_pages=rows, swap_out_hosts=rows, swap_in_hosts=rows, swap_in_pages=rows
        )
        self._time(trip)  # takes the memory
        return min(self._time(trip) for _ in range(SAMPLE_ROUNDS)) / (2 * count)

    def _time(self, plan: StepPlan) -> float:
        start = time.perf_counter()
        self.swap(plan)
        if self._pool.is_cuda:
            torch.cuda.synchronize(self._pool.device)
        return time.perf_counter() - start

    @staticmethod
    def _copy(source: Tensor, rows: Sequence[int], target: Tensor, places: Sequence[int]) -> None:
        for row, place in zip(rows, places, strict=True):
            target[place].copy_(source[row], non_blocking=True)
