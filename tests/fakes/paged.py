"""Rows of tokens as the paged inputs that ops and models take, without a runner.

A page that nobody wrote holds NaN, and so does the null page 0: whatever reads past a row's
context, or behind its window, shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.groups import layer_groups
from octavo.core.spec import ModelSpec
from octavo.models.batch import Batch
from octavo.models.decoder import Decoder
from octavo.ops import fp8
from octavo.ops.api import GroupMeta


@dataclass(frozen=True)
class Row:
    """This step's tokens of one request, the position of the first, and all its pages."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]

    @property
    def context(self) -> int:
        return self.start + len(self.tokens)


def permuted_pages(
    lengths: Sequence[int], *, page_size: int, num_pages: int, seed: int = 0
) -> list[list[int]]:
    """Scattered pages for requests of these lengths (in tokens), drawn from 1 to num_pages - 1."""
    order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    free = order.tolist()
    counts = [-(-length // page_size) for length in lengths]
    if sum(counts) > len(free):
        raise ValueError(f"{sum(counts)} pages are needed, num_pages allows {len(free)}.")
    return [[free.pop() for _ in range(count)] for count in counts]


def empty_kv(
    num_pages: int,
    num_layers: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The cache of one layer group, [P, L, 2, K, page_size, D] or bytes for fp8, all NaN."""
    shape = (num_pages, num_layers, 2, num_kv_heads)
    if dtype is fp8.KV_DTYPE:
        return torch.full((*shape, fp8.head_bytes(page_size, head_dim)), 0xFF, dtype=torch.uint8)
    return torch.full((*shape, page_size, head_dim), float("nan"), dtype=dtype)


def model_kv(
    spec: ModelSpec,
    *,
    num_pages: int,
    page_size: int,
    num_kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """:func:`empty_kv` of each layer group; ``num_kv_heads`` is that of one rank."""
    heads = num_kv_heads or spec.num_kv_heads
    return tuple(
        empty_kv(num_pages, len(group.layers), heads, page_size, spec.head_dim, dtype)
        for group in layer_groups(spec)
    )


def group_meta(rows: Sequence[Row], *, page_size: int, window: int = 0) -> GroupMeta:
    """The metadata of these rows. Pages that left the window of the row's first query are 0."""
    tables, pages, offsets = [], [], []
    width = max(len(row.pages) for row in rows) + 1
    for row in rows:
        dead = max(0, row.start - window + 1) // page_size if window else 0
        table = [0] * dead + list(row.pages[dead:])
        tables.append(table + [0] * (width - len(table)))
        for position in range(row.start, row.context):
            pages.append(row.pages[position // page_size])
            offsets.append(position % page_size)
    counts = torch.tensor([0] + [len(row.tokens) for row in rows])
    return GroupMeta(
        query_start=counts.cumsum(0).to(torch.int32),
        context_len=torch.tensor([row.context for row in rows], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        page=torch.tensor(pages),
        offset=torch.tensor(offsets),
        page_size=page_size,
        max_query=max(len(row.tokens) for row in rows),
        max_context=max(row.context for row in rows),
        window=window,
    )


def paged_batch(
    rows: Sequence[Row], spec: ModelSpec, kv: tuple[Tensor, ...], *, page_size: int
) -> Batch:
    """One step's batch for a model of this spec; ``kv`` comes from :func:`model_kv`."""
    positions = [torch.arange(row.start, row.context) for row in rows]
    return Batch(
        ids=torch.tensor([token for row in rows for token in row.tokens]),
        positions=torch.cat(positions),
        groups=tuple(
            group_meta(rows, page_size=page_size, window=group.window)
            for group in layer_groups(spec)
        ),
        kv=kv,
    )


def paged_logits(
    model: Decoder,
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    chunks: Sequence[Sequence[int]],
    *,
    page_size: int = 16,
    num_kv_heads: int | None = None,
    seed: int = 0,
) -> list[Tensor]:
    """Logits at every position of each prompt, [len, vocab], computed over several steps.

    Step s runs the next ``chunks[i][s]`` tokens of each prompt i that has such a chunk, all in one
    batch; a prompt's chunks must add up to its length. Pages are scattered.
    """
    lengths = [len(prompt) for prompt in prompts]
    if [sum(sizes) for sizes in chunks] != lengths:
        raise ValueError(f"The chunks must add up to the prompts' lengths, {lengths}.")
    num_pages = 2 + sum(-(-length // page_size) for length in lengths)
    pages = permuted_pages(lengths, page_size=page_size, num_pages=num_pages, seed=seed)
    kv = model_kv(spec, num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads)
    done = [0] * len(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    for step in range(max(len(sizes) for sizes in chunks)):
        alive = [i for i, sizes in enumerate(chunks) if step < len(sizes)]
        counts = [chunks[i][step] for i in alive]
        rows = [
            Row(prompts[i][done[i] : done[i] + count], done[i], pages[i])
            for i, count in zip(alive, counts, strict=True)
        ]
        with torch.inference_mode():
            hidden = model.forward(paged_batch(rows, spec, kv, page_size=page_size))
            logits = model.logits(hidden).split(counts)
        for i, count, part in zip(alive, counts, logits, strict=True):
            found[i].append(part)
            done[i] += count
    return [torch.cat(parts) for parts in found]
