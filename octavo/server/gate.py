"""Gate: how many requests wait and how many are under way, and how they end when the server must.

The order is permit, then validation, then scheduling: an overloaded or draining server answers
before it reads a body. A permit lives as long as the answer does, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.errors import EngineUnavailable, OctavoError, Overloaded
from octavo.engine.client import Health
from octavo.server.errors import ClientGone, error_response

T = TypeVar("T")
GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/generate"})


class Gate:
    """Permits, draining, and the work under way.

    ``limit`` bounds the requests under way, ``waiting_limit`` those among them that had no token
    yet; None: as many as come.
    """

    def __init__(self, limit: int | None = None, waiting_limit: int | None = None) -> None:
        self.limit = limit
        self.waiting_limit = waiting_limit
        self.active = 0
        self.waiting = 0
        self.draining = False
        self._work: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check(self, health: Health) -> None:
        """Raise unless a request could be served now."""
        if self.draining:
            raise EngineUnavailable("The server is shutting down.", code="draining")
        if not health.serving:
            detail = f": {health.detail}" if health.detail else ""
            raise EngineUnavailable(
                f"No engine serves at the moment (state: {health.state}{detail}).",
                code="engine_unavailable",
            )

    def enter(self, health: Health) -> Permit:
        self.check(health)
        if self.waiting_limit is not None and self.waiting >= self.waiting_limit:
            raise _overloaded(
                f"As many requests wait for their first token as may ({self.waiting_limit})"
            )
        if self.limit is not None and self.active >= self.limit:
            raise _overloaded(f"As many requests are under way as may be ({self.limit})")
        self.active += 1
        self.waiting += 1
        self._idle.clear()
        return Permit(self)

    def leave(self, permit: Permit) -> None:
        permit.speaks()
        self.active -= 1
        if not self.active:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all permits came back within ``timeout_s``."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def cut_off(self) -> None:
        """End what still runs: each request is told that the server is shutting down."""
        for task in list(self._work):
            task.cancel()

    async def run(
        self,
        work: Coroutine[Any, Any, T],
        receive: Receive,
        *,
        tick: Callable[[], Awaitable[None]] | None = None,
        tick_s: float | None = None,
    ) -> T:
        """Run ``work`` to its end, calling ``tick`` every ``tick_s`` seconds meanwhile.

        Raises :class:`ClientGone` if the client hangs up first, and :class:`EngineUnavailable`
        after :meth:`cut_off`. Either way ``work`` has been cancelled and has cleaned up.
        """
        task = asyncio.create_task(work)
        hang_up = asyncio.create_task(_hang_up(receive))
        self._work.add(task)
        try:
            while not await _any_done(task, hang_up, timeout_s=tick_s):
                if tick is not None:
                    await tick()
            if not task.done():
                raise ClientGone
            if task.cancelled():
                raise EngineUnavailable(
                    "The server shut down before the answer was complete.", code="draining"
                )
            return task.result()
        finally:
            self._work.discard(task)
            task.cancel()
            hang_up.cancel()
            await asyncio.gather(task, hang_up, return_exceptions=True)


class Permit:
    """One request's: it waits until its first token, and is under way until its answer's end."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waits = True

    def speaks(self) -> None:
        """Its first token is here: others may wait now. A second call changes nothing."""
        self._gate.waiting -= self._waits
        self._waits = False


def permit_of(request: Request) -> Permit:
    permit: Permit = request.state.permit
    return permit


class Admission:
    """Pure ASGI: takes a permit for the paths that generate, or answers 429 or 503 at once."""

    def __init__(self, app: ASGIApp, gate: Gate, health: Callable[[], Health]) -> None:
        self.app = app
        self.gate = gate
        self.health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"] not in GENERATING_PATHS
            or scope["method"] != "POST"
        ):
            await self.app(scope, receive, send)
            return
        try:
            permit = self.gate.enter(self.health())
        except OctavoError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["permit"] = permit
        try:
            await self.app(scope, receive, send)
        finally:
            self.gate.leave(permit)


def _overloaded(why: str) -> Overloaded:
    return Overloaded(f"{why}; try again shortly.", code="too_many_requests")


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _any_done(*tasks: asyncio.Task[Any], timeout_s: float | None) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)
