"""The file of the H200 benchmark: runs, each of one commit on one card, and their rows."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.check import ROOT
from benchmarks.h200_table import ROWS

RESULT = ROOT / "benchmarks" / "results" / "h200.json"
PACKAGES = ("torch", "triton", "numpy", "uvicorn", "tokenizers")
MEASURED = (  # whatever a change to these does to speed, it has not been measured
    "octavo/ops", "octavo/runner", "octavo/models", "octavo/quant",
    ":!octavo/ops/cpu", ":!octavo/ops/sampling/cpu.py",
)  # fmt: skip

Run = dict[str, Any]


class Stale(Exception):
    """The file cannot speak for this checkout; the message says why, and what to do."""


def new_run(commit: str, card: str, command: Sequence[str], *, short: bool = False) -> Run:
    """``short``: its rows say that things run, not how fast."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "card": card,
        "versions": versions,
        "command": list(command),
        "short": short,
        "rows": [],
        "failures": {},
        "seconds": {},
    }


def card_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def head(root: Path = ROOT) -> str:
    """The commit that is checked out. Raises :class:`Stale` outside a repository."""
    return _git(root, "rev-parse", "HEAD")


def read_runs(path: Path) -> list[Run]:
    try:
        runs: list[Run] = json.loads(path.read_text())["runs"]
    except FileNotFoundError:
        raise Stale(
            f"There is no {path.name}: run python -m benchmarks.h200 on an H200, then "
            "python -m benchmarks.h200_doc --add with the file that it writes."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise Stale(f"{path} is not a file of benchmarks.h200.") from None
    return runs


def write_runs(path: Path, runs: Sequence[Run]) -> None:
    """At once: whoever is killed meanwhile leaves the file as it was."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"runs": list(runs)}, indent=1) + "\n")
    part.replace(path)


def latest_rows(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By name, the row of the last whole run that has it, with its commit, date and card."""
    found = {}
    for run in runs:
        if run["short"]:
            continue
        about = {key: run[key] for key in ("commit", "date", "card", "versions")}
        found.update({row["row"]: about | row for row in run["rows"]})
    return found


def require_fresh(commit: str, root: Path = ROOT) -> None:
    """Raises :class:`Stale` unless ``commit`` is an ancestor of what is checked out, and nothing of
    ``MEASURED`` differs from it."""
    try:
        _git(root, "merge-base", "--is-ancestor", commit, "HEAD")
    except Stale:
        raise Stale(f"{commit[:12]} was measured, which is no ancestor of this checkout.") from None
    changed = _git(root, "diff", "--name-only", commit, "--", *MEASURED).splitlines()
    if changed:
        raise Stale(
            f"{commit[:12]} was measured, and {changed[0]} has changed since "
            f"({len(changed)} of the files that decide the speed): measure again."
        )


def _git(root: Path, *args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Stale(f"git {args[0]} failed in {root}: {error}.") from None
    return done.stdout.strip()


class Session:
    """One process's share of a run: which rows it measures, until when, and where they go.

    The file is written after every repetition. A row that fails is noted, and the next one begins.
    """

    def __init__(
        self,
        path: Path,
        wanted: Sequence[str],
        deadline: float,
        *,
        tiny: bool = False,
        short: bool = False,
    ) -> None:
        """``deadline``: Unix time after which no repetition starts. ``tiny``: the dry run.
        ``short``: one repetition each, of less load where a server is measured."""
        self.path = path
        self._wanted = frozenset(wanted)
        self._deadline = deadline
        self.tiny = tiny
        self.short = short
        self.device = "cpu" if tiny else "cuda"

    def wants(self, *rows: str) -> bool:
        return not self._wanted.isdisjoint(rows)

    def repeat(self, row: str, measure: Callable[[], float], **notes: Any) -> list[float]:
        """As many repetitions as the row asks for, or as there is time for; at least one."""
        raw: list[float] = []
        if not self.wants(row):
            return raw
        with self.guard(row):
            took, most = 0.0, 1 if self.short else ROWS[row].reps
            while len(raw) < most and (not raw or self.left_s > took):
                start = time.time()
                raw.append(measure())
                took = time.time() - start
                self.put(row, raw, **notes)
        return raw

    def put(self, row: str, raw: Sequence[float], **notes: Any) -> None:
        """The row's value is the median of ``raw``."""
        unit = ROWS[row].unit if row in ROWS else notes.pop("unit")
        entry = {"row": row, "value": statistics.median(raw), "unit": unit, "raw": list(raw)}
        with self._run() as run:
            run["rows"] = [kept for kept in run["rows"] if kept["row"] != row] + [entry | notes]
        print(f"{row}: {entry['value']:.6g} {unit}", [round(v, 4) for v in raw], notes, flush=True)

    def note_seconds(self, part: str, seconds: float) -> None:
        with self._run() as run:
            run["seconds"][part] = round(seconds, 1)

    @contextmanager
    def guard(self, row: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            with self._run() as run:
                run["failures"][row] = f"{type(error).__name__}: {error}"[:2000]

    @property
    def left_s(self) -> float:
        return self._deadline - time.time()

    @contextmanager
    def _run(self) -> Iterator[Run]:
        """The last run of the file, written back."""
        runs = read_runs(self.path)
        yield runs[-1]
        write_runs(self.path, runs)
