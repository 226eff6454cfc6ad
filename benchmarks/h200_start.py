"""Rows of the H200 benchmark about the start: from the command to the first token."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.first_token import SAID
from benchmarks.h200_results import Session

GRAPHS = re.compile(r"Graphs: .* in ([\d.]+) s, ([\d.]+) GiB")
LOG_LINES = 30
EMPTY, FILLED = "8B first token, empty kernel cache", "8B first token, filled kernel cache"


def start(session: Session) -> None:
    """The empty start fills the cache for those that follow it."""
    if session.wants(EMPTY):
        with session.guard(EMPTY):
            _require_empty(Path(os.environ["TRITON_CACHE_DIR"]))
            seconds, log = first_token(session.tiny)
            session.put(EMPTY, [seconds], log=log.splitlines()[-LOG_LINES:])
    session.repeat(FILLED, lambda: _filled(session))


def _require_empty(cache: Path) -> None:
    if cache.exists() and any(cache.iterdir()):
        raise RuntimeError(f"the kernel cache {cache} holds kernels already")


def _filled(session: Session) -> float:
    seconds, log = first_token(session.tiny)
    if found := GRAPHS.search(log):
        session.put("8B graphs, capture", [float(found[1])])
        session.put("8B graphs, memory", [float(found[2])])
    elif not session.tiny:
        raise RuntimeError(f"the start says nothing of graphs:\n{log}")
    return seconds


def first_token(tiny: bool) -> tuple[float, str]:
    """Seconds from the command to the first token, and what the start logged."""
    command = [sys.executable, "-m", "benchmarks.first_token", "llama3-8b"]
    begin, seconds, lines = time.monotonic(), None, []
    with subprocess.Popen(
        command + ["--tiny"] * tiny,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == SAID and seconds is None:
                seconds = time.monotonic() - begin
            lines.append(line)
            print(line, end="", flush=True)
    if seconds is None:
        raise RuntimeError(f"no first token:\n{''.join(lines[-20:])}")
    return seconds, "".join(lines)
