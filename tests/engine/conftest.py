"""Engines over FakeWorker: real scheduler, real driver, real sockets; no model."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.core.validation import Limits
from octavo.distributed.executor import LocalExecutor
from octavo.engine import wire
from octavo.engine.client import EngineInfo
from octavo.engine.driver import Call, Driver, Drop
from octavo.engine.local import LocalClient
from octavo.engine.loop import EngineLoop
from octavo.engine.remote import SocketClient
from octavo.engine.service import Service
from octavo.engine.transport import EngineServer
from octavo.text.front import TextFront
from octavo.text.tokenizer import load_tokenizer
from tests.fakes.bytetok import write_byte_tokenizer
from tests.fakes.runner import FakeWorker

NUM_PAGES = 129
MAX_MODEL_LEN = 512
INFO = EngineInfo(MAX_MODEL_LEN, NUM_PAGES, 16, 8, "fake", "float32", (NUM_PAGES - 1) * 16)
LIMITS = Limits(vocab_size=512, max_model_len=MAX_MODEL_LEN, page_size=16, eos_ids=(2,))


def make_loop(worker: FakeWorker) -> EngineLoop:
    scheduler = Scheduler(
        pool=PagePool(NUM_PAGES, 16),
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
    )
    return EngineLoop(scheduler, LocalExecutor(worker))


class SocketEngine:
    """An engine behind a real Unix socket, stepping on a thread of this process."""

    def __init__(self, path: Path, worker: FakeWorker) -> None:
        self.path = path
        self.loop = make_loop(worker)
        self.error: Exception | None = None
        self._driver = Driver(self.loop, lambda f, o: self._server.send(f, wire.News(o)))
        self._server = EngineServer(path, self._receive, self._gone, lambda: wire.Ready(INFO))
        self._server.start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._driver.run()
        except Exception as error:
            self.error = error

    def _receive(self, front: str, message: Any) -> None:
        put: Callable[[Any], None] = self._driver.inbox.put
        if isinstance(message, wire.Submit):
            put((front, message.request))
        elif isinstance(message, wire.Abort):
            put((front, message.id, message.reason))
        elif isinstance(message, wire.Control):
            put(
                Call(
                    message.name,
                    message.args,
                    lambda v, e: self._server.send(front, wire.Reply(message.call, v, e)),
                )
            )

    def _gone(self, front: str) -> None:
        self._driver.inbox.put(Drop(front))

    def stop(self) -> None:
        self._driver.inbox.put(None)
        self._thread.join(10)
        self._server.stop()

    def die(self) -> None:
        """What a front sees of a killed engine: its socket closes."""
        self._server.stop()


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(num_pages=NUM_PAGES, max_num_seqs=8)


@pytest.fixture
def socket_engine(tmp_path: Path, worker: FakeWorker) -> Iterator[SocketEngine]:
    engine = SocketEngine(tmp_path / "e.sock", worker)
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tok") / "bytes", 512)


@pytest.fixture
def text(byte_folder: Path) -> TextFront:
    return TextFront(load_tokenizer(byte_folder), None, max_model_len=MAX_MODEL_LEN)


@pytest.fixture(params=["local", "socket"])
async def service(
    request: pytest.FixtureRequest, tmp_path: Path, worker: FakeWorker, text: TextFront
) -> AsyncIterator[Service]:
    """The same service over both clients."""
    if request.param == "local":
        local = LocalClient(lambda: (make_loop(worker), INFO))
        service = Service(local, text, LIMITS)
        await service.start()
        yield service
        await local.close()
        return
    engine = SocketEngine(tmp_path / "e.sock", worker)
    remote = SocketClient(str(engine.path), "front-0")
    service = Service(remote, text, LIMITS)
    await service.start()
    yield service
    await remote.close()
    engine.stop()
