"""What a GPU's memory is used for, measured before the KV pages are taken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from octavo.core.capacity import MemoryUse
from octavo.core.errors import StartupError

SAMPLED_GRAPHS = 5  # captured to tell what one more takes


class Memory(Protocol):
    """Readings of one device, in bytes. ``reserved`` is what this process's allocator holds."""

    def free(self) -> int: ...

    def total(self) -> int: ...

    def reserved(self) -> int: ...

    def peak_reserved(self) -> int:
        """The most since the last :meth:`release`."""

    def release(self) -> None:
        """Give back what nothing uses."""


class GpuMemory:
    """torch's allocator and the driver's counters, after all work under way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.mem_get_info(self._device)[0]

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak_reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


class MemoryMeter:
    """Measures a start, in this order: weights are loaded, worst steps, graphs.

    ``others``: bytes that other processes use, read before this one touched the device.
    """

    def __init__(self, memory: Memory, others: int) -> None:
        self._memory, self._others = memory, others
        memory.release()
        self._weights = memory.reserved()
        self._step = self._graphs = self._context = 0

    def steps(self, run: Callable[[], object], pool_bytes: int) -> None:
        """Run the worst steps over a pool of ``pool_bytes`` and see what they take at most."""
        run()
        memory = self._memory
        self._step = max(self._step, memory.peak_reserved() - self._weights - pool_bytes)
        taken = memory.total() - memory.free() - memory.reserved()
        self._context = max(0, taken - self._others)

    def graphs(self, captures: Sequence[Callable[[], object]]) -> None:
        """Capture the first graphs; all others take as much as the later ones of these did."""
        marks = [self._memory.free()]
        for capture in captures[:SAMPLED_GRAPHS]:
            capture()
            marks.append(self._memory.free())
        self._graphs = max(0, marks[0] - marks[-1])
        left = len(captures) - SAMPLED_GRAPHS
        if left > 0:
            each = max(0, marks[1] - marks[-1]) / (SAMPLED_GRAPHS - 1)
            self._graphs += int(left * each)

    def use(self) -> MemoryUse:
        return MemoryUse(
            total=self._memory.total(),
            others=self._others,
            weights=self._weights,
            step=self._step,
            graphs=self._graphs,
            context=self._context,
        )


@contextmanager
def refused_without_memory(purpose: str) -> Iterator[None]:
    """Inside, running out of device memory is a :class:`StartupError`: none to ``purpose``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = (figure / 2**30 for figure in torch.cuda.mem_get_info())
        raise StartupError(
            f"The GPU has no memory to {purpose}: {free:.1f} GiB of {total:.1f} are free; lower "
            "--max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization, or take a "
            "smaller model."
        ) from error
