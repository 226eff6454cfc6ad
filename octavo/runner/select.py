"""Which runner a backend wants, and the executor that suits it: chosen once, at start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.distributed.executor import LocalExecutor, OverlappedExecutor
from octavo.ops.api import Ops
from octavo.runner.rescue import out_of_memory
from octavo.runner.runner import Model, Runner
from octavo.runner.sampler import Sampler
from octavo.runner.slots import Slots
from octavo.runner.swap import HostPages


def make_runner(
    ops: Ops,
    model: Model,
    sampler: Sampler,
    kv: tuple[Tensor, ...],
    windows: Sequence[int],
    slots: Slots,
    *,
    hidden: tuple[int, torch.dtype],
    max_tokens: int,
    depth: int,
    max_graph_tokens: int | None,
    host_pages: HostPages | None,
    prompt_logprobs_chunk: int,
) -> Runner:
    """The runner of ``ops``; arguments as those of the two classes."""
    if ops.name != "triton":
        return Runner(
            model, sampler, kv, windows, slots,
            host_pages=host_pages, prompt_logprobs_chunk=prompt_logprobs_chunk,
        )  # fmt: skip
    from octavo.runner.overlapped import OverlappedRunner

    return OverlappedRunner(
        model, sampler, kv, windows, slots, hidden=hidden, max_tokens=max_tokens, depth=depth,
        max_graph_tokens=max_graph_tokens, host_pages=host_pages,
        prompt_logprobs_chunk=prompt_logprobs_chunk,
    )  # fmt: skip


def make_executor(runner: Runner, depth: int) -> LocalExecutor:
    """Up to ``depth`` plans under way where the device works beside the host, else one."""
    if depth > 1 and runner.overlaps:
        return OverlappedExecutor(runner, depth, rescue=out_of_memory)
    return LocalExecutor(runner, rescue=out_of_memory)
