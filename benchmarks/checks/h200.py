"""Is Octavo as fast on an H200 as asked for? Judges what ``python -m benchmarks.h200`` measured.

The file must speak for this checkout: of a commit before it, with nothing changed since that
decides the speed, and with all repetitions of each row.
"""

from __future__ import annotations

import math
from pathlib import Path

from benchmarks.check import ROOT, Check
from benchmarks.h200_results import RESULT, Stale, latest_rows, read_runs, require_fresh
from benchmarks.h200_table import ROWS

MEASURES = False


def run(check: Check, path: Path = RESULT, root: Path = ROOT) -> None:
    try:
        rows = latest_rows(read_runs(path))
    except Stale as reason:
        print(reason, flush=True)
        check.line("results", 0, "==", 1)
        return
    try:
        for commit in sorted({row["commit"] for row in rows.values()}):
            require_fresh(commit, root)
    except Stale as reason:  # and yet the reader wants to know how far the rows were
        print(reason, flush=True)
        check.line("results of this checkout", 0, "==", 1)
    for row in ROWS.values():
        found = rows.get(row.name, {"value": math.nan, "raw": []})
        check.line(row.name, found["value"], row.op, row.bound, found["raw"])
        if len(found["raw"]) < row.reps:
            check.line(f"{row.name}, repetitions", len(found["raw"]), ">=", row.reps)
