"""Check and time the Triton operations: ``python benchmarks/gpu_ops.py --out DIR [--dry-run]``.

Every operation is compared with float64 on fresh random inputs and poisoned outputs, and with the
error of torch's own composition in the same type. Timings are of captured graphs, over more
memory than the L2 cache holds; share = KV bytes over time over the card's read bandwidth.
``--dry-run`` does the same on tiny shapes in Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu_cases import (  # isort: skip  (before Triton is imported)
    CARD, DEVICE, DRY, LLAMA_8B, Shape, decode_cases, fresh, make_meta, prefill_cases,
)  # fmt: skip

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_checks import attention_checks, row_checks
from octavo.ops.api import GroupMeta
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import CardTiles, Tile, pick, tiles_for

READ_TB_S = 4.33  # measured on the H200


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


def pages_needed(page: int) -> int:
    decodes = [[(1, c) for c in contexts] for contexts in decode_cases().values()]
    cases = [*decodes, *prefill_cases().values()]
    return 1 + max(sum(-(-context // page) for _, context in rows) for rows in cases)


def flops(shape: Shape, rows: list[tuple[int, int]]) -> float:
    pairs = sum(n * c - n * (n - 1) / 2 for n, c in rows)
    return 4.0 * shape.heads * shape.dim * pairs


def few_variants() -> Iterator[Tile]:
    shapes = (
        (16, 1, 1, 0), (16, 1, 2, 0), (16, 1, 1, 168), (16, 1, 2, 168), (32, 1, 1, 0), (32, 1, 1, 200),
        (32, 1, 1, 168), (32, 2, 1, 128), (32, 2, 2, 128), (64, 2, 1, 0), (64, 2, 1, 200),
        (64, 4, 2, 0), (32, 4, 3, 0), (128, 4, 1, 0),
    )  # fmt: skip
    for tokens, warps, ahead, registers in shapes:
        yield Tile(16, tokens, warps, ahead, 1, registers=registers)


def many_variants() -> Iterator[Tile]:
    shapes = (
        (128, 32, 8, 1, 128), (128, 32, 8, 2, 128), (128, 64, 8, 1, 128), (64, 32, 4, 1, 168),
        (64, 32, 4, 2, 168), (64, 32, 4, 1, 128), (64, 64, 4, 1, 168), (64, 64, 4, 1, 0),
        (128, 32, 4, 1, 0), (128, 64, 8, 2, 0), (128, 128, 8, 1, 0), (128, 64, 4, 1, 0),
    )  # fmt: skip
    for rows, tokens, warps, ahead, registers in shapes:
        yield Tile(rows, tokens, warps, ahead, 1, registers=registers)


def time_decode(
    pool: Pool, tiles: list[Tile], programs: tuple[int, ...], **changes: Any
) -> Iterator[dict]:
    shape = pool.shape
    for case, contexts in decode_cases().items():
        meta, _ = make_meta([(1, c) for c in contexts], shape.page)
        read = sum(contexts) * shape.kv_heads * shape.dim * 2 * pool.kv.element_size()
        for tile in tiles:
            for count in programs:
                us = pool.attend_us(ops_with(replace(tile, programs=count), **changes), meta)
                rate = read / us / 1e6
                yield {
                    "op": "decode", "case": case, "shape": asdict(shape), "us": us,
                    "tb_s": rate, "share": rate / READ_TB_S,
                    "tile": asdict(replace(tile, programs=count)),
                }  # fmt: skip


def time_planning(pool: Pool, tile: Tile) -> Iterator[dict]:
    for case, contexts in decode_cases().items():
        meta, _ = make_meta([(1, c) for c in contexts], pool.shape.page)
        yield {"case": case, "us": pool.attend_us(ops_with(tile), meta, 1)}


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
            tile = " ".join(
                str(tile[k]) for k in ("rows", "tokens", "warps", "ahead", "registers", "programs")
            )
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


def best_tile(rows: list[dict]) -> Tile:
    return Tile(**json.loads(robust(rows)[0][1].split(" ", 1)[1]))


def prepare(index: int, count: int, out: Path, only: str) -> None:
    """Every count-th check, and every count-th variant into Triton's cache."""
    ops = TritonOps(CARD)
    jobs: list[Callable[[], Iterable[dict]]] = []
    if "check" in only:
        jobs += [lambda: row_checks(ops), *attention_checks(ops)]
    for few in few_variants() if "decode" in only else ():
        jobs.append(lambda t=few: compile_variant(ops_with(few=t), [(1, 100)]))
    for many in many_variants() if "prefill" in only else ():
        jobs.append(lambda t=many: compile_variant(ops_with(many=t), [(70, 100)] * 5))
    rows: list[dict] = []
    for number in range(index, len(jobs), count):
        try:
            rows += jobs[number]()
        except Exception as error:
            last = str(error).strip().splitlines()[-1:]
            rows.append({"check": f"job {number}", "ok": False, "error": f"{type(error)} {last}"})
    (out / f"checks-{index}.json").write_text(json.dumps(rows))


def compile_variant(ops: TritonOps, rows: list[tuple[int, int]]) -> Iterable[dict]:
    shape = LLAMA_8B
    meta, num_pages = make_meta(rows, shape.page)
    kv = torch.zeros(
        (num_pages, shape.layers, 2, shape.kv_heads, shape.page, shape.dim), device=DEVICE
    ).to(torch.bfloat16)
    q = torch.zeros(sum(n for n, _ in rows), shape.heads, shape.dim).to(DEVICE, torch.bfloat16)
    ops.attend(q, kv, 0, meta, torch.empty_like(q), 1.0)
    torch.cuda.synchronize()
    return ()


def prepare_all(out: Path, only: str, count: int = 14) -> list[dict]:
    """Checks and compilations in parallel processes: the results of the checks."""
    command = [sys.executable, __file__, "--out", str(out), "--only", only, "--prepare"]
    workers = [subprocess.Popen([*command, f"{i}/{count}"]) for i in range(count)]
    codes = [worker.wait() for worker in workers]
    rows = []
    for index, code in enumerate(codes):
        path = out / f"checks-{index}.json"
        if code == 0:
            rows += json.loads(path.read_text())
            path.unlink()
        else:
            rows.append({"check": f"process {index} of {count}", "ok": False, "code": code})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", default="check,decode,prefill,rows")
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        index, count = map(int, args.prepare.split("/"))
        prepare(index, count, args.out, args.only)
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
    ops = TritonOps(CARD)
    checks = []
    if not DRY:
        checks = save("checks", prepare_all(args.out, args.only))
    elif "check" in wanted:
        jobs = [lambda: row_checks(ops), *attention_checks(ops)]
        checks = save("checks", [row for job in jobs for row in job()])
    failed = [row for row in checks if not row["ok"]]
    print(*(f"FAILED {row}" for row in failed), sep="\n")
    print(f"{len(checks)} checks, {len(failed)} failed", flush=True)
    dtype = torch.float32 if DRY else torch.bfloat16
    pool = None
    if {"decode", "prefill"} & set(wanted):
        pool = Pool(LLAMA_8B, pages_needed(LLAMA_8B.page), dtype)
    few = [pick(tiles_for(CARD).few, LLAMA_8B.dim, 4)] if DRY else list(few_variants())
    many = [pick(tiles_for(CARD).many, LLAMA_8B.dim, 4)] if DRY else list(many_variants())
    if pool and "decode" in wanted:
        rows = save(
            "decode", list(time_decode(pool, few, (1, 2) if DRY else (2, 3, 4, 5, 6, 8, 10, 12)))
        )
        show(best(rows, 4))
        print(*robust(rows)[:8], sep="\n")
        tile = best_tile(rows)
        for row in time_planning(pool, tile):
            print(f"planning, and one layer: {row['case']} {row['us']:.1f} us")
        if not DRY:
            show(save("early", list(time_decode(pool, [tile], (tile.programs,), early=True))))
    if pool and "prefill" in wanted:
        rows = save("prefill", list(time_prefill(pool, many, (1,) if DRY else (1, 2, 3, 4, 64))))
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
