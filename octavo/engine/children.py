"""Manners of a child process: die with the parent, leave Ctrl-C to it, report in JSON lines."""

from __future__ import annotations

import ctypes
import json
import logging
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(name: str = "octavo-engine") -> None:
    """Ask the kernel to kill this process when its parent dies (Linux: prctl(2)), and take a
    name that ``ps`` and ``top`` show. A parent that died before this call, and systems other than
    Linux, are covered by the end of standard input."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; only the supervisor acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def report(**fields: Any) -> None:
    """One JSON line to the supervisor."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def set_up_logging(level: str, role: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        format=f"%(levelname)s %(asctime)s [{role}] %(message)s",
        datefmt="%m-%d %H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
