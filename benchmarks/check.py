"""``make check NAME=x``: measure one claim and say PASS or FAIL.

``benchmarks/checks/x.py`` has ``run(check: Check) -> None``, which measures and calls
:meth:`Check.line` for each figure. Every line is printed at once; afterwards
``benchmarks/results/x.json`` holds them with commit, command, versions, machine and the raw
repetitions. A check with ``MEASURES = False`` judges what was measured elsewhere and writes no
file. The exit code is 0 only if there was a line and all of them passed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import operator
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.config.facts import read_host_facts
from octavo.version import __version__

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "numpy", "numba", "transformers", "tokenizers", "fastapi", "uvicorn", "openai")
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}


class Check:
    """Collects the figures of one check."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}

    def line(
        self, metric: str, value: Any, op: str, bound: Any, raw: Sequence[Any] | None = None
    ) -> bool:
        """Print and keep "PASS|FAIL name metric value op bound"; NaN passes nothing.

        ``raw`` are the repetitions that ``value`` sums up.
        """
        passed = bool(OPERATORS[op](value, bound))
        verdict = "PASS" if passed else "FAIL"
        print(verdict, self.name, metric, _short(value), op, _short(bound), flush=True)
        entry = {"metric": metric, "value": value, "op": op, "bound": bound, "passed": passed}
        self.lines.append(entry | {"raw": list(raw) if raw is not None else [value]})
        return passed

    def note(self, **facts: Any) -> None:
        """Keep facts that a reader of the results needs (workload, server command, …)."""
        self.notes |= facts

    @property
    def passed(self) -> bool:
        return bool(self.lines) and all(entry["passed"] for entry in self.lines)


def run_check(
    name: str, measure: Callable[[Check], None], command: str, results: Path | None
) -> bool:
    """Measure, write ``results/NAME.json`` (None: no file), and return whether all passed."""
    check = Check(name)
    started, error = time.time(), None
    try:
        measure(check)
    except Exception as failure:  # a check that breaks off has failed, and its lines are kept
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
        print(f"FAIL {name} broke off with {error}", flush=True)
    passed = check.passed and error is None
    if results is None:
        return passed
    report = {
        "name": name,
        "passed": passed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 1),
        "commit": commit(),
        "command": command,
        "versions": versions(),
        "machine": machine(),
        "notes": check.notes,
        "lines": check.lines,
        "error": error,
    }
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False, default=str)
    (results / f"{name}.json").write_text(text + "\n")
    return passed


def commit() -> str:
    """The commit that was measured, with "+changes" if files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", ":!benchmarks/results"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def versions() -> dict[str, str]:
    found = {"octavo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    facts = read_host_facts()
    return {
        "platform": platform.platform(),
        "cpu": facts.cpu_name,
        "cores": facts.cpu_count,
        "isa": sorted(facts.isa & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve"}),
        "memory_gib": round(facts.total_bytes / 2**30, 1),
        "gpus": [gpu.name for gpu in facts.gpus],
        "load": os.getloadavg(),
    }


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make check NAME=…", description=__doc__)
    parser.add_argument("name", help="a module in benchmarks/checks")
    name = parser.parse_args(argv).name
    known = sorted(path.stem for path in (ROOT / "benchmarks" / "checks").glob("[!_]*.py"))
    if not re.fullmatch(r"\w+", name) or name not in known:
        print(f"There is no check {name!r}; there are: {', '.join(known)}.", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.checks.{name}")
    results = RESULTS if getattr(module, "MEASURES", True) else None
    passed = run_check(name, module.run, f"make check NAME={name}", results)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
