"""What the GPU operations are checked and timed on: shapes, lengths, metadata.

``DRY``: tiny shapes on CPU, in Triton's interpreter.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass, replace

DRY = "--dry-run" in sys.argv
if DRY:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"
    import tests.fakes.interpreter  # noqa: F401

import torch  # noqa: E402

from octavo.ops import fp8  # noqa: E402
from octavo.ops.api import GroupMeta  # noqa: E402
from octavo.ops.triton.fp8 import ordered  # noqa: E402
from octavo.ops.triton.tiles import Card  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
CARD = Card.of(DEVICE)
DTYPES = (torch.float16, torch.float32) if DRY else (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """A layer group's attention."""

    heads: int
    kv_heads: int
    dim: int
    layers: int
    page: int = 16
    in_fp8: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of a token's keys, or values, of one head, in a type of 16 bits or in fp8."""
        return fp8.head_bytes(1, self.dim) if self.in_fp8 else 2 * self.dim


LLAMA_8B = Shape(8, 2, 16, 2) if DRY else Shape(32, 8, 128, 32)
OTHERS = {} if DRY else {
    "8b page 32": replace(LLAMA_8B, page=32),
    "8b page 64": replace(LLAMA_8B, page=64),
    "qwen3 0.6b": Shape(16, 8, 128, 28),
    "size 64": Shape(32, 8, 64, 16),
    "size 256": Shape(16, 8, 256, 8),
}  # fmt: skip


def make_meta(
    rows: list[tuple[int, int]], page: int, *, window: int = 0, spare: int = 0
) -> tuple[GroupMeta, int]:
    """(queries, context) a row, on scattered pages; the metadata and the number of pages. Entries
    past a row's context, and behind its window, are wild."""
    needed = [-(-context // page) for _, context in rows]
    order = (torch.randperm(sum(needed)) + 1).tolist()
    width = max(needed) + spare
    table = torch.full((len(rows), width), 1 << 30, dtype=torch.int32)
    places = []
    for row, (count, context) in enumerate(rows):
        pages = [order.pop() for _ in range(needed[row])]
        dead = max(0, context - count - window + 1) // page if window else 0
        table[row, dead : needed[row]] = torch.tensor(pages[dead:], dtype=torch.int32)
        places += [(pages[p // page], p % page) for p in range(context - count, context)]
    counts = torch.tensor([0] + [count for count, _ in rows])
    place = torch.tensor(places).view(-1, 2)
    meta = GroupMeta(
        query_start=counts.cumsum(0).to(torch.int32).to(DEVICE),
        context_len=torch.tensor([c for _, c in rows], dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE),
        page=place[:, 0].to(DEVICE),
        offset=place[:, 1].to(DEVICE),
        page_size=page,
        max_query=max(count for count, _ in rows),
        max_context=max(context for _, context in rows),
        window=window,
    )
    return meta, sum(needed) + 1


def fresh(meta: GroupMeta) -> GroupMeta:
    return replace(meta, cache={})


def fp8_pages(kv: torch.Tensor) -> torch.Tensor:
    """Plain pages [P, L, 2, K, page, D] as fp8 pages in the kernels' order; NaN stay NaN."""
    codes, scales = fp8.quantize(kv)
    pages = torch.cat((codes.flatten(-2), scales.contiguous().view(torch.uint8)), -1)
    return ordered(pages, kv.shape[-2])


def w1_contexts() -> list[int]:
    """W1's requests in the middle of their outputs."""
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        length = draw.randint(100, 1024)
        for _ in range(length):
            draw.randint(0, 10000)
        prompts.append(length)
    return [length + draw.randint(100, 1024) // 2 for length in prompts]


def decode_cases() -> dict[str, list[int]]:
    if DRY:
        return {"3x40": [40] * 3}
    draw = random.Random(1)

    def ragged(count: int) -> list[int]:
        return [draw.randint(100, 2000) for _ in range(count)]

    return {
        "1x256": [256],
        "4x4k": [4096] * 4,
        "8x16k": [16384] * 8,
        "16 ragged": ragged(16),
        "32x1k": [1024] * 32,
        "32 ragged": ragged(32),
        "64 ragged": ragged(64),
        "128x1k": [1024] * 128,
        "128 ragged": ragged(128),
        "256 W1": w1_contexts(),
        "256 ragged": ragged(256),
        "512x300": [300] * 512,
    }


def prefill_cases() -> dict[str, list[tuple[int, int]]]:
    if DRY:
        return {"1x60": [(60, 60)], "mixed": [(1, 50), (40, 60)]}
    return {
        "1x4096": [(4096, 4096)],
        "32x4096": [(4096, 4096)] * 32,
        "4x512@2048": [(512, 2048)] * 4,
        "1x64@4096": [(64, 4096)],
        "mixed": [(1, 1024)] * 128 + [(512, 1536)] * 2,
    }


def pages_needed(page: int) -> int:
    """Pages that the largest case takes, and the null page."""
    decodes = [[(1, c) for c in contexts] for contexts in decode_cases().values()]
    cases = [*decodes, *prefill_cases().values()]
    return 1 + max(sum(-(-context // page) for _, context in rows) for rows in cases)
