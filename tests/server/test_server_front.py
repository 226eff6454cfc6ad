"""serve_front on a real socket: drain, headers, long bodies, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from octavo.server.front import serve_front
from octavo.server.settings import ServerSettings
from tests.fakes.engine import Script
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


class Front:
    """A front under way. ``task`` ends when it does."""

    def __init__(self, served, task: asyncio.Task, port: int) -> None:
        self.served = served
        self.task = task
        self.port = port
        self.url = f"http://127.0.0.1:{port}"


@contextlib.asynccontextmanager
async def running(served, **options) -> AsyncIterator[Front]:
    settings = ServerSettings(("TINY",), **options.pop("settings", {}))
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        task = asyncio.create_task(
            serve_front(
                served.service,
                settings,
                sock,
                log_level="warning",
                access_log=False,
                on_ready=ready.set,
                **options,
            )
        )
        try:
            await asyncio.wait_for(ready.wait(), 10)
            yield Front(served, task, port)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_sigterm_drains(serve):
    served = await serve(Script([107] * 40, delay_s=0.01))
    async with running(served) as front, httpx.AsyncClient(base_url=front.url) as client:

        async def stream() -> str:
            reply = await client.post(CHAT, json=chat(stream=True), timeout=30)
            return reply.text

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        while len(served.engine.open) < 3:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.02)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/live")).status_code == 200
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        for text in await asyncio.gather(*streams):
            assert text.count('"content":"h"') == 40
            assert '"finish_reason":"stop"' in text
            assert text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(front.task, 10)  # returns without an error: exit code 0


async def test_what_outlives_the_drain_is_told(serve):
    served = await serve(Script(stall_at=2))
    async with running(served, shutdown_timeout_s=0.05) as front:
        async with httpx.AsyncClient(base_url=front.url) as client:
            stream = asyncio.create_task(client.post(CHAT, json=chat(stream=True), timeout=30))
            while not served.engine.open:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)
            text = (await stream).text
            assert "shut down" in text
            assert text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(front.task, 10)
    assert served.engine.aborted


async def test_a_second_signal_ends_at_once(serve):
    served = await serve(Script(stall_at=2))
    async with (
        running(served, shutdown_timeout_s=600) as front,
        httpx.AsyncClient(base_url=front.url) as client,
    ):
        stream = asyncio.create_task(client.post(CHAT, json=chat(stream=True), timeout=30))
        while not served.engine.open:
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
        while (await client.get("/ready")).status_code != 503:  # two at once may become one
            await asyncio.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(front.task, 10)
        await asyncio.gather(stream, return_exceptions=True)


async def test_an_ignored_interrupt_stays_ignored(serve):
    served = await serve()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        async with running(served) as front, httpx.AsyncClient(base_url=front.url) as client:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.02)
            assert (await client.get("/ready")).status_code == 200
    finally:
        signal.signal(signal.SIGINT, before)


async def test_a_start_that_fails_ends_the_front(serve, monkeypatch):
    served = await serve(ready=False)

    async def fail() -> None:
        raise RuntimeError("no weights")

    monkeypatch.setattr(served.service, "start", fail)
    with socket.create_server(("127.0.0.1", 0)) as sock, pytest.raises(RuntimeError, match="no w"):
        await serve_front(served.service, ServerSettings(("TINY",)), sock, log_level="warning")


async def test_probes_answer_while_the_engine_starts(serve):
    served = await serve(ready=False)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        front = asyncio.create_task(
            serve_front(served.service, ServerSettings(("TINY",)), sock, log_level="warning")
        )
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/live")).status_code == 200
            assert (await client.get("/health")).status_code == 503
            served.engine.become_ready()
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(front, 10)


async def test_closing_the_socket_aborts(serve):
    served = await serve(Script(delay_s=0.002))
    async with running(served) as front, httpx.AsyncClient(base_url=front.url) as client:
        for _ in range(5):
            body = chat(stream=True, ignore_eos=True, max_tokens=400)
            async with client.stream("POST", CHAT, json=body) as reply:
                async for _ in reply.aiter_lines():
                    break
        while served.engine.open or served.gate.active:
            await asyncio.sleep(0.01)
        assert len(served.engine.aborted) == 5


async def raw(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET /live HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /live?" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"nonsense\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_a_malformed_head_is_a_400_in_the_error_shape(serve, data):
    served = await serve()
    async with running(served) as front:
        head, _, body = (await raw(front.port, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        async with httpx.AsyncClient(base_url=front.url) as client:
            assert (await client.get("/live")).status_code == 200


async def test_a_very_long_text_does_not_hold_up_probes(serve):
    served = await serve()
    async with running(served) as front, httpx.AsyncClient(base_url=front.url) as client:
        longest = 0.0
        body = json.dumps(chat("a " * 13_500_000)).encode()
        headers = {"content-type": "application/json"}
        post = asyncio.create_task(client.post(CHAT, content=body, headers=headers, timeout=60))
        while not post.done():
            started = time.perf_counter()
            assert (await client.get("/health", timeout=60)).status_code == 200
            longest = max(longest, time.perf_counter() - started)
            await asyncio.sleep(0.02)
        assert post.result().status_code == 400
        assert post.result().json()["error"]["code"] == "context_length_exceeded"
        assert longest < 1.0  # the promise made to orchestrators, whose probes time out


async def test_a_body_over_the_limit_on_a_socket(serve):
    served = await serve()
    async with (
        running(served, settings={"max_body_bytes": 1000}) as front,
        httpx.AsyncClient(base_url=front.url) as client,
    ):
        reply = await client.post(CHAT, json=chat("x" * 5000))
        assert reply.status_code == 413

        async def chunked() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 100

        headers = {"content-type": "application/json"}
        reply = await client.post(CHAT, content=chunked(), headers=headers)
        assert reply.status_code == 413
        assert (await client.post(CHAT, json=chat(max_tokens=1))).status_code == 200
        assert (await client.post("/generate", json=prompt())).status_code == 200
