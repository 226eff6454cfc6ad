"""EventStream: server-sent events written straight to ASGI (WHATWG HTML, "Server-sent events")."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ClientGone, as_octavo_error, encode_error, error_response
from octavo.server.gate import Gate

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(Response):
    """Sends each item of ``events`` (complete events, as bytes), then ``[DONE]``.

    The headers go out with the first event, so that an error before it has its own status, as for
    an answer in one piece; a later one becomes an event before ``[DONE]``. When nothing was
    sent for ``keep_alive_s`` seconds (0: never) a comment line, with the headers if need be, keeps
    proxies and clients waiting. When the client hangs up, ``events`` is closed at once.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], gate: Gate, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._events = events
        self._gate = gate
        self._keep_alive_s = keep_alive_s
        self._sent = 0
        self._sent_at_tick = 0
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def write_events() -> None:
            async with aclosing(self._events):
                async for event in self._events:
                    self._sent += 1
                    await write(event)

        async def keep_alive() -> None:
            if self._sent == self._sent_at_tick:
                await write(KEEP_ALIVE)
            self._sent_at_tick = self._sent

        last = DONE
        try:
            await self._gate.run(
                write_events(), receive, tick=keep_alive, tick_s=self._keep_alive_s or None
            )
        except ClientGone:
            return
        except Exception as error:
            told = as_octavo_error(error)
            if not self._begun:
                await error_response(told)(scope, receive, send)
                return
            last = b"data: " + encode_error(told) + b"\n\n" + DONE
        await write(last, more=False)
