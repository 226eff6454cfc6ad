"""What this machine can do at best: bytes read from memory and operations of a product, a second.

Short and crude on purpose: an upper mark for a share, not a benchmark of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

READ_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}  # beyond every cache
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
PROBE_SECONDS = 0.4
MIN_RUNS = 3


@dataclass(frozen=True, slots=True)
class Peak:
    """``read_bytes_s``: of one long reduction. ``flops``: of a square matrix product in ``dtype``,
    or on a CPU in float32 if that is faster there."""

    read_bytes_s: float
    flops: float
    dtype: str

    @property
    def text(self) -> str:
        return (
            f"Measured peak: {self.read_bytes_s / 1e9:.1f} GB/s read, "
            f"{self.flops / 1e9:.0f} GFLOP/s of {self.dtype} products"
        )


def measure_peak(device: str, dtype: str) -> Peak:
    import torch

    place = torch.device(device)
    names = [dtype] if device == "cuda" else sorted({dtype, "float32"})
    flops = max(_product_flops(place, getattr(torch, name)) for name in names)
    return Peak(_read_bytes_s(place), flops, dtype)


def _read_bytes_s(device: torch.device) -> float:
    import torch

    data = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return READ_BYTES[device.type] / best_seconds(lambda: data.sum(), device)


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    n = PRODUCT_SIZE[device.type]
    a, b = (torch.full((n, n), 0.5, dtype=dtype, device=device) for _ in range(2))
    return 2 * n**3 / best_seconds(lambda: a @ b, device)


def best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of several runs, after one to warm up."""
    import torch

    def timed() -> float:
        before = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - before

    timed()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < MIN_RUNS or spent < PROBE_SECONDS:
        seconds = timed()
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return best
