"""TINY behind the real app: options resolved, engine on its own thread, no sockets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from octavo.config.load import ARGUMENT, load_options
from octavo.core.plan import StepPlan, StepResult
from octavo.engine.build import build_engine
from octavo.engine.client import EngineInfo
from octavo.engine.local import LocalClient
from octavo.engine.loop import EngineLoop
from octavo.engine.service import Service
from octavo.engine.startup import build_text, prepare, request_limits
from octavo.server.app import build_app
from octavo.server.process import server_settings
from tests.fakes.asgi import Client
from tests.fakes.tiny import make_tiny

DEFAULTS = {"kv_cache_tokens": 4096, "cpu_threads": 1, "swap_space": 0}


@dataclass
class Served:
    """``plans`` are those that the model has run; ``pause`` seconds pass before each."""

    client: Client
    loop: EngineLoop
    pause: float = 0.0
    plans: list[StepPlan] = field(default_factory=list)

    async def audit(self, headers: Iterable[tuple[str, str]] = ()) -> dict[str, Any]:
        reply = await self.client.post("/debug/audit", headers=headers)
        assert reply.status == 200, reply.body
        answer: dict[str, Any] = reply.json()
        return answer

    def watch(self) -> None:
        """Note each plan before it is run."""
        worker = self.loop.executor._worker  # type: ignore[attr-defined]
        execute = worker.execute

        def watched(plan: StepPlan) -> StepResult:
            time.sleep(self.pause)
            self.plans.append(plan)
            result: StepResult = execute(plan)
            return result

        worker.execute = watched


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("cases") / "tiny")


@pytest.fixture
async def serve(tiny: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await serve(**options)`` gives a :class:`Served` that is ready."""
    clients: list[LocalClient] = []

    async def make(folder: Path = tiny, *, pause: float = 0.0, **options: Any) -> Served:
        given = {"model": str(folder), "served_model_name": "TINY", **DEFAULTS, **options}
        config = prepare(load_options(given, {}, ARGUMENT))
        loops: list[EngineLoop] = []

        def build() -> tuple[EngineLoop, EngineInfo]:
            loop, info = build_engine(config)
            loops.append(loop)
            return loop, info

        text = build_text(config)
        clients.append(LocalClient(build))
        service = Service(clients[-1], text, request_limits(config, text))
        await service.start()
        app = build_app(service, server_settings(config))
        served = Served(Client(app), loops[0], pause)
        served.watch()
        return served

    yield make
    for client in clients:
        await client.close()
