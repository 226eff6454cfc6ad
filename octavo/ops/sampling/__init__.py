"""From logits to ids: truncation, penalties, log-probabilities and the draw itself."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from octavo.ops.sampling.reference import SamplingOps

log = logging.getLogger(__name__)


def select_sampling_ops(
    device: torch.device, *, threads: int | None = None, cache_dir: Path | None = None
) -> SamplingOps:
    """The fastest sampling operations for a device: Triton kernels on a GPU.

    On CPU: ``threads`` (None: torch's number) of torch's pool, compiled kernels kept in
    ``cache_dir`` (None: the user's cache folder).
    """
    if device.type == "cpu":
        from octavo.ops.cpu.jit import default_cache_dir
        from octavo.ops.sampling.cpu import CpuSamplingOps

        return CpuSamplingOps(
            threads=threads or torch.get_num_threads(), cache_dir=cache_dir or default_cache_dir()
        )
    if device.type == "cuda":
        try:
            from octavo.ops.sampling.gpu import TritonSamplingOps
            from octavo.ops.triton.tiles import Card
        except ImportError as error:
            log.warning("Sampling is slow: Triton is missing (%s).", error)
        else:
            return TritonSamplingOps(early=Card.of(device).starts_early)
    return SamplingOps()
