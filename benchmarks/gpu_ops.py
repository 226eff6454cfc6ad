"""Check and time the Triton operations: ``python benchmarks/gpu_ops.py --out DIR [--dry-run]``.

Every operation is compared with float64 on fresh random inputs and poisoned outputs, and with the
error of torch's own composition in the same type. Timings are of captured graphs, over more
memory than the L2 cache holds; share = KV bytes over time over the card's read bandwidth. ``--dry-run``
does the same on tiny shapes in Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
DRY = "--dry-run" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if DRY:
    import tests.fakes.interpreter  # noqa: F401
from octavo.ops.api import GroupMeta, Ops
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import Card, CardTiles, Tile, pick, tiles_for

READ_TB_S = 4.33  # measured on the H200
DEVICE = torch.device("cpu" if DRY else "cuda")
CARD = Card.of(DEVICE)
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """A layer group's attention."""

    heads: int
    kv_heads: int
    dim: int
    layers: int
    page: int = 16


LLAMA_8B = Shape(8, 2, 16, 2) if DRY else Shape(32, 8, 128, 32)
QWEN_06B = Shape(4, 2, 16, 2) if DRY else Shape(16, 8, 128, 28)


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


# -- checks -----------------------------------------------------------------------------------


def row_error(x: Tensor, ref: Tensor) -> float:
    """Largest |x - ref| over the largest |ref| of its row; infinite if something is not finite."""
    if not x.isfinite().all():
        return math.inf
    x, ref = x.double().flatten(0, -2), ref.double().flatten(0, -2)
    error = (x - ref).abs().amax(-1) / ref.abs().amax(-1).clamp_min(1e-30)
    return error.max().item()


def judge(name: str, dtype: torch.dtype, ours: Tensor, theirs: Tensor, ref: Tensor) -> dict:
    """Ours must be within 1e-2 of the row's largest value, and 1.5 times torch's own error."""
    mine, torchs = row_error(ours, ref), row_error(theirs, ref)
    floor = 1e-6 if dtype is torch.float32 else 0.0
    ok = mine <= 1e-2 and mine <= max(1.5 * torchs, floor)
    return {"check": name, "dtype": str(dtype)[6:], "error": mine, "torch": torchs, "ok": ok}


def dense_rows(
    kv: Tensor, layer: int, meta: GroupMeta
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """First query, end, and keys and values [C, K, D] of each row, zeros behind the window."""
    starts, contexts = meta.query_start.tolist(), meta.context_len.tolist()
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        low = max(0, context - (end - begin) - meta.window + 1) if meta.window else 0
        pages = meta.page_table[row, : -(-context // meta.page_size)].long()
        pages = torch.where(pages < kv.shape[0], pages, 0)
        span = kv[pages, layer]
        k, v = (span[:, i].transpose(1, 2).flatten(0, 1)[:context].clone() for i in (0, 1))
        k[:low], v[:low] = 0, 0
        yield begin, end, k, v


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, cap: float
) -> Tensor:
    """In the type of its arguments: [Q, H, D] over [C, K, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,chd->hqc", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    key = torch.arange(k.shape[0], device=q.device)
    query = key[k.shape[0] - q.shape[0] :, None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def check_attention(
    ops: TritonOps, shape: Shape, rows: list[tuple[int, int]], dtype: torch.dtype, window: int,
    cap: float,
) -> dict:  # fmt: skip
    meta, num_pages = make_meta(rows, shape.page, window=window)
    kv = torch.full((num_pages, 2, 2, shape.kv_heads, shape.page, shape.dim), NAN)
    kv = kv.to(DEVICE, dtype)
    for row, (_, context) in enumerate(rows):  # what nobody wrote stays NaN
        for at, page in enumerate(meta.page_table[row].tolist()):
            filled = min(shape.page, context - at * shape.page)
            if page < num_pages and filled > 0:
                kv[page, 1, :, :, :filled].normal_()
    tokens = sum(count for count, _ in rows)
    q = torch.randn(tokens + 3, shape.heads, shape.dim).to(DEVICE, dtype)
    out = torch.full_like(q, NAN)
    scale = shape.dim**-0.5
    ops.attend(q, kv, 1, meta, out, scale, cap)
    again = torch.full_like(q, NAN)
    ops.attend(q, kv, 1, fresh(meta), again, scale, cap)
    ref, theirs = q.double(), q.clone()
    for begin, end, k, v in dense_rows(kv, 1, meta):
        part = q[begin:end]
        ref[begin:end] = plain_attention(part.double(), k.double(), v.double(), window, scale, cap)
        theirs[begin:end] = plain_attention(part, k, v, window, scale, cap)
    name = f"attend {shape.heads}/{shape.kv_heads}x{shape.dim} page {shape.page}"
    name += f" rows {len(rows)} queries {meta.max_query} window {window} cap {cap:g}"
    result = judge(name, dtype, out[:tokens], theirs[:tokens], ref[:tokens])
    equal = torch.equal(out[:tokens], again[:tokens]) and bool(out[tokens:].isnan().all())
    return result | {"ok": result["ok"] and equal, "bit_equal": equal}


def attention_checks(ops: TritonOps) -> Iterator[dict]:
    draw = random.Random(time.time_ns())
    most = 90 if DRY else 3000

    def row(queries: int) -> tuple[int, int]:
        count = draw.randint(1, queries)
        return count, count + draw.randint(0, most)

    def ones(n: int) -> list[tuple[int, int]]:
        return [(1, draw.randint(1, most)) for _ in range(n)]

    def mixed(n: int) -> list[tuple[int, int]]:
        return [row(4), (0, 0), *(row(most // 4) for _ in range(n)), *ones(n), row(40)]

    heads = [(4, 2, 16)] if DRY else [(32, 8, 128), (16, 8, 128), (28, 4, 128), (8, 8, 64),
                                      (6, 2, 96), (16, 2, 80), (8, 2, 256), (32, 1, 64)]  # fmt: skip
    dtypes = (torch.float16, torch.float32) if DRY else (torch.bfloat16, torch.float16)
    for h, k, d in heads:
        for dtype in dtypes:
            for page in (16, 64) if h in (4, 32) else (32,):
                shape = Shape(h, k, d, 2, page)
                yield check_attention(ops, shape, ones(1), dtype, 0, 0.0)
                yield check_attention(ops, shape, ones(3 if DRY else 60), dtype, 0, 0.0)
                yield check_attention(ops, shape, mixed(2), dtype, 0, 0.0)
                yield check_attention(ops, shape, mixed(2), dtype, 40 if DRY else 700, 5.0)
                yield check_attention(ops, shape, ones(3), dtype, 40 if DRY else 700, 30.0)
    if not DRY:
        shape = Shape(8, 2, 64, 2)
        yield check_attention(ops, shape, mixed(1), torch.float32, 0, 0.0)
        yield check_attention(ops, shape, ones(9), torch.float32, 100, 0.0)


def row_checks(ops: TritonOps) -> Iterator[dict]:
    for dtype in (torch.float16, torch.float32) if DRY else (torch.bfloat16, torch.float16):
        for count, size in ((3, 48),) if DRY else ((1, 4096), (130, 4096), (77, 1024), (5, 2880)):
            x, residual = (torch.randn(count, size).to(DEVICE, dtype) for _ in range(2))
            weight = torch.rand(size).to(DEVICE, dtype)
            wide = [t.double() for t in (x, residual, weight)]
            ref, torchs = Ops(), Ops()

            def norm(x: Tensor, w: Tensor) -> Tensor:
                return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w

            ours = ops.rms_norm(x, weight, 1e-5)
            theirs = torchs.rms_norm(x, weight, 1e-5)
            yield judge(f"rms_norm {count}x{size}", dtype, ours, theirs, norm(wide[0], wide[2]))
            total = wide[0] + wide[1]
            theirs, their_sum = torchs.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            ours, our_sum = ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            yield judge("add_rms_norm", dtype, ours, theirs, norm(total, wide[2]))
            yield judge("add_rms_norm, sum", dtype, our_sum, their_sum, total)
            gate, up = wide[0].chunk(2, -1)
            ours, theirs = ops.silu_mul(x), torchs.silu_mul(x)
            yield judge("silu_mul", dtype, ours, theirs, gate * gate.sigmoid() * up)
            ids = torch.randint(0, count, (9,), device=DEVICE)
            yield judge("embedding", dtype, ops.embedding(ids, x), x[ids], x[ids])
            yield from rope_checks(ops, ref, dtype)


def rope_checks(ops: TritonOps, torchs: Ops, dtype: torch.dtype) -> Iterator[dict]:
    cases = ((4, 2, 16, 16),) if DRY else ((32, 8, 128, 128), (16, 8, 128, 128), (6, 2, 96, 32))
    for heads, kv_heads, dim, rope_dim in cases:
        meta, num_pages = make_meta([(1, 20), (5, 45), (1, 1)], 16)
        qkv = torch.randn(7, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype)
        positions = torch.tensor([19, 40, 41, 42, 43, 44, 0], device=DEVICE)
        angles = torch.rand(64, rope_dim // 2, dtype=torch.float64) * 6
        table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
        for norms in (None, torch.rand(2, dim).to(DEVICE, dtype) + 0.5):
            results = []
            for op, kind in ((ops, dtype), (torchs, dtype), (_Double(), torch.float64)):
                kv = torch.full((num_pages, 2, 2, kv_heads, 16, dim), NAN).to(DEVICE, kind)
                pair = (None, None) if norms is None else norms.to(kind)
                angle = table if kind is torch.float64 else table.float()
                q = op.rope_and_write(
                    qkv.to(kind), positions, angle, kv, 1, meta, heads, kv_heads, *pair
                )
                written = kv[meta.page, 1, :, :, meta.offset].flatten(1, 2)
                clean = int(kv.isfinite().sum()) == written.numel()
                results.append(torch.cat((q, written), 1) if clean else q * NAN)
            name = f"rope {heads}/{kv_heads}x{dim}, {rope_dim} turned, norms {norms is not None}"
            yield judge(name, dtype, *results)


class _Double(Ops):
    """The reference in float64."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def rope_and_write(self, qkv: Tensor, *args: Any) -> Tensor:
        return super().rope_and_write(qkv, *args)


# -- timing -----------------------------------------------------------------------------------


def graph_us(body: Callable[[], None], launches: int, rounds: int = 5) -> float:
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


def ops_with(few: Tile | None = None, many: Tile | None = None, **changes: Any) -> TritonOps:
    base = tiles_for(CARD)
    tiles = CardTiles(
        base.capability,
        {256: few} if few else base.few,
        {256: many} if many else base.many,
    )
    return TritonOps(CARD, tiles=tiles, **changes)


class Pool:
    """One random KV tensor that all cases of a shape share."""

    def __init__(self, shape: Shape, num_pages: int, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        size = (num_pages, shape.layers, 2, shape.kv_heads, shape.page, shape.dim)
        self.kv = torch.empty(size, dtype=dtype, device=DEVICE)
        for part in self.kv.split(512):
            part.normal_()

    def attend_us(self, ops: TritonOps, meta: GroupMeta, layers: int | None = None) -> float:
        """One layer's attention, its share of the step's planning included."""
        tokens = int(meta.query_start[-1])
        shape, layers = self.shape, layers or self.shape.layers
        q = torch.randn(tokens, shape.heads, shape.dim, device=DEVICE).to(self.dtype)
        out = torch.empty_like(q)

        def body() -> None:
            step = fresh(meta)
            for layer in range(layers):
                ops.attend(q, self.kv, layer, step, out, shape.dim**-0.5)

        return graph_us(body, layers)


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
    return {
        "1x256": [256],
        "32x1k": [1024] * 32,
        "128x1k": [1024] * 128,
        "W1": w1_contexts(),
        "ragged": [draw.randint(100, 2000) for _ in range(256)],
        "512x300": [300] * 512,
        "8x16k": [16384] * 8,
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


def flops(shape: Shape, rows: list[tuple[int, int]]) -> float:
    pairs = sum(n * c - n * (n - 1) / 2 for n, c in rows)
    return 4.0 * shape.heads * shape.dim * pairs


def few_variants() -> Iterator[Tile]:
    for tokens, warps in ((32, 1), (32, 2), (32, 4), (64, 2), (64, 4), (128, 2), (128, 4)):
        for ahead in (1, 2, 3):
            if tokens * (ahead + 1) <= 400:
                yield Tile(16, tokens, warps, ahead, 1)


def many_variants() -> Iterator[Tile]:
    shapes = ((128, 64, 8), (128, 128, 8), (64, 64, 4), (64, 128, 4), (128, 32, 8), (128, 32, 4))
    for rows, tokens, warps in shapes:
        for ahead in (1, 2):
            if tokens * (ahead + 1) <= 256:
                yield Tile(rows, tokens, warps, ahead, 1)


def time_decode(pool: Pool, tiles: list[Tile], programs: tuple[int, ...]) -> Iterator[dict]:
    shape = pool.shape
    for case, contexts in decode_cases().items():
        meta, _ = make_meta([(1, c) for c in contexts], shape.page)
        read = sum(contexts) * shape.kv_heads * shape.dim * 2 * pool.kv.element_size()
        for tile in tiles:
            for count in programs:
                us = pool.attend_us(ops_with(replace(tile, programs=count)), meta)
                rate = read / us / 1e6
                yield {
                    "op": "decode", "case": case, "shape": asdict(shape), "us": us,
                    "tb_s": rate, "share": rate / READ_TB_S,
                    "tile": asdict(replace(tile, programs=count)),
                }  # fmt: skip


def time_prefill(pool: Pool, tiles: list[Tile], programs: tuple[int, ...]) -> Iterator[dict]:
    shape = pool.shape
    layers = min(2, shape.layers)
    for case, rows in prefill_cases().items():
        meta, _ = make_meta(rows, shape.page)
        for tile in tiles:
            for count in programs:
                ops = ops_with(many=replace(tile, programs=count))
                us = pool.attend_us(ops, meta, layers)
                yield {
                    "op": "prefill", "case": case, "shape": asdict(shape), "us": us,
                    "tflop_s": flops(shape, rows) / us / 1e6,
                    "tile": asdict(replace(tile, programs=count)),
                }  # fmt: skip


def time_torch_prefill(shape: Shape) -> Iterator[dict]:
    """torch's own kernels on dense inputs, for comparison."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for batch in (1, 32):
        q = torch.randn(batch, shape.heads, 4096, shape.dim, device=DEVICE, dtype=torch.bfloat16)
        k, v = (torch.randn_like(q[:, : shape.kv_heads]) for _ in range(2))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    us = graph_us(
                        lambda q=q, k=k, v=v: scaled_dot_product_attention(
                            q, k, v, is_causal=True, enable_gqa=True
                        ),
                        1,
                    )
            except RuntimeError as error:
                print(f"{backend}: {error}")
                continue
            rate = flops(shape, [(4096, 4096)] * batch) / us / 1e6
            yield {"op": "torch", "case": f"{batch}x4096", "us": us, "tflop_s": rate,
                   "tile": str(backend)}  # fmt: skip


def time_rows(shape: Shape, hidden: int, inner: int) -> Iterator[dict]:
    """The small kernels, over several buffers, each with and without early start."""
    copies = 2 if DRY else 16
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    dtype = torch.float32 if DRY else torch.bfloat16
    for count in (1, 3) if DRY else (1, 32, 128, 512, 4096):
        meta, num_pages = make_meta([(1, 17)] * count, shape.page)

        def buffers(*size: int) -> list[Tensor]:
            return [torch.randn(*size, device=DEVICE).to(dtype) for _ in range(copies)]

        x, residual, gates = (
            buffers(count, hidden),
            buffers(count, hidden),
            buffers(count, 2 * inner),
        )
        qkv, norm = buffers(count, width), torch.rand(hidden, device=DEVICE).to(dtype)
        kv = torch.zeros(
            num_pages, 2, 2, shape.kv_heads, shape.page, shape.dim, dtype=dtype, device=DEVICE
        )
        positions = torch.full((count,), 16, device=DEVICE)
        table = torch.rand(32, shape.dim, device=DEVICE)
        weights = torch.rand(2, shape.dim, device=DEVICE).to(dtype)
        vectors = torch.randn(1000, hidden, device=DEVICE).to(dtype)
        ids = torch.randint(0, 1000, (count,), device=DEVICE)
        for early in (False,) if DRY else (False, True):
            ops = ops_with(early=early)
            rope = (positions, table, kv, 1, meta, shape.heads, shape.kv_heads)
            bodies: dict[str, Callable[[int], object]] = {
                "rms_norm": lambda i, o=ops: o.rms_norm(x[i], norm, 1e-5),
                "add_rms_norm": lambda i, o=ops: o.add_rms_norm(x[i], residual[i], norm, 1e-5),
                "silu_mul": lambda i, o=ops: o.silu_mul(gates[i]),
                "rope": lambda i, o=ops, r=rope: o.rope_and_write(qkv[i], *r),
                "norm_rope": lambda i, o=ops, r=rope: o.rope_and_write(qkv[i], *r, *weights),
                "embedding": lambda i, o=ops: o.embedding(ids, vectors),
            }
            for name, body in bodies.items():
                us = graph_us(lambda b=body: [b(i) for i in range(copies)], copies)
                yield {"op": name, "case": f"{count}x{hidden}", "us": us, "tile": f"early={early}"}


def show(rows: list[dict]) -> None:
    for row in rows:
        tile = row["tile"]
        if isinstance(tile, dict):
            tile = " ".join(str(tile[k]) for k in ("rows", "tokens", "warps", "ahead", "programs"))
        rate = f"{row['share']:6.3f}" if "share" in row else f"{row.get('tflop_s', 0):6.0f}"
        print(f"{row['op']:13s} {row['case']:12s} {row['us']:10.2f} us {rate}  {tile}", flush=True)


def best(rows: list[dict], top: int = 3) -> list[dict]:
    """The fastest of each operation and case."""
    found = []
    for key in dict.fromkeys((row["op"], row["case"]) for row in rows):
        same = [row for row in rows if (row["op"], row["case"]) == key]
        found += sorted(same, key=lambda row: row["us"])[:top]
    return found


def robust(rows: list[dict]) -> list[tuple[float, str]]:
    """Variants by their worst time relative to the best, over all cases."""
    fastest = {row["case"]: row["us"] for row in best(rows, 1)}
    worst: dict[str, list[float]] = {}
    for row in rows:
        tile = json.dumps(row["tile"])
        worst.setdefault(tile, []).append(row["us"] / fastest[row["case"]])
    return sorted((sum(v) / len(v), f"{max(v):.3f} {tile}") for tile, v in worst.items())


def compile_share(index: int, count: int) -> None:
    """Fill Triton's cache with every count-th variant, in a process of its own."""
    shape = LLAMA_8B
    pool = Pool(shape, 70, torch.bfloat16)
    few, many = list(few_variants()), list(many_variants())
    jobs = [("few", t) for t in few] + [("many", t) for t in many]
    for kind, tile in jobs[index::count]:
        ops = ops_with(few=tile) if kind == "few" else ops_with(many=tile)
        rows = [(1, 100)] if kind == "few" else [(70, 100)] * 5
        meta, _ = make_meta(rows, shape.page)
        q = torch.zeros(sum(n for n, _ in rows), shape.heads, shape.dim).to(DEVICE, torch.bfloat16)
        ops.attend(q, pool.kv, 0, meta, torch.empty_like(q), 1.0)
    torch.cuda.synchronize()


def compile_all(count: int = 12) -> None:
    command = [sys.executable, __file__, "--out", "/dev/null", "--compile"]
    workers = [subprocess.Popen([*command, f"{i}/{count}"]) for i in range(count)]
    for worker in workers:
        worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="check,decode,prefill,rows")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_share(*map(int, args.compile.split("/")))
        return
    start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"card": asdict(CARD), "torch": torch.__version__}

    def save(name: str, rows: list[dict]) -> list[dict]:
        results[name] = rows
        (args.out / "gpu_ops.json").write_text(json.dumps(results, indent=1))
        print(f"== {name}: {time.time() - start:.0f} s", flush=True)
        return rows

    wanted = args.only.split(",")
    if not DRY and {"decode", "prefill"} & set(wanted):
        compile_all()
        print(f"compiled: {time.time() - start:.0f} s", flush=True)
    ops = TritonOps(CARD)
    failed = []
    if "check" in wanted:
        checks = save("checks", [*row_checks(ops), *attention_checks(ops)])
        failed = [row for row in checks if not row["ok"]]
        for row in failed:
            print("FAILED", row)
        print(f"{len(checks)} checks, {len(failed)} failed", flush=True)
    dtype = torch.float32 if DRY else torch.bfloat16
    pool = None
    if {"decode", "prefill"} & set(wanted):
        pool = Pool(LLAMA_8B, 40 if DRY else 17500, dtype)
    few = [pick(tiles_for(CARD).few, LLAMA_8B.dim, 4)] if DRY else list(few_variants())
    many = [pick(tiles_for(CARD).many, LLAMA_8B.dim, 4)] if DRY else list(many_variants())
    if pool and "decode" in wanted:
        rows = save(
            "decode", list(time_decode(pool, few, (1, 2) if DRY else (1, 2, 3, 4, 6, 8, 12)))
        )
        show(best(rows, 4))
        print(*robust(rows)[:8], sep="\n")
    if pool and "prefill" in wanted:
        rows = save("prefill", list(time_prefill(pool, many, (1,) if DRY else (1, 2, 3, 64))))
        show(best(rows, 4))
        print(*robust(rows)[:8], sep="\n")
        if not DRY:
            show(save("torch", list(time_torch_prefill(LLAMA_8B))))
    del pool
    if "rows" in wanted:
        hidden, inner = (48, 104) if DRY else (4096, 14336)
        show(save("rows", list(time_rows(LLAMA_8B, hidden, inner))))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
