"""Sampling on a GPU: ``python -m benchmarks.gpu_sampling --out DIR [--rows …] [--dry-run]``.

Draws of the Triton kernels beside the reference's, on fresh random logits; then microseconds of a
draw in a captured graph. ``flat`` logits are those of random weights, ``peaked`` ones a model's.
``--races`` are warps and most registers of a row's race to compare.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_cases import CARD, DEVICE, DRY
from benchmarks.gpu_timing import graph_us
from octavo.ops.sampling.gpu import RACE, TritonSamplingOps
from octavo.ops.sampling.reference import DrawParams, SamplingOps

VOCABS = (500,) if DRY else (128256, 151936)
ROWS = (3,) if DRY else (1, 16, 128, 256, 512)
SCALES = {"flat": 0.01, "broad": 1.0, "peaked": 4.0}
FEATURES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}


def params(rows: int, values: dict[str, float]) -> DrawParams:
    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((rows,), values.get(name, default), dtype=dtype, device=DEVICE)

    seed = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
    index = torch.randint(0, 4096, (rows,), device=DEVICE)
    return DrawParams(
        column("temperature", 0.6), column("top_k", 0, torch.int64), column("top_p", 1.0),
        column("min_p", 0.0), seed, index,
    )  # fmt: skip


def checks() -> Iterator[dict[str, Any]]:
    """How many of the draws are the reference's."""
    ops, reference = TritonSamplingOps(early=CARD.starts_early), SamplingOps()
    rows = 3 if DRY else 96
    for vocab in VOCABS:
        for kind, scale in SCALES.items():
            for name, values in FEATURES.items():
                logits = torch.randn(rows, vocab, device=DEVICE) * scale
                at = params(rows, values)
                ids, status = ops.draw(logits, at)
                expected, expected_status = reference.draw(logits, at)
                same = int(((ids == expected) & (status == expected_status)).sum())
                yield {"vocab": vocab, "logits": kind, "draw": name, "equal": same, "of": rows}


def timings(rows_of: list[int], races: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for race, vocab, rows in product(races, VOCABS, rows_of):
        ops = TritonSamplingOps(early=CARD.starts_early, race=race)
        for kind, scale in SCALES.items():
            logits = torch.randn(rows, vocab, device=DEVICE) * scale
            for name, values in FEATURES.items():
                at = params(rows, values)
                us = graph_us(lambda ops=ops, at=at, x=logits: ops.draw(x, at), 1)
                yield {
                    "vocab": vocab, "rows": rows, "logits": kind, "draw": name, "race": race,
                    "us": us,
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=json.loads, default=ROWS)
    parser.add_argument("--races", type=json.loads, default=[RACE])
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {"card": CARD.name, "checks": list(checks())}
    wrong = [c for c in report["checks"] if c["equal"] != c["of"]]
    print(f"{len(report['checks'])} checks, {len(wrong)} with differences: {wrong}", flush=True)
    races = [(warps, registers) for warps, registers in args.races]
    report["timings"] = list(timings(args.rows, races))
    for race, name, kind in product(races, FEATURES, SCALES):
        found = [
            f"{t['rows']}: {t['us']:.0f}"
            for t in report["timings"]
            if (t["race"], t["draw"], t["logits"], t["vocab"]) == (race, name, kind, VOCABS[0])
        ]
        print(f"{race!s:8s} {name:22s} {kind:7s} us by rows  {'  '.join(found)}", flush=True)
    (args.out / "gpu_sampling.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
