"""Every Triton operation against float64, on fresh random inputs and poisoned outputs."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import DEVICE, DRY, DTYPES, Shape, fp8_pages, fresh, make_meta
from octavo.ops import fp8
from octavo.ops.api import GroupMeta, Ops
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.fp8 import restored

NAN = float("nan")
HEADS = ((4, 2, 16),)
if not DRY:
    HEADS = (
        (32, 8, 128), (16, 8, 128), (28, 4, 128), (8, 8, 64), (6, 2, 96), (16, 2, 80), (8, 2, 256),
        (32, 1, 64),
    )  # fmt: skip


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
    floor = 3e-6 if dtype is torch.float32 else 0.0
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
    pages = kv
    if shape.in_fp8:
        pages = fp8_pages(kv)
        kv = fp8.dequantize(*fp8.page_views(restored(pages, shape.page), shape.page))
    tokens = sum(count for count, _ in rows)
    q = torch.randn(tokens + 3, shape.heads, shape.dim).to(DEVICE, dtype)
    out = torch.full_like(q, NAN)
    scale = shape.dim**-0.5
    ops.attend(q, pages, 1, meta, out, scale, cap)
    again = torch.full_like(q, NAN)
    ops.attend(q, pages, 1, fresh(meta), again, scale, cap)
    ref, theirs = q.double(), q.clone()
    for begin, end, k, v in dense_rows(kv, 1, meta):
        part = q[begin:end]
        ref[begin:end] = plain_attention(part.double(), k.double(), v.double(), window, scale, cap)
        theirs[begin:end] = plain_attention(part, k.to(dtype), v.to(dtype), window, scale, cap)
    name = f"attend {shape.heads}/{shape.kv_heads}x{shape.dim} page {shape.page}"
    name += f" rows {len(rows)} queries {meta.max_query} window {window} cap {cap:g}"
    name += " fp8" * shape.in_fp8
    result = judge(name, dtype, out[:tokens], theirs[:tokens], ref[:tokens])
    equal = torch.equal(out[:tokens], again[:tokens]) and bool(out[tokens:].isnan().all())
    return result | {"ok": result["ok"] and equal, "bit_equal": equal}


def attention_checks(ops: TritonOps) -> Iterator[Callable[[], Iterable[dict]]]:
    draw = random.Random(time.time_ns())
    most = 90 if DRY else 3000

    def row(queries: int) -> tuple[int, int]:
        count = draw.randint(1, queries)
        return count, count + draw.randint(0, most)

    def ones(n: int) -> list[tuple[int, int]]:
        return [(1, draw.randint(1, most)) for _ in range(n)]

    def mixed(n: int) -> list[tuple[int, int]]:
        return [row(4), (0, 0), *(row(most // 4) for _ in range(n)), *ones(n), row(40)]

    def job(*args: Any) -> Callable[[], Iterable[dict]]:
        return lambda: [check_attention(ops, *args)]

    window = 40 if DRY else 700
    for h, k, d in HEADS:
        for dtype in DTYPES:
            for page in (16, 64) if h in (4, 32) else (32,):
                shape = Shape(h, k, d, 2, page)
                yield job(shape, ones(1), dtype, 0, 0.0)
                yield job(shape, ones(3 if DRY else 60), dtype, 0, 0.0)
                yield job(shape, mixed(2), dtype, 0, 0.0)
                yield job(shape, mixed(2), dtype, window, 5.0)
                yield job(shape, ones(3), dtype, window, 30.0)
                small = replace(shape, in_fp8=True)
                yield job(small, ones(3 if DRY else 60), dtype, 0, 0.0)
                yield job(small, mixed(2), dtype, window, 5.0)
    if not DRY:
        shape = Shape(8, 2, 64, 2)
        yield job(shape, mixed(1), torch.float32, 0, 0.0)
        yield job(shape, ones(9), torch.float32, 100, 0.0)


def row_checks(ops: TritonOps) -> Iterator[dict]:
    for dtype in DTYPES:
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
        yield fp8_write_check(ops, (heads, kv_heads, dim), qkv, (positions, table.float()), meta)


def fp8_write_check(
    ops: TritonOps, shape: tuple[int, int, int], qkv: Tensor, turns: tuple[Tensor, Tensor],
    meta: GroupMeta,
) -> dict:  # fmt: skip
    """What is read back differs from what the reference reads back at most in the last of the 3
    bits of a code, and seldom: a sum that was rounded differently may fall on its other side. The
    last bit of a scale may differ oftener: torch divides by 448 with a product on a GPU."""
    heads, kv_heads, dim = shape
    values = []
    for op, x in ((ops, qkv), (Ops(), qkv.float())):
        kv = torch.full((int(meta.page.max()) + 1, 2, 2, kv_heads, fp8.head_bytes(16, dim)), 255)
        kv = kv.to(DEVICE, torch.uint8)
        op.rope_and_write(x, *turns, kv, 1, meta, heads, kv_heads)
        kv = restored(kv, 16) if op is ops else kv
        values.append(fp8.dequantize(*fp8.page_views(kv, 16))[meta.page, 1, :, :, meta.offset])
    ours, ref = values
    error = ((ours - ref).abs() / ref.abs().clamp_min(ref.abs().amax() * 2**-14)).max().item()
    other = ((ours - ref).abs() > ref.abs() * 2.0**-9).float().mean().item()
    return {
        "check": f"rope {heads}/{kv_heads}x{dim} fp8", "dtype": str(qkv.dtype)[6:], "error": error,
        "other_codes": other, "ok": error <= 0.15 and other <= 0.02,
    }  # fmt: skip


class _Double(Ops):
    """The reference in float64."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def rope_and_write(self, qkv: Tensor, *args: Any) -> Tensor:
        return super().rope_and_write(qkv, *args)
