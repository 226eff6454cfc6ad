"""Chooses the ops backend: once, at start, by name."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from octavo.core.errors import StartupError
from octavo.ops.api import Ops

log = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "triton")


def select_ops(
    device: str,
    dtype: torch.dtype,
    *,
    backend: str = "auto",
    threads: int | None = None,
    cpu_isa: str = "auto",
    cache_dir: Path | None = None,
) -> Ops:
    """The operations that a model on ``device`` in ``dtype`` runs on.

    ``auto`` takes compiled kernels where there are some (CPU in fp32 and bf16, GPUs that Triton
    knows), else the reference, which is always there. On CPU ``threads`` becomes torch's thread
    count (None: torch's own), which kernels share. ``cache_dir`` keeps compiled kernels (default:
    the user's cache folder). Raises :class:`StartupError` for a backend, ISA or thread count that
    cannot be had.
    """
    if backend not in BACKENDS:
        raise StartupError(f"Backend must be one of {', '.join(BACKENDS)}, not {backend!r}.")
    on_cpu = torch.device(device).type == "cpu"
    if threads is not None and threads < 1:
        raise StartupError(f"CPU threads must be at least 1, not {threads}.")
    if on_cpu and threads:
        torch.set_num_threads(threads)
    if backend == "reference":
        return Ops()
    if backend == ("triton" if on_cpu else "cpu"):
        raise StartupError(f"Backend {backend} does not run on device {device}.")
    if not on_cpu:
        return _triton_ops(backend, torch.device(device))
    if dtype not in (torch.float32, torch.bfloat16):
        if backend == "auto":
            return Ops()
        raise StartupError(f"Backend cpu knows float32 and bfloat16, not {dtype}.")
    return _cpu_ops(backend, cpu_isa, cache_dir)


def _cpu_ops(backend: str, cpu_isa: str, cache_dir: Path | None) -> Ops:
    from octavo.ops.cpu.isa import detect_isa  # numba: half a second that others need not pay

    isa = detect_isa(cpu_isa)
    try:
        from octavo.ops.cpu.backend import CpuOps
        from octavo.ops.cpu.jit import default_cache_dir
    except ImportError as error:
        if backend == "cpu":
            raise StartupError(f"Backend cpu needs numba: {error}.") from error
        log.warning("Slow reference operations are used: numba is missing (%s).", error)
        return Ops()
    return CpuOps(
        isa=isa, threads=torch.get_num_threads(), cache_dir=cache_dir or default_cache_dir()
    )


def _triton_ops(backend: str, device: torch.device) -> Ops:
    try:
        from octavo.ops.triton.backend import TritonOps
        from octavo.ops.triton.tiles import Card
    except ImportError as error:
        if backend == "triton":
            raise StartupError(f"Backend triton needs Triton: {error}.") from error
        log.warning("Slow reference operations are used: Triton is missing (%s).", error)
        return Ops()
    return TritonOps(Card.of(device))
