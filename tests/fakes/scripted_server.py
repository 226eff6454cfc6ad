"""A server whose every delay is known: it measures the instrument, not a model.

Token i of a request leaves at (arrival + ttft + i × itl), an absolute schedule, so that delays do
not add up; when each really left is recorded. ``python -m tests.fakes.scripted_server`` prints its
port and runs until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 16  # of a request that does not say


@dataclass
class Script:
    """``fail_every`` k: each k-th request gets ``fail_status`` (0: a cut stream)."""

    ttft_s: float = 0.1
    itl_s: float = 0.02
    fail_every: int = 0
    fail_status: int = 500
    takes_ids: bool = True
    requests: int = 0
    sent: list[list[float]] = field(default_factory=list)  # arrival, then when each token left


class Server:
    def __init__(self, script: Script) -> None:
        self._script = script

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                method, path, body = await read_request(reader)
                arrival = time.monotonic()
                if method == "GET":
                    self._get(path, writer)
                elif not await self._generate(path, json.loads(body), arrival, writer):
                    break
                await writer.drain()
        writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        script = self._script
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "scripted", "device": "cpu", "dtype": "float32"}]},
            "/version": {"version": "1.0-scripted"},
            "/times": script.sent,
        }
        if path == "/metrics":
            rows = [
                f'{prefix}:num_preemptions_total{{model_name="scripted"}} {script.requests}.0\n'
                for prefix in ("octavo", "vllm")
            ]
            writer.write(response(200, "".join(rows).encode()))
        elif path in answers:
            writer.write(response(200, json.dumps(answers[path]).encode()))
        else:
            writer.write(response(404, b"{}"))

    async def _generate(
        self, path: str, body: dict[str, Any], arrival: float, writer: asyncio.StreamWriter
    ) -> bool:
        """False if the connection must end."""
        script = self._script
        is_chat = path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        if isinstance(prompt, list) and not script.takes_ids:
            writer.write(error(400, "prompt must be a text."))
            return True
        script.requests += 1
        fails = script.fail_every and script.requests % script.fail_every == 0
        if fails and script.fail_status:
            writer.write(error(script.fail_status, "scripted failure"))
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if is_chat:
            writer.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
        count = body.get("max_tokens", MAX_TOKENS)
        times = [arrival]
        script.sent.append(times)
        for i in range(count):
            if fails and i == count // 2:
                return False
            await asyncio.sleep(arrival + script.ttft_s + i * script.itl_s - time.monotonic())
            if writer.is_closing():  # the client hung up
                return False
            times.append(time.monotonic())
            writer.write(event({"choices": [token_choice(is_chat, i == count - 1)]}))
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": length, "completion_tokens": count}
        writer.write(event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n"))
        writer.write(b"0\r\n\r\n")
        return True


def token_choice(is_chat: bool, is_last: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"delta": {"content": "tick "}} if is_chat else {"text": "tick "}
    return shown | {"index": 0, "finish_reason": "length" if is_last else None}


async def read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.split("\r\n")
    method, path, _ = first.split(" ")
    headers = {key.lower(): value for key, _, value in (line.partition(":") for line in rest)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return method, path, body


def response(status: int, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def error(status: int, message: str) -> bytes:
    return response(status, json.dumps({"error": {"message": message}}).encode())


def event(payload: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(payload).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@contextmanager
def scripted_server(*flags: str) -> Iterator[str]:
    """The URL of a server in a process of its own; ``flags`` as on its command line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.scripted_server", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def sent_times(url: str) -> list[list[float]]:
    """For each request so far: monotonic time of its arrival, then of each token's departure."""
    with urllib.request.urlopen(url + "/times", timeout=10) as answer:
        times: list[list[float]] = json.loads(answer.read())
    return times


async def serve(script: Script) -> None:
    server = await asyncio.start_server(Server(script).handle, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttft", type=float, default=Script.ttft_s, help="seconds")
    parser.add_argument("--itl", type=float, default=Script.itl_s, help="seconds")
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--fail-status", type=int, default=500)
    parser.add_argument("--text-only", action="store_true", help="refuse token ids")
    args = parser.parse_args(argv)
    script = Script(
        args.ttft, args.itl, args.fail_every, args.fail_status, takes_ids=not args.text_only
    )
    gc.disable()  # a collection would be a delay that nobody knows
    asyncio.run(serve(script))


if __name__ == "__main__":
    main()
