"""A real ``octavo serve`` in processes of its own, for end-to-end tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

READY = re.compile(r"Octavo is ready on (http://\S+) \(")
START_LIMIT_S = 120.0


class Served:
    """``url`` once it is ready; ``output`` grows; ``children()`` are its processes by name."""

    def __init__(self, *args: str) -> None:
        self.output = ""
        self.url = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "serve", "--port", "0", "--cpu-threads", "1", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: re.Pattern[str] | str, limit_s: float = START_LIMIT_S) -> str:
        """The first match in the output; AssertionError when the server ends or time is up."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if found := re.search(pattern, self.output):
                return found[0]
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    def wait_ready(self) -> str:
        found = READY.search(self.wait_for(READY))
        assert found is not None
        self.url = found[1]
        return self.url

    def wait_exit(self, limit_s: float = 60.0) -> int:
        code = self.process.wait(limit_s)
        self._reader.join(10)
        return code

    def children(self) -> dict[str, int]:
        """Process ids by the name that ``ps`` shows."""
        found = {}
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                fields = dict(
                    line.split(":\t", 1)
                    for line in status.read_text().splitlines()
                    if ":\t" in line
                )
                if int(fields["PPid"]) == self.process.pid:
                    found[fields["Name"]] = int(fields["Pid"])
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def served(*args: str) -> Iterator[Served]:
    server = Served(*args)
    try:
        yield server
    finally:
        server.close()


def alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
