"""Communicators: the collectives a layer may use, as an object that it is given.

A layer asks ``rank`` and ``size`` when it is built and calls collectives in its forward pass; every
rank calls the same ones in the same order. With one rank they cost nothing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist


class Communicator(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, on each of them. May work in place; use the returned tensor."""

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """All ranks' equally shaped tensors, joined along ``dim`` in rank order."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Rank ``source``'s values. May work in place; use the returned tensor."""

    def close(self) -> None: ...


class SingleCommunicator:
    """The only rank there is."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def close(self) -> None:
        pass


class TorchCommunicator:
    """The ranks of a torch.distributed process group (gloo on CPU, NCCL on CUDA)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` None means all ranks of the process's default group."""
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group or dist.group.WORLD

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        parts = x.new_empty((self.size, *x.shape))
        dist.all_gather_into_tensor(parts, x.contiguous().unsqueeze(0), group=self._group)
        return torch.cat(parts.unbind(0), dim=dim)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, group=self._group, group_src=source)
        return x

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def connect(
    rank: int,
    size: int,
    init_method: str,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = 600.0,
) -> TorchCommunicator:
    """Join ``size`` ranks that meet at ``init_method`` (``tcp://host:port``, ``file:///path``).

    Blocks until all have come; raises RuntimeError after ``timeout_s`` seconds, which also bounds
    each later collective. A process can be in one such group at a time.
    """
    device = torch.device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return TorchCommunicator()
