"""The engine's end of the socket: fronts connect, speak :mod:`octavo.engine.wire`, and go.

All I/O happens on an event loop in a thread of its own, so that neither a slow front nor a
large frame ever holds up a step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import StartupError
from octavo.engine import wire

log = logging.getLogger("octavo.engine")


class EngineServer:
    """Listens on a Unix socket. ``receive(front, message)`` is called on the I/O thread.

    ``greet()`` gives the message a new front gets first (Progress or Ready). A front that sends
    something malformed is disconnected; the others do not notice.
    """

    def __init__(
        self,
        path: Path,
        receive: Callable[[str, Any], None],
        gone: Callable[[str], None],
        greet: Callable[[], wire.ToFront],
    ) -> None:
        self._path = path
        self._receive = receive
        self._gone = gone
        self._greet = greet
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="octavo-engine-io", daemon=True)

    def start(self) -> None:
        """Listen. Raises :class:`StartupError` if the socket cannot be had."""
        self._thread.start()
        try:
            self._started.result()
        except OSError as error:
            raise StartupError(f"Cannot listen on {self._path}: {error}.") from None

    def send(self, front: str, message: wire.ToFront) -> None:
        """From any thread; never blocks. A front that is gone gets nothing."""
        data = wire.encode(message)
        self._loop.call_soon_threadsafe(self._write, front, data)

    def broadcast(self, message: wire.ToFront) -> None:
        data = wire.encode(message)
        self._loop.call_soon_threadsafe(self._write_all, data)

    def stop(self) -> None:
        """Close every connection and end the thread; a second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stopped = asyncio.Event()
        try:
            server = await asyncio.start_unix_server(self._serve, path=str(self._path))
        except OSError as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._stopped.wait()
        server.close()
        for writer in list(self._writers.values()):
            writer.close()
        await asyncio.gather(*self._connections)

    def _write(self, front: str, data: bytes) -> None:
        writer = self._writers.get(front)
        if writer is not None and not writer.is_closing():
            writer.write(data)

    def _write_all(self, data: bytes) -> None:
        for front in list(self._writers):
            self._write(front, data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        frames = wire.Frames(wire.ToEngine)
        front: str | None = None
        try:
            while data := await reader.read(1 << 20):
                for message in frames.feed(data):
                    if isinstance(message, wire.Hello):
                        front = message.front
                        self._writers[front] = writer
                        writer.write(wire.encode(self._greet()))
                    elif front is not None:
                        self._receive(front, message)
        except (ConnectionError, ValueError, msgspec.MsgspecError) as error:
            log.warning("front %s disconnected: %s", front, error)
        finally:
            writer.close()
            if front is not None and self._writers.get(front) is writer:
                del self._writers[front]
                self._gone(front)
