"""The engine's own thread: drain the inbox, step, tell the fronts; sleep when idle.

The same driver runs behind a socket (``octavo serve``) and behind an event loop in the same process
(``AsyncLLM``): it only knows an inbox and an ``emit`` function.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import AuditError
from octavo.core.plan import Delta
from octavo.core.request import Request
from octavo.engine.loop import EngineLoop
from octavo.engine.status import StatusLog

IDLE_AUDIT_SECONDS = 1.0

log = logging.getLogger("octavo.engine")


@dataclasses.dataclass(slots=True)
class Call:
    """A control verb and where its answer goes: ``reply(value, error)``."""

    name: str
    args: Mapping[str, Any]
    reply: Callable[[Any, str | None], None]


@dataclasses.dataclass(slots=True)
class Drop:
    """A front is gone: end everything it asked for, tell nobody."""

    front: str


class Driver:
    """``emit(front, deltas)`` is called on the driver's thread and must not block.

    Items of ``inbox``: ``(front, Request)``, ``(front, id)`` to abort, :class:`Call`,
    :class:`Drop`, or None to stop.
    """

    def __init__(
        self,
        loop: EngineLoop,
        emit: Callable[[str, list[Delta]], None],
        status: StatusLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop = loop
        self._emit = emit
        self._status = status
        self._clock = clock
        self._front_of: dict[str, str] = {}
        self._audited = True
        self._running = True

    def run(self) -> None:
        """Work until told to stop. An exception of a step ends the engine: the caller sees it."""
        try:
            while self._drain():
                if self._loop.has_work:
                    self._audited = False
                    now = self._clock()
                    self._deliver(self._loop.step(now))
                    if self._status is not None:
                        self._status.observe(self._loop.stats, now)
        finally:
            self._loop.close()

    def _drain(self) -> bool:
        """Take what has arrived; wait for something when there is no work."""
        while self._running:
            try:
                if self._loop.has_work:
                    item = self.inbox.get_nowait()
                else:
                    item = self.inbox.get(timeout=None if self._audited else IDLE_AUDIT_SECONDS)
            except queue.Empty:
                if self._loop.has_work:
                    break
                self._idle()
                continue
            self._take(item)
        return self._running

    def _idle(self) -> None:
        """Pages and slots must add up whenever nothing runs."""
        self._loop.scheduler.audit()
        self._audited = True
        if self._status is not None:
            self._status.idle()

    def _take(self, item: Any) -> None:
        if item is None:
            self._running = False
        elif isinstance(item, Call):
            self._call(item)
        elif isinstance(item, Drop):
            self._drop(item.front)
        elif isinstance(item[1], Request):
            self._submit(*item)
        else:
            self._abort(item[1])

    def _submit(self, front: str, request: Request) -> None:
        if request.id in self._front_of:
            log.error("front %s sent request %s, which is already running", front, request.id)
            return
        self._front_of[request.id] = front
        delta = self._loop.submit(request, self._clock())
        if delta is not None:
            self._deliver([delta])

    def _abort(self, request_id: str) -> None:
        delta = self._loop.abort(request_id, self._clock())
        if delta is not None:
            self._deliver([delta])

    def _drop(self, front: str) -> None:
        for request_id in [r for r, f in self._front_of.items() if f == front]:
            self._loop.abort(request_id, self._clock())
            del self._front_of[request_id]

    def _deliver(self, deltas: list[Delta]) -> None:
        """Sort the step's deltas by front; the only loop over them on this side."""
        by_front: dict[str, list[Delta]] = {}
        for delta in deltas:
            front = self._front_of.get(delta.id)
            if front is None:
                continue
            if delta.finish is not None:
                del self._front_of[delta.id]
            by_front.setdefault(front, []).append(delta)
        for front, items in by_front.items():
            self._emit(front, items)

    def _call(self, call: Call) -> None:
        try:
            call.reply(self._control(call.name, call.args), None)
        except (KeyError, AuditError) as error:
            call.reply(None, f"{type(error).__name__}: {error}")

    def _control(self, name: str, args: Mapping[str, Any]) -> Any:
        scheduler = self._loop.scheduler
        if name == "stats":
            return dataclasses.asdict(self._loop.stats())
        if name == "audit":
            scheduler.audit()
            return dataclasses.asdict(self._loop.stats())
        if name == "reset_prefix_cache":
            return scheduler.reset_prefix_cache()
        return self._loop.executor.control(name, args)
