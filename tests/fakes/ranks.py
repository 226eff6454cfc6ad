"""A function on several ranks, each a process of its own, joined by a real gloo communicator."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_ranks(
    size: int, function: Callable[..., None], folder: Path, *args: Any, timeout_s: float = 120.0
) -> None:
    """``function(comm, folder, *args)`` on each rank; raises if one fails or takes too long.

    ``function`` must be importable (top level of a module). Ranks meet, and leave their
    results, in the empty ``folder``.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_rank, args=(rank, size, function, folder, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    if codes != [0] * size:
        raise RuntimeError(f"The ranks ended with {codes}; None is one that did not end.")


def _rank(
    rank: int, size: int, function: Callable[..., None], folder: Path, args: tuple[Any, ...]
) -> None:
    import torch

    from octavo.distributed.comm import connect

    torch.set_num_threads(1)
    comm = connect(rank, size, f"file://{folder}/meeting", timeout_s=60.0)
    function(comm, folder, *args)
    comm.close()
