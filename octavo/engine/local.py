"""LocalClient: an EngineClient over an engine in this process, stepping on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import EngineUnavailable, ServerError
from octavo.core.plan import AbortReason, StepOutput
from octavo.core.request import Request
from octavo.engine.client import EngineInfo, Health
from octavo.engine.driver import Call, Driver
from octavo.engine.loop import EngineLoop
from octavo.engine.status import StatusLog
from octavo.engine.streams import DeltaStream, Streams

_FRONT = "local"


class LocalClient:
    """``build()`` runs on the engine's thread, so that a load does not hold up the event loop."""

    def __init__(
        self, build: Callable[[], tuple[EngineLoop, EngineInfo]], status: StatusLog | None = None
    ) -> None:
        self._build = build
        self._status = status
        self._streams = Streams()
        self._driver: Driver | None = None
        self._info: asyncio.Future[EngineInfo] | None = None
        self._health = Health(False, "starting")
        self._thread: threading.Thread | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self._closing = False

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._info = self._event_loop.create_future()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def ready(self) -> EngineInfo:
        if self._info is None:
            await self.start()
        assert self._info is not None
        return await asyncio.shield(self._info)

    def submit(self, request: Request) -> DeltaStream:
        driver = self._serving()
        stream = self._streams.open(request.id)
        driver.inbox.put((_FRONT, request))
        return stream

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        if self._driver is not None:
            self._driver.inbox.put((_FRONT, request_id, reason))

    def health(self) -> Health:
        return self._health

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        future = self._event_loop.create_future()

        def settle(value: Any, error: str | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(ServerError(error))

        def reply(value: Any, error: str | None) -> None:
            self._event_loop.call_soon_threadsafe(settle, value, error)

        self._serving().inbox.put(Call(name, args or {}, reply))
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return await future

    async def close(self) -> None:
        """Stop the engine; while it still loads, as soon as it has loaded."""
        self._closing = True
        if self._driver is not None:
            self._driver.inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _serving(self) -> Driver:
        if self._driver is None or not self._health.serving:
            raise EngineUnavailable("No engine is serving; try again shortly.")
        return self._driver

    def _run(self) -> None:
        tell = self._event_loop.call_soon_threadsafe
        try:
            loop, info = self._build()
            self._driver = Driver(loop, self._emit, self._status)
            if self._closing:
                self._driver.inbox.put(None)
            tell(self._ready, info)
            self._driver.run()
            tell(self._lost, EngineUnavailable("The engine was stopped."))
        except Exception as error:  # whatever ended the engine ends its streams, with its words
            tell(self._lost, error)

    def _emit(self, front: str, output: StepOutput) -> None:
        self._event_loop.call_soon_threadsafe(self._streams.put_step, output)

    def _ready(self, info: EngineInfo) -> None:
        assert self._info is not None
        self._health = Health(True, "ready")
        self._info.set_result(info)

    def _lost(self, error: Exception) -> None:
        assert self._info is not None
        self._health = Health(False, "dead", str(error))
        if not self._info.done():
            self._info.set_exception(error)
        if not isinstance(error, ServerError):
            error = EngineUnavailable(f"The engine stopped: {type(error).__name__}: {error}")
        self._streams.fail_all(error)
        for call in list(self._calls):
            if not call.done():
                call.set_exception(error)
