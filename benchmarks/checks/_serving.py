"""A server for a check: started by a command, waited for, stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

READY = re.compile(r"Octavo is ready on (\S+) \(([\d.]+) s\)")


class Server:
    """``with Server(command) as server``: ready when the block begins.

    ``url`` and ``ready_s`` are what the server printed; ``wait_s`` is the time from the command to
    that line, installation included. RuntimeError with the output if it does not get there.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        limit_s: float = 600.0,
    ) -> None:
        self._command = list(command)
        self._cwd, self._env, self._limit_s = cwd, env, limit_s
        self.url = ""
        self.ready_s = self.wait_s = 0.0

    def __enter__(self) -> Server:
        start = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=None if self._env is None else dict(self._env),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if found := READY.search(line):
                self.wait_s = time.monotonic() - start
                self.url, self.ready_s = found[1], float(found[2])
                return self
            if time.monotonic() - start > self._limit_s:
                break
        self._process.kill()
        raise RuntimeError(f"{' '.join(self._command)} did not get ready:\n{''.join(lines)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
