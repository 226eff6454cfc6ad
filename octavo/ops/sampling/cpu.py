"""Sampling on CPU: compiled kernels, rows spread over torch's threads."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.cpu.jit import Launcher, Team, compile_kernel
from octavo.ops.sampling import kernels
from octavo.ops.sampling.reference import DrawParams, PenaltyParams, SamplingOps, TopLogprobs

# Below this many logits a kernel runs on the caller's thread: waking others costs more.
_PARALLEL_ELEMENTS = 1 << 17

_KERNELS: dict[str, Callable[[int], None]] = {
    "draw": kernels.draw,
    "check": kernels.check,
    "penalise": kernels.penalise,
    "logprobs": kernels.top_logprobs,
}


class CpuSamplingOps(SamplingOps):
    """One instance serves one thread. Kernels are compiled on first use, or by ``warm_up``."""

    name = "numba"

    def __init__(self, *, threads: int, cache_dir: Path | None) -> None:
        self._team = Team(threads)
        self._cache_dir = cache_dir
        self._launchers: dict[str, Launcher] = {}

    def warm_up(self) -> None:
        for name, num_arguments in (("draw", 10), ("check", 4), ("penalise", 8), ("logprobs", 8)):
            self._launcher(name, num_arguments)

    def status(self, logits: Tensor, rows: Tensor) -> Tensor:
        status = torch.empty(len(rows), dtype=torch.int8)
        self._run("check", len(rows), logits.shape[1], logits, rows, status)
        return status

    def penalise(self, logits: Tensor, counts: Tensor, params: PenaltyParams) -> None:
        self._run(
            "penalise", len(params.rows), logits.shape[1], logits, counts, params.rows,
            params.count_rows, params.repetition, params.frequency, params.presence,
        )  # fmt: skip

    def draw(self, logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        status = torch.empty(rows, dtype=torch.int8)
        self._run(
            "draw", rows, size, logits, params.temperature, params.top_k, params.top_p,
            params.min_p, params.seed, params.index, ids, status,
        )  # fmt: skip
        return ids, status

    def top_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        rows, size = logits.shape
        k = min(k, size)
        result = TopLogprobs(
            torch.empty(rows, dtype=torch.float64),
            torch.empty(rows, dtype=torch.int64),
            torch.empty(rows, k, dtype=torch.int64),
            torch.empty(rows, k, dtype=torch.float64),
        )
        self._run(
            "logprobs", rows, size, k, logits, targets,
            result.target, result.rank, result.ids, result.values,
        )  # fmt: skip
        return result

    def _run(self, name: str, items: int, size: int, *arguments: Tensor | int) -> None:
        """Tensors are passed as addresses; they must be contiguous."""
        addresses = [a if isinstance(a, int) else _address(a) for a in arguments]
        launch = self._launcher(name, 1 + len(addresses))
        launch(items, items > 1 and items * size >= _PARALLEL_ELEMENTS, size, *addresses)

    def _launcher(self, name: str, num_arguments: int) -> Launcher:
        if name not in self._launchers:
            symbol = f"sampling_{name}_{_digest()}"
            kernel = compile_kernel(_KERNELS[name], symbol, cache_dir=self._cache_dir)
            self._launchers[name] = Launcher(kernel, self._team, f"{num_arguments}q")
        return self._launchers[name]


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("Sampling kernels take contiguous tensors only.")
    return tensor.data_ptr()


@functools.cache
def _digest() -> str:
    """Changes with what the kernels are compiled from, which a cached one must not outlive."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
