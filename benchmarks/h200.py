"""The whole table on one H200, in one or two calls.

    python -m benchmarks.h200 --out DIR [--rows NAME …] [--budget SECONDS] [--short | --dry-run]

Each part of the table is measured in a process of its own, the most valuable first; one that fails
or runs out of time does not take the others along. ``DIR/h200.json`` gets a further run if it is
there already, and is written after every repetition. ``--dry-run``: tiny shapes on a CPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.h200_results import (
    Session,
    Stale,
    card_name,
    head,
    new_run,
    read_runs,
    write_runs,
)
from benchmarks.h200_table import PARTS, ROWS

LEAST_S = 10.0  # a part that has less does not begin
GRACE_S = 15.0  # for a part that is told to stop


def main(argv: Sequence[str] | None = None) -> int:
    args = _read(argv)
    if args.part is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it has started ends with it
        session = Session(args.file, args.rows, args.deadline, tiny=args.dry_run, short=args.short)
        measure_part(args.part, session)
        return 0
    deadline = time.time() + args.budget
    path = args.out / "h200.json"
    runs = read_runs(path) if path.exists() else []
    words = argv if argv is not None else sys.argv[1:]
    told = ["DIR" if word == str(args.out) else word for word in words]
    command = ["python", "-m", "benchmarks.h200", *told]
    runs.append(new_run(args.commit or head(), card_name(), command, short=args.short))
    write_runs(path, runs)
    with tempfile.TemporaryDirectory() as cache:
        env = dict(os.environ)
        parts = parts_of(args.rows)
        if "start" in parts:
            env["TRITON_CACHE_DIR"] = str(Path(cache, "kernels"))
        run_parts(parts, lambda part: _command(part, path, args, deadline), deadline, path, env)
    failures = read_runs(path)[-1]["failures"]
    for row, reason in failures.items():
        print(f"failed: {row}: {reason}", flush=True)
    return 1 if failures else 0


def _read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="folder of h200.json")
    add("--rows", nargs="+", metavar="NAME", default=list(ROWS), help="default: all")
    add("--budget", type=float, default=560.0, metavar="SECONDS", help="default: 560")
    add("--commit", help="what is measured, where there is no repository to ask")
    add("--dry-run", action="store_true", help="tiny shapes on a CPU")
    add("--short", action="store_true", help="one repetition, less load: does all of it run?")
    # Of the process of a part, which this command starts.
    for flag, kind in (("--part", str), ("--file", Path), ("--deadline", float)):
        add(flag, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"There is no row {unknown[0]!r}; there are: {'; '.join(ROWS)}.")
    if "8B W5 over offline" in args.rows:
        args.rows.append("8B W5")
    if args.part is None and (args.out is None or not args.out.is_dir()):
        parser.error("--out must be a folder that exists.")
    return args


def parts_of(rows: Sequence[str]) -> list[str]:
    """The parts that measure ``rows``; W5's share of the offline rate takes two."""
    needed = {ROWS[name].part for name in rows}
    if "8B W5 over offline" in rows:
        needed.add("8B")
    return [part for part in PARTS if part in needed]


def _command(part: str, path: Path, args: argparse.Namespace, deadline: float) -> list[str]:
    return [
        sys.executable, "-m", "benchmarks.h200", "--part", part, "--file", str(path),
        "--deadline", str(deadline), *["--dry-run"] * args.dry_run,
        *["--short"] * args.short, "--rows", *args.rows,
    ]  # fmt: skip


def run_parts(
    parts: Sequence[str],
    command: Callable[[str], list[str]],
    deadline: float,
    path: Path,
    env: dict[str, str],
) -> None:
    """Run ``command(part)`` for each part until ``deadline``; note what came to no good end."""
    session = Session(path, [], deadline)
    for part in parts:
        with session.guard(f"part {part}"):
            if session.left_s < LEAST_S:
                raise TimeoutError("no time left")
            print(f"== {part}, {session.left_s:.0f} s left", flush=True)
            start = time.time()
            code = run_until(command(part), deadline, env)
            session.note_seconds(part, time.time() - start)
            if code != 0:
                raise RuntimeError(f"exit code {code}")


def run_until(command: Sequence[str], deadline: float, env: dict[str, str]) -> int:
    """The exit code. Past ``deadline`` the process is asked to stop, then made to."""
    with subprocess.Popen(command, env=env) as process:
        try:
            return process.wait(max(0.0, deadline - time.time()))
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    raise TimeoutError("out of time")


def measure_part(part: str, session: Session) -> None:
    """In this process. Each part's libraries are imported with it."""
    if part in ("served", "mixed"):
        from benchmarks import h200_served

        measure = {"served": h200_served.served, "mixed": h200_served.mixed}[part]
    elif part == "start":
        from benchmarks.h200_start import start as measure
    else:
        from benchmarks import h200_engine as engine

        measure = {
            "8B": engine.large, "8B fp8": engine.large_fp8, "0.6B": engine.small, "ids": engine.ids,
        }[part]  # fmt: skip
    measure(session)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stale as error:
        sys.exit(f"benchmarks.h200: {error}")
