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
from octavo.core.plan import AbortReason, Delta
from octavo.core.request import Request
from octavo.engine.loop import EngineLoop
from octavo.engine.status import StatusLog

IDLE_AUDIT_SECONDS = 1.0
MAX_FAILED_STEPS = 3  # in a row; then the engine is beyond help

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

    Items of ``inbox``: ``(front, Request)``, ``(front, id, reason)`` to abort, :class:`Call`,
    :class:`Drop`, or None to stop. A step that fails ends the requests of that moment with an
    error; the engine goes on, unless ``MAX_FAILED_STEPS`` fail in a row.
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
        self._audit_failures = 0
        self._failed_steps = 0
        self._running = True

    def run(self) -> None:
        """Work until told to stop. Raises what the last of too many failed steps raised."""
        try:
            while self._drain():
                if self._loop.has_work:
                    self._step()
        finally:
            self._loop.close()

    def _step(self) -> None:
        self._audited = False
        now = self._clock()
        try:
            deltas = self._loop.step(now)
        except Exception as error:
            self._fail(error)
            return
        self._failed_steps = 0
        self._deliver(deltas)
        if self._status is not None:
            self._status.observe(self._loop.stats, now)

    def _fail(self, error: Exception) -> None:
        """End everything that is open, whatever the step got to: nobody waits for ever."""
        self._failed_steps += 1
        log.error("a step failed (%d in a row)", self._failed_steps, exc_info=error)
        message = f"The engine failed while it computed this request ({type(error).__name__})."
        self._deliver(
            [_error(request_id, "engine_error", message) for request_id in self._front_of]
        )
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        self._loop.mend()

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
        """Pages and slots must add up whenever nothing runs. If they do not, that is a bug to be
        told, but no reason to stop serving."""
        self._audited = True
        try:
            self._loop.scheduler.audit()
        except AuditError as error:
            if not self._audit_failures:
                log.error("an audit of the idle engine failed: %s", error)
            self._audit_failures += 1
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
            self._abort(*item[1:])

    def _submit(self, front: str, request: Request) -> None:
        if request.id in self._front_of:
            message = f"A request with id {request.id!r} is already running."
            self._emit(front, [_error(request.id, "duplicate_request_id", message)])
            return
        self._front_of[request.id] = front
        delta = self._loop.submit(request, self._clock())
        if delta is not None:
            self._deliver([delta])

    def _abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        delta = self._loop.abort(request_id, self._clock(), reason)
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
        if name in ("stats", "audit"):
            if name == "audit":
                scheduler.audit()
            stats = dataclasses.asdict(self._loop.stats())
            return {**stats, "audit_failures": self._audit_failures}
        if name == "reset_prefix_cache":
            return scheduler.reset_prefix_cache()
        return self._loop.executor.control(name, args)


def _error(request_id: str, code: str, message: str) -> Delta:
    return Delta(request_id, finish="error", error_code=code, error=message)
