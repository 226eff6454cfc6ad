"""serve_front: uvicorn on a socket that is already bound, and a shutdown that loses no work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.core.errors import InvalidRequest
from octavo.engine.service import Service
from octavo.server.app import build_app
from octavo.server.errors import encode_error
from octavo.server.gate import Gate
from octavo.server.settings import ServerSettings

log = logging.getLogger("octavo.server")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_HEADER_BYTES = 64 * 1024  # request line and headers together
KEEP_ALIVE_CONNECTION_S = 75  # longer than the pools of usual clients and proxies wait
CUT_OFF_GRACE_S = 2.0  # for the error events of requests that outlived the drain


class Protocol(HttpToolsProtocol):
    """uvicorn's parser with a bound on headers, and its own errors in the body shape of all."""

    _header_bytes = 0

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        body = encode_error(InvalidRequest(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("headers too large")  # the parser turns it into a 400


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are :func:`serve_front`'s: uvicorn would stop listening at once."""
        yield


async def serve_front(
    service: Service,
    settings: ServerSettings,
    sock: socket.socket,
    *,
    shutdown_timeout_s: float = 30.0,
    log_level: str = "info",
    access_log: bool = True,
    on_ready: Callable[[], None] | None = None,
) -> None:
    """Serve on ``sock`` until SIGTERM or SIGINT; the engine starts while probes are answered.

    On the first signal /ready and new requests get 503 while those under way complete, up to
    ``shutdown_timeout_s``; what is left then ends with an error event. A second signal ends all
    at once. Raises what ``service.start()`` raises.
    """
    gate = Gate(settings.max_concurrent_requests, settings.max_waiting_requests)
    server = _Server(
        uvicorn.Config(
            build_app(service, settings, gate),
            http=Protocol,
            ws="none",
            lifespan="off",
            log_level=log_level,
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_CONNECTION_S,
            timeout_graceful_shutdown=round(CUT_OFF_GRACE_S),
        )
    )
    shutdown = Shutdown(server, gate, shutdown_timeout_s)
    with _signals(shutdown):
        serving = asyncio.create_task(server.serve([sock]))
        starting = asyncio.create_task(service.start())
        try:
            await asyncio.wait((serving, starting), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                if on_ready is not None:
                    on_ready()
            await serving
        finally:
            starting.cancel()
            server.should_exit = True
            await asyncio.gather(serving, starting, return_exceptions=True)


class Shutdown:
    """What signals do: the first drains, the second ends."""

    def __init__(self, server: uvicorn.Server, gate: Gate, timeout_s: float) -> None:
        self._server = server
        self._gate = gate
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self) -> None:
        if self._draining is None:
            log.info("Shutting down: %d requests under way.", self._gate.active)
            self._gate.draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._gate.cut_off()
            self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        if not await self._gate.wait_idle(self._timeout_s):
            log.warning("%d requests did not end within %g s.", self._gate.active, self._timeout_s)
            self._gate.cut_off()
            await self._gate.wait_idle(CUT_OFF_GRACE_S)
        self._server.should_exit = True


@contextlib.contextmanager
def _signals(shutdown: Shutdown) -> Iterator[None]:
    """A signal that is ignored stays ignored: the parent process then speaks for the terminal."""
    loop = asyncio.get_running_loop()
    handled = [n for n in SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, shutdown.on_signal)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
