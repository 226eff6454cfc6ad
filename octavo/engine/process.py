"""The engine process: ``python -m octavo.engine.process``, started by the supervisor.

Its orders come on standard input as one JSON line; standard input then stays open, and its end
means that the supervisor is gone. Progress and readiness go to every front over the socket and
to the supervisor as JSON lines on standard output.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from octavo.core.errors import StartupError
from octavo.core.plan import Delta, StepOutput
from octavo.engine import wire
from octavo.engine.children import (
    die_with_parent,
    ignore_interrupts,
    read_orders,
    report,
    set_up_logging,
    settle_garbage,
    watch_parent,
)
from octavo.engine.client import EngineInfo
from octavo.engine.driver import Call, Driver, Drop
from octavo.engine.launch import EngineOrders
from octavo.engine.transport import EngineServer

log = logging.getLogger("octavo.engine")


class EngineProcess:
    """Owns the socket while the engine loads, and connects it to the driver afterwards."""

    def __init__(self, orders: EngineOrders) -> None:
        self._orders = orders
        self._driver: Driver | None = None
        self._greeting: wire.ToFront = wire.Progress("starting", 0.0)
        self._server = EngineServer(
            Path(orders.socket), self._receive, self._gone, lambda: self._greeting
        )

    def run(self) -> None:
        from octavo.engine.build import build_engine
        from octavo.engine.status import StatusLog

        self._server.start()
        loop, info = build_engine(self._orders.config, self._progress)
        status = StatusLog(info.device) if self._orders.config.log_stats else None
        self._driver = Driver(loop, self._emit, status)
        settle_garbage()
        self._announce(info)
        self._driver.run()

    def stop(self) -> None:
        if self._driver is None:
            os._exit(0)
        self._driver.inbox.put(None)

    def _progress(self, stage: str, share: float) -> None:
        self._greeting = wire.Progress(stage, share)
        self._server.broadcast(self._greeting)
        report(kind="progress", stage=stage, share=round(share, 3))

    def _announce(self, info: EngineInfo) -> None:
        self._greeting = wire.Ready(info)
        self._server.broadcast(self._greeting)
        report(kind="ready")

    def _emit(self, front: str, output: StepOutput) -> None:
        self._server.send(front, wire.News(output))

    def _receive(self, front: str, message: Any) -> None:
        if self._driver is None:
            if isinstance(message, wire.Submit):  # no front of ours does this before Ready
                self._emit(front, StepOutput(deltas=[not_ready(message.request.id)]))
            return
        inbox = self._driver.inbox
        if isinstance(message, wire.Submit):
            inbox.put((front, message.request))
        elif isinstance(message, wire.Abort):
            inbox.put((front, message.id, message.reason))
        elif isinstance(message, wire.Control):
            call = message.call

            def reply(value: Any, error: str | None) -> None:
                self._server.send(front, wire.Reply(call, value, error))

            inbox.put(Call(message.name, message.args, reply))

    def _gone(self, front: str) -> None:
        if self._driver is not None:
            self._driver.inbox.put(Drop(front))


def not_ready(request_id: str) -> Delta:
    return Delta(
        request_id,
        finish="error",
        error_code="engine_unavailable",
        error="The engine is still starting.",
    )


def main() -> int:
    die_with_parent()
    ignore_interrupts()
    orders = read_orders(EngineOrders)
    set_up_logging(orders.config.log_level, "engine")
    process = EngineProcess(orders)
    watch_parent(process.stop)
    try:
        process.run()
    except StartupError as error:
        report(kind="failed", error=str(error))
        return 1
    except Exception as error:
        log.exception("the engine failed")
        report(kind="failed", error=f"The engine failed: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
