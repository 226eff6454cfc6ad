"""The supervisor: starts the engine and the fronts, watches them, and ends with them.

It knows neither torch nor HTTP. Children get their orders on standard input, report on standard
output in JSON lines, and die when it dies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from octavo.config.resolve import Config
from octavo.core.errors import StartupError
from octavo.engine.children import set_up_logging
from octavo.engine.launch import EngineOrders, FrontOrders

log = logging.getLogger("octavo.supervisor")

LISTEN_BACKLOG = 2048
STOP_SECONDS = 5.0
RUN_PREFIX = "octavo-run-"  # and the supervisor's process id: folders of the dead can be told


def listen(host: str, port: int) -> socket.socket:
    """Take the port before anything slow happens; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartupError(
            f"Cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host."
        ) from None
    sock.listen(LISTEN_BACKLOG)
    return sock


def remove_stale_folders() -> None:
    """Clean up after supervisors that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{RUN_PREFIX}*"):
        pid = folder.name.removeprefix(RUN_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


class Child:
    """One child process: its name, its orders, and what it reports."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.failure: str | None = None

    @classmethod
    async def start(
        cls, name: str, module: str, orders: msgspec.Struct, fds: tuple[int, ...] = ()
    ) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=fds,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        return cls(name, process)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def reports(self, take: Callable[[Child, dict[str, Any]], None]) -> None:
        """Hand over each report until the child closes its output; pass other lines through."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            try:
                fields = json.loads(line)
            except ValueError:
                fields = None
            if isinstance(fields, dict) and "kind" in fields:
                take(self, fields)
            else:
                sys.stderr.write(line.decode(errors="replace"))

    def signal(self, number: int) -> None:
        if self.running:
            self.process.send_signal(number)

    def close_orders(self) -> None:
        """End of standard input asks the engine to stop."""
        if self.process.stdin is not None:
            self.process.stdin.close()

    def epitaph(self) -> str:
        if self.failure:
            return self.failure
        code = self.process.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"The {self.name} process died ({how}); its last messages are above."


class Supervisor:
    """Runs one engine and one front until a signal, or until one of them dies."""

    def __init__(self, config: Config, front_module: str, started: float) -> None:
        self._config = config
        self._front_module = front_module
        self._started = started
        self._stage = ("", -1)
        self._children: list[Child] = []
        self._signals = 0
        self._draining = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        run_dir = tempfile.mkdtemp(prefix=f"{RUN_PREFIX}{os.getpid()}-")
        try:
            return await self._serve(Path(run_dir))
        finally:
            for child in self._children:
                child.signal(signal.SIGKILL)
            shutil.rmtree(run_dir, ignore_errors=True)

    async def _serve(self, run_dir: Path) -> int:
        config = self._config
        with listen(config.host, config.port) as sock:
            self._port = sock.getsockname()[1]
            path = str(run_dir / "engine-0.sock")
            without_keys = dataclasses.replace(config, api_key=())  # no business of the engine's
            engine = await Child.start(
                "engine", "octavo.engine.process", EngineOrders(without_keys, path)
            )
            self._children.append(engine)
            front = await Child.start(
                "front", self._front_module,
                FrontOrders(config, "front-0", path, sock.fileno()), (sock.fileno(),),
            )  # fmt: skip
            self._children.append(front)
        watchers = [asyncio.create_task(self._watch(child)) for child in self._children]
        draining = asyncio.create_task(self._draining.wait())
        await asyncio.wait([*watchers, draining], return_when=asyncio.FIRST_COMPLETED)
        if self._draining.is_set():
            return await self._drain(front, engine)
        return await self._mourn(watchers, front, engine)

    async def _watch(self, child: Child) -> None:
        await child.reports(self._on_report)
        await child.process.wait()

    async def _drain(self, front: Child, engine: Child) -> int:
        """The front finishes what it has, within its own limit; then the engine stops."""
        log.info("shutting down: open requests may finish (again to stop at once)")
        front.signal(signal.SIGTERM)
        await front.process.wait()
        await self._stop(engine, engine.close_orders)
        return 0

    async def _mourn(self, watchers: list[asyncio.Task[None]], front: Child, engine: Child) -> int:
        """A child died by itself: let the other one end its streams with an error, then go."""
        dead = engine if watchers[0].done() else front
        if dead is engine:
            await self._stop(front, lambda: front.signal(signal.SIGTERM))
        else:
            await self._stop(engine, engine.close_orders)
        print(f"octavo: {dead.epitaph()}", file=sys.stderr)
        return 1

    async def _stop(self, child: Child, ask: Callable[[], None]) -> None:
        ask()
        try:
            await asyncio.wait_for(child.process.wait(), STOP_SECONDS)
        except TimeoutError:
            child.signal(signal.SIGKILL)
            await child.process.wait()

    def _on_signal(self) -> None:
        """First: drain. Second: the front ends its streams with an error. Third: kill."""
        self._signals += 1
        self._draining.set()
        for child in self._children:
            if self._signals == 2 and child.name == "front":
                child.signal(signal.SIGTERM)
            elif self._signals > 2:
                child.signal(signal.SIGKILL)

    def _on_report(self, child: Child, fields: dict[str, Any]) -> None:
        if fields["kind"] == "progress":
            self._show_progress(str(fields["stage"]), float(fields["share"]))
        elif fields["kind"] == "failed":
            child.failure = str(fields["error"])
        elif fields["kind"] == "ready" and child.name == "front":
            self._announce(chats=bool(fields["chats"]))

    def _show_progress(self, stage: str, share: float) -> None:
        """A line when the stage changes, and one for each fifth of a long stage."""
        mark = (stage, int(share * 5))
        if mark != self._stage and (stage != self._stage[0] or share < 1):
            log.info("%s%s", stage, f" ({share:.0%})" if 0 < share < 1 else "")
        self._stage = mark

    def _announce(self, *, chats: bool) -> None:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        url = f"http://{host}:{self._port}"
        print(f"Octavo is ready on {url} ({time.time() - self._started:.1f} s)")
        print(f"Try:  {example_call(url, chats=chats)}", flush=True)


def example_call(url: str, *, chats: bool) -> str:
    """A command that this server answers; base models have no chat template."""
    verb, body = "completions", '{"prompt": "The capital of France is", "max_tokens": 16}'
    if chats:
        verb = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return f"curl {url}/v1/{verb} -H 'Content-Type: application/json' -d '{body}'"


def run_supervisor(config: Config, front_module: str, started: float) -> int:
    """Serve until stopped. Returns the exit code; raises :class:`StartupError`."""
    set_up_logging(config.log_level, "supervisor")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    remove_stale_folders()
    return asyncio.run(Supervisor(config, front_module, started).run())
