"""Sends a workload to a server and notes when each token arrives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.tools.bench.http import Connection, Pool
from octavo.tools.bench.sse import Answer, error_message

ERROR_BODY_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests, encoded beforehand, and when each is due, in seconds after the start."""

    base_url: str
    requests: list[bytes]
    due_s: list[float]
    max_concurrency: int | None = None
    timeout_s: float = 3600.0


@dataclass(slots=True)
class Record:
    """What became of one request. Times are of the monotonic clock, in seconds."""

    due_at: float
    sent_at: float = 0.0
    stamps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Outcome:
    """All records of one run. ``cpu_share``: of one core, of the busiest client process."""

    records: list[Record]
    start_at: float
    started: float  # Unix time
    cpu_share: float


def run_load(load: Load, start_at: float, done: Callable[[], object]) -> Outcome:
    """Run in this process, from ``start_at`` (monotonic seconds; may be past) on."""
    with _steady(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(load, max(start_at, time.monotonic()), done))


async def _run(load: Load, start_at: float, done: Callable[[], object]) -> Outcome:
    await asyncio.sleep(start_at - time.monotonic())
    started, cpu = time.time(), time.process_time()
    pool = Pool(load.base_url)
    free = asyncio.Semaphore(load.max_concurrency or len(load.requests) or 1)
    records, tasks = [], []
    for request, due in zip(load.requests, load.due_s, strict=True):
        record = Record(start_at + due)
        records.append(record)
        wait = record.due_at - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        sender = _send(pool, request, record, load.timeout_s)
        tasks.append(asyncio.ensure_future(_within(free, sender, done)))
    await asyncio.gather(*tasks)
    pool.close()
    wall = time.monotonic() - start_at
    return Outcome(records, start_at, started, (time.process_time() - cpu) / max(wall, 1e-9))


async def _within(free: asyncio.Semaphore, sender: Any, done: Callable[[], object]) -> None:
    async with free:
        await sender
    done()


async def _send(pool: Pool, request: bytes, record: Record, timeout_s: float) -> None:
    answer = _Reply()
    try:
        async with asyncio.timeout(timeout_s):
            status = await _exchange(pool, request, record, answer)
        record.error = answer.error_of(status)
    except TimeoutError:
        record.error = f"no end within {timeout_s:g} s"
    except ConnectionRefusedError:
        record.error = "connection refused"
    except OSError as error:  # ConnectionError among them
        record.error = error.strerror or str(error)
    parsed = answer.parsed
    record.stamps = parsed.stamps
    record.prompt_tokens, record.output_tokens = parsed.usage or (0, len(parsed.stamps))


async def _exchange(pool: Pool, request: bytes, record: Record, answer: _Reply) -> int:
    """The status. A kept connection that the server had closed meanwhile is replaced once."""
    while True:
        connection, used = await pool.take()
        answer.connection = connection
        try:
            status = await connection.exchange(request, answer)
            pool.put(connection)
            return status
        except ConnectionError:
            if answer.parsed.finished:  # the end of the body was the end of the connection
                return connection.status
            if not used or connection.status:
                raise
        except BaseException:  # cancelled, or out of time
            connection.close()
            raise
        finally:
            record.sent_at = connection.sent_at


class _Reply:
    """Events of an answer with status 200; of any other, the beginning of its body."""

    def __init__(self) -> None:
        self.parsed = Answer()
        self.connection: Connection | None = None
        self._body = b""

    def feed(self, body: bytes, now: float) -> None:
        if self.connection is not None and self.connection.status == 200:
            self.parsed.feed(body, now)
        elif len(self._body) < ERROR_BODY_BYTES:
            self._body += body

    def error_of(self, status: int) -> str | None:
        if status != 200:
            return f"HTTP {status}{_reason(self._body)}"
        if self.parsed.error is None and not self.parsed.finished:
            return "a stream without an end"
        if self.parsed.error is None and not self.parsed.stamps:
            return "an answer without output"
        return self.parsed.error


def _reason(body: bytes) -> str:
    import msgspec

    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return f": {error_message(error)}"


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """No garbage collection while time is taken."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every system
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
