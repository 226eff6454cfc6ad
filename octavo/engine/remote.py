"""SocketClient: an EngineClient over the engine's Unix socket, for a front process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import EngineUnavailable, ServerError
from octavo.core.plan import AbortReason
from octavo.core.request import Request
from octavo.engine import wire
from octavo.engine.client import EngineInfo, Health
from octavo.engine.streams import DeltaStream, Streams

CONNECT_RETRY_SECONDS = 0.05


class SocketClient:
    """Connects when :meth:`start` is awaited and reads until the engine goes away.

    The engine's death ends every open stream with :class:`EngineUnavailable`; none waits for ever.
    """

    def __init__(self, path: str, front: str) -> None:
        self._path = path
        self._front = front
        self._streams = Streams()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._writer: asyncio.StreamWriter | None = None
        self._info: asyncio.Future[EngineInfo] | None = None
        self._health = Health(False, "starting", "waiting for the engine")
        self._reader_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to connect, in the background."""
        self._info = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read())

    async def ready(self) -> EngineInfo:
        if self._info is None:
            await self.start()
        assert self._info is not None
        return await asyncio.shield(self._info)

    def submit(self, request: Request) -> DeltaStream:
        if not self._health.serving:
            raise EngineUnavailable("No engine is serving; try again shortly.")
        stream = self._streams.open(request.id)
        self._send(wire.Submit(request))
        return stream

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        if self._writer is not None:
            self._send(wire.Abort(request_id, reason))

    def health(self) -> Health:
        return self._health

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        call = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(wire.Control(call, name, dict(args or {})))
            return await future
        finally:
            del self._calls[call]

    async def close(self) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    def _send(self, message: wire.ToEngine) -> None:
        if self._writer is None:
            raise EngineUnavailable("No engine is serving; try again shortly.")
        self._writer.write(wire.encode(message))

    async def _read(self) -> None:
        try:
            reader = await self._connect()
            frames = wire.Frames(wire.ToFront)
            while data := await reader.read(1 << 20):
                for message in frames.feed(data):
                    self._receive(message)
        except Exception as error:  # whatever it was, nobody may wait for this engine any more
            self._lost(f"the connection to the engine broke ({type(error).__name__}: {error})")
        else:
            self._lost("the engine is gone")

    async def _connect(self) -> asyncio.StreamReader:
        """The engine may still be importing: its socket appears in its own time."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(CONNECT_RETRY_SECONDS)
                continue
            writer.write(wire.encode(wire.Hello(self._front)))
            self._writer = writer
            return reader

    def _receive(self, message: wire.ToFront) -> None:
        assert self._info is not None
        if isinstance(message, wire.News):
            self._streams.put_step(message.output)
        elif isinstance(message, wire.Ready):
            self._health = Health(True, "ready")
            if not self._info.done():  # greeted and told at once: the same news twice
                self._info.set_result(message.info)
        elif isinstance(message, wire.Progress):
            self._health = Health(False, "starting", f"{message.stage} {message.share:.0%}")
        else:
            self._answer(message)

    def _answer(self, reply: wire.Reply) -> None:
        future = self._calls.get(reply.call)
        if future is None or future.done():
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(ServerError(reply.error))

    def _lost(self, why: str) -> None:
        self._health = Health(False, "dead", why)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        error = EngineUnavailable(f"The request could not be finished: {why}.")
        self._streams.fail_all(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        assert self._info is not None
        if not self._info.done():
            self._info.set_exception(error)
