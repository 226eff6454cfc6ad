"""A client that speaks ASGI itself: it sees events one by one, and can hang up."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """Strictly: NaN and Infinity are no JSON."""

        def refuse(constant: str) -> None:
            raise ValueError(f"{constant} is not JSON")

        return jsonlib.loads(self.body, parse_constant=refuse)

    @property
    def error(self) -> dict[str, Any]:
        body = self.json()
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        return body["error"]


class Exchange:
    """One request under way. ``parts`` is the body as it is sent, part by part; after a None
    the rest never comes."""

    def __init__(
        self, app: ASGIApp, scope: Mapping[str, Any], parts: Iterable[bytes | None]
    ) -> None:
        self._parts = list(parts)
        self._gone = asyncio.Event()
        self._sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._more = True
        self.task = asyncio.ensure_future(app(dict(scope), self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        part = self._parts.pop(0) if self._parts else None
        if part is not None:
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if not self._gone.is_set():
            self._sent.put_nowait(message)

    async def start(self) -> None:
        message = await self._next()
        assert message["type"] == "http.response.start"
        self.status = message["status"]
        self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}

    async def body_part(self) -> bytes:
        """The next part, b"" at the end."""
        if not self._more:
            return b""
        message = await self._next()
        self._more = message.get("more_body", False)
        return message.get("body", b"")

    async def _next(self) -> Mapping[str, Any]:
        """What the app sends next; its exception if it fails first."""
        waiting = asyncio.ensure_future(self._sent.get())
        await asyncio.wait((waiting, self.task), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done() and self._sent.empty():
            waiting.cancel()
            self.task.result()
            raise AssertionError("the app ended before its answer did")
        return await waiting

    async def blocks(self) -> AsyncIterator[str]:
        """Server-sent events and comments, one at a time, without their empty line."""
        held = ""
        while part := await self.body_part():
            held += part.decode()
            *whole, held = held.split("\n\n")
            for block in whole:
                yield block
        assert held == ""

    async def hang_up(self) -> None:
        """The client goes away; returns when the app has noticed."""
        self._gone.set()
        await asyncio.wait_for(self.task, 5)

    async def finish(self) -> None:
        await asyncio.wait_for(self.task, 5)


class Client:
    def __init__(self, app: ASGIApp, headers: Mapping[str, str] | None = None) -> None:
        self.app = app
        self.headers = dict(headers or {})

    async def open(self, method: str, path: str, json: Any = None, **more: Any) -> Exchange:
        """Send a request; returns when the status and headers are there."""
        exchange = self.begin(method, path, json, **more)
        await exchange.start()
        return exchange

    def begin(
        self,
        method: str,
        path: str,
        json: Any = None,
        *,
        parts: Iterable[bytes | None] | None = None,
        headers: Iterable[tuple[str, str]] = (),
    ) -> Exchange:
        """Send a request, and wait for nothing."""
        if parts is None:
            parts = [b"" if json is None else jsonlib.dumps(json).encode()]
        sent = [("host", "test"), *self.headers.items(), *headers]
        if json is not None:
            sent.append(("content-type", "application/json"))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in sent],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        return Exchange(self.app, scope, parts)

    async def request(self, method: str, path: str, json: Any = None, **more: Any) -> Reply:
        exchange = await self.open(method, path, json, **more)
        body = b""
        while part := await exchange.body_part():
            body += part
        await exchange.finish()
        return Reply(exchange.status, exchange.headers, body)

    async def get(self, path: str, **more: Any) -> Reply:
        return await self.request("GET", path, **more)

    async def post(self, path: str, json: Any = None, **more: Any) -> Reply:
        return await self.request("POST", path, json, **more)

    async def stream(self, path: str, json: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, ``[DONE]`` checked and left out."""
        exchange = await self.open("POST", path, {**json, "stream": True})
        assert exchange.status == 200, (await exchange.body_part()).decode()
        blocks = [block async for block in exchange.blocks()]
        await exchange.finish()
        assert blocks.pop() == "data: [DONE]"
        assert all(block.startswith("data: ") for block in blocks)
        return [Reply(200, {}, block[6:].encode()).json() for block in blocks]
