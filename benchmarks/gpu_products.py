"""Products on a GPU: ``python -m benchmarks.gpu_products --out DIR [--dry-run]``.

``chain`` is microseconds a layer of a few rows: norm, qkv, o, norm, gate and up, gate, down, in a
captured graph over more weights than the L2 holds, by cuBLAS and by the kernel for a few rows.
``product`` is each matrix by cuBLAS, its weight stored either way. ``attend`` is one row's
attention by the fewest tiles a program takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import CARD, DEVICE, DRY, OTHERS, Shape, make_meta
from benchmarks.gpu_timing import DTYPE, Pool, graph_us, ops_with
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import RowTiles, VectorTile, pick, tiles_for

# hidden, qkv, attention's width, gate and up, layers to rotate over
MODELS = {"tiny": (128, 256, 128, 256, 2)} if DRY else {
    "8b": (4096, 6144, 4096, 28672, 5),
    "0.6b": (1024, 4096, 2048, 6144, 28),
}  # fmt: skip
VARIANTS = [VectorTile(count=0), VectorTile()] if DRY else [
    VectorTile(count=0),
    *(
        VectorTile(*shape, count=4)
        for shape in (
            (4, 2048, 512, 4, 4), (4, 4096, 512, 4, 4), (4, 4096, 1024, 4, 4),
            (4, 4096, 2048, 4, 2), (4, 4096, 512, 4, 8), (8, 4096, 512, 8, 4),
            (8, 4096, 1024, 8, 2), (2, 4096, 2048, 4, 2), (8, 2048, 2048, 8, 2),
        )
    ),
]  # fmt: skip
Record = dict[str, Any]


class Layers:
    """Random weights of a model's layers, and one pass through them."""

    def __init__(self, hidden: int, qkv: int, width: int, inner: int, layers: int) -> None:
        self.hidden, self.width = hidden, width
        sizes = ((qkv, hidden), (hidden, width), (inner, hidden), (hidden, inner // 2))
        self.weights = [
            [torch.randn(*size, device=DEVICE).to(DTYPE) * 0.02 for size in sizes]
            for _ in range(layers)
        ]
        self.norm = torch.ones(hidden, device=DEVICE, dtype=DTYPE)

    def run(self, ops: TritonOps, x: Tensor) -> Tensor:
        for qkv, o, gate_up, down in self.weights:
            y = ops.linear(ops.rms_norm(x, self.norm, 1e-5), (qkv, None))
            y = ops.linear(y[:, : self.width].contiguous(), (o, None))
            y = ops.linear(ops.rms_norm(y, self.norm, 1e-5), (gate_up, None))
            x = ops.linear(ops.silu_mul(y), (down, None))
        return x


def chains(counts: tuple[int, ...]) -> Iterator[Record]:
    for name, sizes in MODELS.items():
        layers = Layers(*sizes)
        for count in counts:
            x = torch.randn(count, layers.hidden, device=DEVICE).to(DTYPE)
            for tile in VARIANTS:
                body = partial(layers.run, ops_with(rows=RowTiles(vector=tile)), x)
                us = graph_us(body, len(layers.weights), 7)
                yield {"op": "chain", "model": name, "rows": count, "tile": str(tile), "us": us}
        del layers, body
        if not DRY:
            torch.cuda.empty_cache()


def products() -> Iterator[Record]:
    """Weights as [outputs, inputs], as checkpoints have them, and as [inputs, outputs]."""
    for name, (hidden, qkv, width, inner, _) in MODELS.items():
        matrices = {
            "qkv": (qkv, hidden), "o": (hidden, width), "gate_up": (inner, hidden),
            "down": (hidden, inner // 2),
        }  # fmt: skip
        for matrix, (n, k) in matrices.items():
            copies = max(2, min(24, (256 << 20) // (n * k * 2))) if not DRY else 2
            weights = [torch.randn(n, k, device=DEVICE).to(DTYPE) * 0.02 for _ in range(copies)]
            for layout in ("outputs first", "inputs first"):
                if layout == "inputs first":
                    weights = [w.t().contiguous().t() for w in weights]
                for count in (3,) if DRY else (1, 16, 64, 128, 192, 256, 384, 512, 16384):
                    x = torch.randn(count, k, device=DEVICE).to(DTYPE)
                    taken = weights[: 2 if count > 512 else None]

                    def body(x=x, taken=taken) -> None:
                        for w in taken:
                            torch.nn.functional.linear(x, w)

                    us = graph_us(body, len(taken), 7)
                    yield {
                        "op": "product", "model": name, "matrix": matrix, "rows": count,
                        "layout": layout, "us": us,
                    }  # fmt: skip


def attentions() -> Iterator[Record]:
    shapes = {"tiny": Shape(8, 2, 16, 2)} if DRY else {
        "8b": Shape(32, 8, 128, 8), "0.6b": OTHERS["qwen3 0.6b"],
    }  # fmt: skip
    for name, shape in shapes.items():
        pool = Pool(shape)
        for context in (40,) if DRY else (200, 400, 1000, 4000):
            meta, _ = make_meta([(1, context)], shape.page)
            tile = pick(tiles_for(CARD).plain.few, shape.dim, shape.heads // shape.kv_heads)
            for least in (1, 2, 4, 8, 16):
                for tokens in (tile.tokens,) if DRY else (16, 32, 64):
                    chosen = replace(tile, least=least, tokens=tokens)
                    us = pool.attend_us(ops_with(few=chosen), meta, 2 if DRY else 8)
                    yield {
                        "op": "attend", "model": name, "context": context, "least": least,
                        "tokens": tokens, "us": us,
                    }  # fmt: skip


def show(record: Record) -> Record:
    print("  ".join(f"{v:9.2f}" if isinstance(v, float) else str(v) for v in record.values()))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="chain,attend,product")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    report: list[Record] = []
    jobs = {"chain": lambda: chains((1,)), "product": products, "attend": attentions}
    for name in args.only.split(","):
        report += [show(record) for record in jobs[name]()]
        (args.out / "gpu_products.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
