"""Several client processes, where one Python process would be the limit.

Parent and child speak in JSON lines: the child's load, "ready", the common start time, "done" for
each request, and the outcome. The clock is the machine's monotonic one, the same for all.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from octavo.core.errors import StartupError
from octavo.tools.bench.client import Load, Outcome, run_load

START_DELAY_S = 0.05


def run_fleet(load: Load, processes: int, done: Callable[[], object]) -> Outcome:
    """Deal the requests of ``load`` out to ``processes`` client processes."""
    processes = min(processes, len(load.requests), load.max_concurrency or processes)
    if processes <= 1:
        return run_load(load, time.monotonic(), done)
    children = [_Child(part) for part in deal(load, processes)]
    try:
        for child in children:
            child.expect(b"ready")
        start_at = time.monotonic() + START_DELAY_S
        threads = [
            threading.Thread(target=child.run, args=(start_at, done), daemon=True)
            for child in children
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for child in children:
            child.end()
    outcomes = [child.outcome() for child in children]
    return Outcome(
        records=[record for outcome in outcomes for record in outcome.records],
        start_at=start_at,
        started=outcomes[0].started,
        cpu_share=max(outcome.cpu_share for outcome in outcomes),
    )


def deal(load: Load, parts: int) -> list[Load]:
    """Every ``parts``-th request to each; a bound on concurrency is divided as evenly."""
    most = load.max_concurrency
    return [
        replace(
            load,
            requests=load.requests[part::parts],
            due_s=load.due_s[part::parts],
            max_concurrency=None if most is None else (most + parts - 1 - part) // parts,
        )
        for part in range(parts)
    ]


class _Child:
    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.tools.bench.fleet"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._outcome: Outcome | None = None
        self._write(msgspec.json.encode(load))

    def expect(self, word: bytes) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != word:
            raise StartupError("A client process ended before it was ready.")

    def run(self, start_at: float, done: Callable[[], object]) -> None:
        self._write(msgspec.json.encode(start_at))
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == b"done":
                done()
            else:
                self._outcome = msgspec.json.decode(line, type=Outcome)

    def outcome(self) -> Outcome:
        if self._outcome is None:
            raise StartupError("A client process ended before its requests did.")
        return self._outcome

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()


def main() -> int:
    """The child's side."""
    load = msgspec.json.decode(sys.stdin.buffer.readline(), type=Load)
    out = sys.stdout.buffer

    def tell(line: bytes) -> None:
        out.write(line + b"\n")
        out.flush()

    tell(b"ready")
    line = sys.stdin.buffer.readline()
    if line:
        outcome = run_load(load, msgspec.json.decode(line, type=float), lambda: tell(b"done"))
        tell(msgspec.json.encode(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
