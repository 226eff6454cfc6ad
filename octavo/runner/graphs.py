"""Captured graphs: a body of launches over fixed memory, replayed with one call."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

MAX_GRAPH_ROWS = 1024  # above that launches cost nothing beside the step itself

Body = Callable[[], None]


def graph_sizes(max_rows: int) -> list[int]:
    """Row counts that get a graph: 1, 2, 4, 8, then in steps of 8 and, from 256 on, of 32;
    ``max_rows`` is the last."""
    top = min(max_rows, MAX_GRAPH_ROWS)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, top + 32, 32)]
    return [*(size for size in steps if size < top), top]


def token_sizes(max_tokens: int) -> list[int]:
    """Token counts of mixed steps that get a graph; ``max_tokens`` is the last. Padding is at most
    6 % from 256 tokens on; fewer take about as long as 256."""
    sizes = list(range(32, min(256, max_tokens), 32))
    size = 256
    while size < max_tokens:
        sizes.append(size)
        size += 1 << (size.bit_length() - 5)  # a sixteenth of the power of two below
    return [*sizes, max_tokens] if max_tokens else []


def distinct_sizes(sizes: Sequence[int]) -> list[int]:
    """Those of the ascending ``sizes`` that kernels may be compiled anew for: powers of two, each
    with the next larger one, and the last."""
    chosen = {sizes[-1]} if sizes else set()
    for size, following in pairwise(sizes):
        if size & (size - 1) == 0:
            chosen |= {size, following}
    return sorted(chosen)


class Graphs:
    """Bodies by name and size, captured on a GPU and called as they are elsewhere.

    All graphs share one pool of memory: they never run at the same time, and what must outlive one
    lies outside. Capture the largest first, so that the others fit into its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._sizes: dict[str, list[int]] = {}  # ascending
        self._bodies: dict[tuple[str, int], Body] = {}
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def size_for(self, name: str, count: int) -> int | None:
        """The smallest size that holds ``count``; None: too many for a graph."""
        sizes = self._sizes.get(name, [])
        at = bisect_left(sizes, count)
        return sizes[at] if at < len(sizes) else None

    def run(self, name: str, size: int) -> None:
        self._bodies[name, size]()

    def capture(self, name: str, size: int, body: Body) -> None:
        """Runs ``body`` once to compile and load what it launches, then captures it."""
        self._bodies[name, size] = self._captured(body) if self._on_gpu else body
        insort(self._sizes.setdefault(name, []), size)

    def _captured(self, body: Body) -> Body:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            body()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            body()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay
