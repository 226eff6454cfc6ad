"""A small HTTP/1.1 client that notes the time at the socket's read.

General clients hand a body on through buffers and tasks; under many streams that delays
the time stamps and costs the core that the server may need. This one calls a parser from
``data_received`` and keeps connections open.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import httptools

from octavo.config.load import OptionError


class Sink(Protocol):
    """Takes an answer's body, part by part, with the time at which each part was read."""

    def feed(self, body: bytes, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time. ``sent_at``: when the request was written."""

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.status = 0
        self.reusable = True
        self._transport: Any = None
        self._parser: Any = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send and wait for the whole answer; its status. Raises ConnectionError."""
        self._sink, self.status = sink, 0
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.sent_at = time.monotonic()
        self._transport.write(request)
        await self._done
        return self.status

    def close(self) -> None:
        self.reusable = False
        self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(ConnectionError("an answer that is not HTTP"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(ConnectionError("connection lost"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._sink is not None:
            self._sink.feed(body, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._parser = None
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Pool:
    """Connections to one server, opened when needed and used again."""

    def __init__(self, base_url: str) -> None:
        self._url = split_url(base_url)
        self._idle: list[Connection] = []

    async def take(self) -> tuple[Connection, bool]:
        """A connection, and whether it was used before. Raises OSError."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        url = self._url
        secure = ssl.create_default_context() if url.scheme == "https" else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            Connection, url.hostname or "", port_of(url), ssl=secure
        )
        return connection, False

    def put(self, connection: Connection) -> None:
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def encode_post(base_url: str, path: str, body: bytes, api_key: str | None) -> bytes:
    """The bytes of a POST request with a JSON body."""
    url = split_url(base_url)
    lines = [
        f"POST {url.path.rstrip('/')}{path} HTTP/1.1",
        f"Host: {url.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    if api_key is not None:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def split_url(base_url: str) -> SplitResult:
    """Raises :class:`OptionError` unless it is an http or https URL."""
    url = urlsplit(base_url)
    try:
        usable = url.scheme in ("http", "https") and bool(url.hostname) and port_of(url) > 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise OptionError(f"A server must be given as http://HOST:PORT, not {base_url!r}.")
    return url


def port_of(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
