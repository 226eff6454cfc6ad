"""Timing of the Triton operations inside captured graphs, over more memory than the L2 holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_cases import (
    CARD,
    DEVICE,
    DRY,
    LLAMA_8B,
    Shape,
    decode_cases,
    fp8_pages,
    fresh,
    make_meta,
    pages_needed,
    prefill_cases,
)
from octavo.ops import fp8
from octavo.ops.api import GroupMeta
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import RowTiles, Tile, tiles_for

READ_TB_S = 4.33  # measured on the H200
COPIES = 2 if DRY else 16
DTYPE = torch.float32 if DRY else torch.bfloat16

Record = dict[str, Any]


def graph_us(body: Callable[[], object], launches: int, rounds: int = 5) -> float:
    """Median over rounds of microseconds a launch, ``body`` being that many in one graph."""
    if DRY:
        start = time.perf_counter()
        body()
        return (time.perf_counter() - start) * 1e6 / launches
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        graph.replay()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[rounds // 2]


def ops_with(
    *,
    few: Tile | None = None,
    many: Tile | None = None,
    rows: RowTiles | None = None,
    early: bool | None = None,
) -> TritonOps:
    """The committed choices but for the given ones, which serve all head sizes."""
    tiles = tiles_for(CARD)
    given: dict[str, dict[int, Tile]] = {}
    if few:
        given["few"] = {256: few}
    if many:
        given |= {"many": {256: many}, "split": {256: replace(many, programs=1)}}
    tiles = replace(tiles, plain=replace(tiles.plain, **given), fp8=replace(tiles.fp8, **given))
    if rows:
        tiles = replace(tiles, rows=rows)
    return TritonOps(CARD, tiles=tiles, early=early)


class Pool:
    """One random KV tensor that all cases of a shape share."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        if not DRY:
            torch.cuda.empty_cache()  # another shape's pool
        size = (
            pages_needed(shape.page), shape.layers, 2, shape.kv_heads, shape.page, shape.dim,
        )  # fmt: skip
        if shape.in_fp8:
            size = (*size[:-2], fp8.head_bytes(shape.page, shape.dim))
        self.kv = torch.empty(size, dtype=torch.uint8 if shape.in_fp8 else DTYPE, device=DEVICE)
        for part in self.kv.split(512):
            if shape.in_fp8:
                plain = torch.randn(*part.shape[:-1], shape.page, shape.dim, device=DEVICE)
                part.copy_(fp8_pages(plain))
            else:
                part.normal_()

    def attend_us(
        self, ops: TritonOps, meta: GroupMeta, layers: int | None = None, steps: int = 1
    ) -> float:
        """One layer's attention and its share of the step's planning."""
        shape, layers = self.shape, layers or self.shape.layers
        q = torch.randn(int(meta.query_start[-1]), shape.heads, shape.dim, device=DEVICE)
        q = q.to(DTYPE)
        out = torch.empty_like(q)

        def body() -> None:
            for first in range(steps):
                step = fresh(meta)
                for layer in range(first, first + layers):
                    ops.attend(q, self.kv, layer % shape.layers, step, out, shape.dim**-0.5)

        return graph_us(body, layers * steps)


def flops(shape: Shape, rows: list[tuple[int, int]]) -> float:
    pairs = sum(n * c - n * (n - 1) / 2 for n, c in rows)
    return 4.0 * shape.heads * shape.dim * pairs


def time_decode(
    pool: Pool, tiles: Iterable[Tile | None], *, early: bool | None = None, name: str = "decode"
) -> Iterator[Record]:
    """None among the tiles is the committed one."""
    shape, tiles = pool.shape, list(tiles)
    for case, contexts in decode_cases().items():
        meta, _ = make_meta([(1, c) for c in contexts], shape.page)
        read = sum(contexts) * shape.kv_heads * 2 * shape.head_bytes
        for tile in tiles:
            us = pool.attend_us(ops_with(few=tile, early=early), meta)
            rate = read / us / 1e6
            yield {
                "op": name, "case": case, "us": us, "tb_s": rate, "share": rate / READ_TB_S,
                "tile": asdict(tile) if tile else f"committed, early {early}",
            }  # fmt: skip


def time_prefill(
    pool: Pool, tiles: Iterable[Tile | None], *, name: str = "prefill"
) -> Iterator[Record]:
    shape, tiles = pool.shape, list(tiles)
    for case, rows in prefill_cases().items():
        meta, _ = make_meta(rows, shape.page)
        for tile in tiles:
            us = pool.attend_us(ops_with(many=tile), meta, min(2, shape.layers))
            yield {
                "op": name, "case": case, "us": us,
                "tflop_s": flops(shape, rows) / us / 1e6,
                "tile": asdict(tile) if tile else "committed",
            }  # fmt: skip


def time_planning(pool: Pool) -> Iterator[Record]:
    """A step's planning: layers that each plan for themselves, less layers that share a plan."""
    for case, contexts in decode_cases().items():
        meta, _ = make_meta([(1, c) for c in contexts], pool.shape.page)
        alone = pool.attend_us(ops_with(), meta, 1, steps=COPIES)
        shared = pool.attend_us(ops_with(), meta)
        share = 1 - 1 / pool.shape.layers
        yield {"op": "plan", "case": case, "us": (alone - shared) / share, "tile": "committed"}


def time_torch_prefill(shape: Shape) -> Iterator[Record]:
    """torch's own kernels on dense inputs, for comparison."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for batch in (1, 32):
        q = torch.randn(batch, shape.heads, 4096, shape.dim, device=DEVICE, dtype=DTYPE)
        k, v = (torch.randn_like(q[:, : shape.kv_heads]) for _ in range(2))

        def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                us = graph_us(attend, 1)
            rate = flops(shape, [(4096, 4096)] * batch) / us / 1e6
            yield {
                "op": "torch", "case": f"{batch}x4096", "us": us, "tflop_s": rate,
                "tile": str(backend),
            }  # fmt: skip


def _row_bodies(count: int, hidden: int, inner: int) -> dict[str, Callable[[TritonOps, int], Any]]:
    """The small kernels of ``count`` tokens, each on its i-th buffer."""
    shape = LLAMA_8B
    meta, num_pages = make_meta([(1, 17)] * count, shape.page)

    def buffers(*size: int) -> list[Tensor]:
        return [torch.randn(*size, device=DEVICE).to(DTYPE) for _ in range(COPIES)]

    x, residual, gates = buffers(count, hidden), buffers(count, hidden), buffers(count, 2 * inner)
    qkv = buffers(count, (shape.heads + 2 * shape.kv_heads) * shape.dim)
    norm = torch.rand(hidden, device=DEVICE).to(DTYPE)
    size = (num_pages, 2, 2, shape.kv_heads, shape.page, shape.dim)
    kv = torch.zeros(size, dtype=DTYPE, device=DEVICE)
    positions = torch.full((count,), 16, device=DEVICE)
    table = torch.rand(32, shape.dim, device=DEVICE)
    weights = torch.rand(2, shape.dim, device=DEVICE).to(DTYPE)
    vectors = torch.randn(1000, hidden, device=DEVICE).to(DTYPE)
    ids = torch.randint(0, 1000, (count,), device=DEVICE)
    rope = (positions, table, kv, 1, meta, shape.heads, shape.kv_heads)
    return {
        "rms_norm": lambda ops, i: ops.rms_norm(x[i], norm, 1e-5),
        "add_rms_norm": lambda ops, i: ops.add_rms_norm(x[i], residual[i], norm, 1e-5),
        "silu_mul": lambda ops, i: ops.silu_mul(gates[i]),
        "rope": lambda ops, i: ops.rope_and_write(qkv[i], *rope),
        "norm_rope": lambda ops, i: ops.rope_and_write(qkv[i], *rope, *weights),
        "embedding": lambda ops, i: ops.embedding(ids, vectors),
    }


def time_rows(hidden: int, inner: int, variants: list[tuple[RowTiles, bool]]) -> Iterator[Record]:
    """The small kernels; a variant is its tiles and whether kernels start early."""
    for count in (1, 3) if DRY else (1, 32, 128, 512, 4096):
        for name, body in _row_bodies(count, hidden, inner).items():
            for tiles, early in variants:
                ops = ops_with(rows=tiles, early=early)

                def launches(ops: TritonOps = ops, body: Callable = body) -> None:
                    for i in range(COPIES):
                        body(ops, i)

                yield {
                    "op": name, "case": f"{count}x{hidden}", "us": graph_us(launches, COPIES),
                    "tile": asdict(tiles) | {"early": early},
                }  # fmt: skip
