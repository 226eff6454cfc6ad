"""How many bytes a device has for KV pages, or a sentence that says what is short."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config.facts import Gpu, HostFacts
from octavo.config.options import Options
from octavo.core.capacity import MemoryUse
from octavo.core.errors import StartupError

GIB = 2**30
CPU_OVERHEAD_BYTES = GIB // 2  # libraries, activations, the server's own process
GPU_OVERHEAD_BYTES = GIB  # the CUDA context and the activations of one step, until measured


@dataclass(frozen=True, slots=True)
class Room:
    """``size`` in bytes; ``beside`` names what takes the rest."""

    size: int
    beside: str


def cpu_room(facts: HostFacts, values: Mapping[str, Any]) -> Room:
    """What weights and libraries leave. ``values``: options resolved so far."""
    available, weights = facts.available_bytes, values["weight_bytes"]
    size = available - weights - CPU_OVERHEAD_BYTES
    if size <= 0:
        raise StartupError(
            f"The weights need {gib(weights)} of memory in {values['dtype']}, and "
            f"{gib(available)} are available."
        )
    return Room(size, f"{gib(weights)} of weights")


def gpu_room(gpu: Gpu, options: Options, values: Mapping[str, Any]) -> Room:
    """What weights and one step leave of the GPU's share; of all that is free, where the KV cache's
    size is given, which then alone counts."""
    given = (options.kv_cache_memory, options.kv_cache_tokens) != ("auto", "auto")
    share = None if given else options.gpu_memory_utilization
    if gpu.use is not None:
        return _measured(gpu.use, share, values)
    requested = gpu.free_bytes if share is None else int(gpu.total_bytes * share)
    if requested > gpu.free_bytes:
        raise StartupError(
            f"The GPU has {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}, "
            f"{gib(requested - gpu.free_bytes)} less than the {gib(requested)} requested: others "
            f"use {gib(gpu.total_bytes - gpu.free_bytes)}; end them, or lower "
            f"--gpu-memory-utilization ({share:g})."
        )
    weights = values["weight_bytes"]
    size = requested - weights - GPU_OVERHEAD_BYTES
    if size <= 0:
        raise StartupError(
            f"The weights need {gib(weights)} in {values['dtype']}, and {_limit(share)} "
            f"{gib(requested)}."
        )
    return Room(size, f"{gib(weights)} of weights")


def _measured(use: MemoryUse, share: float | None, values: Mapping[str, Any]) -> Room:
    size = use.room(share)
    beside = (
        f"{gib(use.weights)} of weights, {gib(use.step)} of a step, {gib(use.graphs)} of graphs "
        f"and {gib(use.context)} of libraries"
    )
    if size > 0:
        return Room(size, beside)
    limit = use.total - use.others if share is None else int(use.total * share)
    raise StartupError(
        f"No memory is left for a KV cache, {gib(-size)} are missing: there are {beside}, other "
        f"processes use {gib(use.others)}, and {_limit(share)} {gib(limit)}; lower "
        f"--max-num-batched-tokens ({values['max_num_batched_tokens']}) or --max-num-seqs "
        f"({values['max_num_seqs']})."
    )


def _limit(share: float | None) -> str:
    return "the GPU has" if share is None else f"--gpu-memory-utilization {share:g} allows"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
