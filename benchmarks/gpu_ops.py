"""Check and time the Triton operations: ``python -m benchmarks.gpu_ops --out DIR [--dry-run]``.

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

import torch

from benchmarks.gpu_cases import (
    CARD,
    DEVICE,
    DRY,
    LLAMA_8B,
    OTHERS,
    Shape,
    fp8_pages,
    make_meta,
)
from benchmarks.gpu_checks import attention_checks, row_checks
from benchmarks.gpu_timing import (
    DTYPE,
    Pool,
    Record,
    ops_with,
    time_decode,
    time_planning,
    time_prefill,
    time_rows,
    time_torch_prefill,
)
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import RowTiles, Tile, tiles_for

FEW = (
    (16, 1, 1), (16, 1, 2), (32, 1, 1), (32, 4, 3), (64, 2, 1), (64, 4, 2),
)  # fmt: skip
MANY = (
    (128, 64, 8, 1, 128), (128, 32, 8, 1, 128), (64, 64, 4, 1, 0), (128, 128, 8, 1, 0),
    (128, 64, 8, 2, 0), (128, 64, 8, 1, 0),
)  # fmt: skip
FEW_FP8 = (
    (64, 1, 1, 168), (64, 2, 1, 128), (64, 2, 2, 128), (64, 4, 1, 128), (128, 2, 1, 168),
)  # fmt: skip
MANY_FP8 = (
    (128, 64, 8, 1, 128), (128, 64, 8, 1, 168), (128, 128, 8, 1, 0), (64, 64, 4, 1, 168),
)  # fmt: skip
IN_FP8 = {"8b fp8": replace(LLAMA_8B, in_fp8=True)} | {
    f"{name} fp8": replace(OTHERS[name], in_fp8=True)
    for name in ("8b page 64", "size 64", "size 256")
    if name in OTHERS
}
ROWS = [
    *((RowTiles(), early) for early in (False, True)),
    *((RowTiles(norm=n, activation=n, embedding=n), True) for n in (512, 2048)),
    *(
        (RowTiles(rope_few=r, rope_many=r), True)
        for r in ((512, 2), (1024, 1), (1024, 2), (2048, 1))
    ),
]


def few_tiles(programs: Iterable[int], in_fp8: bool = False) -> list[Tile]:
    if in_fp8:
        return [Tile(8, *shape, n, registers=r) for *shape, r in FEW_FP8 for n in programs]
    return [Tile(16, *shape, n) for shape in FEW for n in programs]


def many_tiles(programs: Iterable[int], in_fp8: bool = False) -> list[Tile]:
    shapes = MANY_FP8 if in_fp8 else MANY
    return [Tile(*shape, n, registers=r) for *shape, r in shapes for n in programs]


def show(rows: list[Record]) -> None:
    for row in rows:
        tile = row["tile"]
        if isinstance(tile, dict):
            tile = " ".join(f"{name} {value}" for name, value in tile.items())
        rate = f"{row['share']:6.3f}" if "share" in row else f"{row.get('tflop_s', 0):6.0f}"
        print(f"{row['op']:13s} {row['case']:12s} {row['us']:10.2f} us {rate}  {tile}", flush=True)


def best(rows: list[Record], top: int) -> list[Record]:
    """The fastest of each operation and case."""
    found = []
    for key in dict.fromkeys((row["op"], row["case"]) for row in rows):
        same = [row for row in rows if (row["op"], row["case"]) == key]
        found += sorted(same, key=lambda row: row["us"])[:top]
    return found


def robust(rows: list[Record], top: int = 5) -> list[str]:
    """Variants by their mean time relative to the best of each case, and the worst case."""
    fastest = {row["case"]: row["us"] for row in best(rows, 1)}
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(str(row["tile"]), []).append(row["us"] / fastest[row["case"]])
    order = sorted(times, key=lambda tile: sum(times[tile]))
    return [f"{sum(times[t]) / len(times[t]):.3f} {max(times[t]):.3f} {t}" for t in order[:top]]


def jobs_of(only: list[str]) -> Iterator[Callable[[], Iterable[Record]]]:
    """All checks, and the compilation of all variants that will be timed."""
    if "check" in only:
        for early in (False,) if DRY else (False, True):
            ops = TritonOps(CARD, early=early)
            yield lambda ops=ops: row_checks(ops)
            yield from attention_checks(ops)
    if DRY:
        return
    in_fp8 = "fp8" in only
    varied = IN_FP8["8b fp8"] if in_fp8 else LLAMA_8B
    for tile in few_tiles([1], in_fp8) if "decode" in only else ():
        yield lambda t=tile: compile_variant(varied, ops_with(few=t), [(1, 100)])
    for tile in many_tiles([1], in_fp8) if "prefill" in only else ():
        yield lambda t=tile: compile_variant(varied, ops_with(many=t), [(70, 100)] * 99)
    shapes = [LLAMA_8B, *OTHERS.values()] if "committed" in only else []
    for shape in shapes + (list(IN_FP8.values()) if "fp8" in only else []):
        for rows in ([(1, 100)], [(9, 100)], [(70, 100)] * 99):
            yield lambda s=shape, r=rows: compile_variant(s, ops_with(), r)


def compile_variant(shape: Shape, ops: TritonOps, rows: list[tuple[int, int]]) -> Iterable[Record]:
    """Into Triton's cache, on a cache of few pages."""
    meta, num_pages = make_meta(rows, shape.page)
    size = (num_pages, shape.layers, 2, shape.kv_heads, shape.page, shape.dim)
    kv = torch.zeros(size, device=DEVICE, dtype=DTYPE)
    kv = fp8_pages(kv) if shape.in_fp8 else kv
    q = torch.zeros(sum(n for n, _ in rows), shape.heads, shape.dim, device=DEVICE, dtype=DTYPE)
    ops.attend(q, kv, 0, meta, torch.empty_like(q), 1.0)
    torch.cuda.synchronize()
    return ()


def run_jobs(index: int, count: int, only: list[str]) -> list[Record]:
    rows: list[Record] = []
    for number, job in enumerate(jobs_of(only)):
        if number % count == index:
            try:
                rows += job()
            except Exception as error:
                last = str(error).strip().splitlines()[-1:]
                rows.append(
                    {"check": f"job {number}", "ok": False, "error": f"{error!r:.80} {last}"}
                )
    return rows


def prepare(out: Path, only: list[str], count: int = 14) -> list[Record]:
    """The jobs, in parallel processes: the results of the checks."""
    if DRY:
        return run_jobs(0, 1, only)
    command = [sys.executable, "-m", "benchmarks.gpu_ops", "--out", str(out)]
    command += ["--only", ",".join(only), "--part"]
    workers = [subprocess.Popen([*command, f"{i}/{count}"]) for i in range(count)]
    rows: list[Record] = []
    for index, worker in enumerate(workers):
        code = worker.wait()
        path = out / f"part-{index}.json"
        if code:
            rows.append({"check": f"process {index}", "ok": False, "code": code})
        else:
            rows += json.loads(path.read_text())
            path.unlink()
    return rows


class Report:
    """Results, saved after each part."""

    def __init__(self, out: Path) -> None:
        self._path = out / "gpu_ops.json"
        self._start = time.time()
        self._results: dict[str, object] = {"card": asdict(CARD), "torch": torch.__version__}

    def add(self, name: str, rows: Iterable[Record]) -> list[Record]:
        found = list(rows)
        self._results[name] = found
        self._path.write_text(json.dumps(self._results, indent=1))
        print(f"== {name}: {time.time() - self._start:.0f} s", flush=True)
        return found


def time_variants(report: Report, shape: Shape, only: list[str]) -> None:
    pool, kind = Pool(shape), " fp8" * shape.in_fp8
    if "decode" in only:
        programs = (1, 2) if DRY else (4, 6, 8, 12) if shape.in_fp8 else (2, 4, 6, 8)
        rows = time_decode(pool, few_tiles(programs, shape.in_fp8))
        rows = report.add(f"decode{kind}", rows)
        show(best(rows, 3))
        print(*robust(rows), sep="\n")
    if "prefill" in only:
        rows = time_prefill(pool, many_tiles((1,) if DRY else (1, 4, 64), shape.in_fp8))
        rows = report.add(f"prefill{kind}", rows)
        show(best(rows, 3))
        print(*robust(rows), sep="\n")


def time_committed(report: Report, shapes: dict[str, Shape]) -> None:
    for name, shape in shapes.items():
        pool = Pool(shape)
        if shape == LLAMA_8B:
            show(report.add("planning", time_planning(pool)))
            if not DRY:
                show(report.add("late", time_decode(pool, [None], early=False)))
                show(report.add("torch", time_torch_prefill(shape)))
        show(report.add(f"decode {name}", time_decode(pool, [None], name=name)))
        show(report.add(f"prefill {name}", time_prefill(pool, [None], name=name)))
        del pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument(
        "--only",
        default="check,decode,prefill,committed,rows",
        help="some of these parts, or fp8: committed tiles on fp8 pages, and all others where "
        "decode or prefill are among the parts, too",
    )
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    only = args.only.split(",")
    if args.part:
        index, count = map(int, args.part.split("/"))
        rows = run_jobs(index, count, only)
        (args.out / f"part-{index}.json").write_text(json.dumps(rows))
        return
    report = Report(args.out)
    print(f"{CARD}, tiles of capability {tiles_for(CARD).capability}")
    checks = report.add("checks", prepare(args.out, only))
    failed = [row for row in checks if not row["ok"]]
    print(*(f"FAILED {row}" for row in failed), sep="\n")
    print(f"{len(checks)} checks, {len(failed)} failed", flush=True)
    if {"decode", "prefill"} & set(only):
        time_variants(report, IN_FP8["8b fp8"] if "fp8" in only else LLAMA_8B, only)
    if "committed" in only:
        time_committed(report, {"8b": LLAMA_8B, **OTHERS})
    if "fp8" in only:
        time_committed(report, IN_FP8)
    if "rows" in only:
        hidden, inner = (48, 104) if DRY else (4096, 14336)
        rows = report.add("rows", time_rows(hidden, inner, ROWS[:1] if DRY else ROWS))
        show([row for row in rows if row["tile"] == asdict(RowTiles()) | {"early": True}])
        show(best(rows, 2))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
