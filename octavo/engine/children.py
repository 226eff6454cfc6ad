"""Manners of a child process: die with the parent, leave Ctrl-C to it, report in JSON lines."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

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


def read_orders(kind: type[T]) -> T:
    """The launch orders: one JSON line, read unbuffered: the watcher reads on from there."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            raise SystemExit(1)  # the supervisor died first
        line += piece
    return msgspec.json.decode(line, type=kind)


def watch_parent(gone: Callable[[], None]) -> None:
    """Call ``gone`` on a thread of its own when standard input ends: the supervisor closed it to
    stop us, or died."""

    def wait() -> None:
        while os.read(0, 1 << 10):
            pass
        gone()

    threading.Thread(target=wait, name="octavo-parent", daemon=True).start()


def ignore_interrupts() -> None:
    """Ctrl-C reaches the whole process group; only the supervisor acts on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def settle_garbage() -> None:
    """Everything loaded so far stays for ever: keep the collector from walking it again and again,
    and let it run less often (a step makes many short-lived objects and no cycles)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


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
