"""The engine's own thread: drain the inbox, step, tell the fronts; sleep when idle.

The same driver runs behind a socket (``octavo serve``) and behind an event loop in the same process
(``AsyncLLM``): it only knows an inbox and an ``emit`` function.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import AuditError
from octavo.core.plan import AbortReason, Delta, StepOutput
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
    """``emit(front, output)`` is called on the driver's thread and must not block.

    Items of ``inbox``: ``(front, Request)``, ``(front, id, reason)`` to abort, :class:`Call`,
    :class:`Drop`, or None to stop. A step that fails ends the requests of that moment with an
    error; the engine goes on, unless ``MAX_FAILED_STEPS`` fail in a row.
    """

    def __init__(
        self,
        loop: EngineLoop,
        emit: Callable[[str, StepOutput], None],
        status: StatusLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._loop = loop
        self._emit = emit
        self._status = status
        self._clock = clock
        self._front_of: dict[str, str] = {}
        self._num_open: Counter[str] = Counter()  # requests, by front; no entry at 0
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
            output = self._loop.step(now)
        except Exception as error:
            self._fail(error)
            return
        self._failed_steps = 0
        self._deliver(output)
        if self._status is not None:
            self._status.observe(self._loop.stats, now)

    def _fail(self, error: Exception) -> None:
        """End everything that is open, whatever the step got to: nobody waits for ever."""
        self._failed_steps += 1
        log.error("a step failed (%d in a row)", self._failed_steps, exc_info=error)
        message = f"The engine failed while it computed this request ({type(error).__name__})."
        errors = [_error(request_id, "engine_error", message) for request_id in self._front_of]
        self._deliver(StepOutput(deltas=errors))
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
            error = _error(request.id, "duplicate_request_id", message)
            self._emit(front, StepOutput(deltas=[error]))
            return
        self._front_of[request.id] = front
        self._num_open[front] += 1
        delta = self._loop.submit(request, self._clock())
        if delta is not None:
            self._deliver(StepOutput(deltas=[delta]))

    def _abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        delta = self._loop.abort(request_id, self._clock(), reason)
        if delta is not None:
            self._deliver(StepOutput(deltas=[delta]))

    def _drop(self, front: str) -> None:
        for request_id in [r for r, f in self._front_of.items() if f == front]:
            self._loop.abort(request_id, self._clock())
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        front = self._front_of.pop(request_id, None)
        if front is not None:
            self._num_open[front] -= 1
            if not self._num_open[front]:
                del self._num_open[front]

    def _deliver(self, output: StepOutput) -> None:
        """Tell the fronts. With one of them, the common case, nothing is looked at row by row."""
        if len(self._num_open) == 1:
            if output:
                self._emit(next(iter(self._num_open)), output)
        else:
            for front, part in self._by_front(output).items():
                self._emit(front, part)
        for delta in output.deltas:
            if delta.finish is not None:
                self._forget(delta.id)

    def _by_front(self, output: StepOutput) -> dict[str, StepOutput]:
        front_of = self._front_of
        parts = {front: StepOutput() for front in self._num_open}
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            part = parts.get(front_of.get(request_id, ""))
            if part is not None:
                part.request_ids.append(request_id)
                part.tokens.append(token)
        for delta in output.deltas:
            part = parts.get(front_of.get(delta.id, ""))
            if part is not None:
                part.deltas.append(delta)
        return {front: part for front, part in parts.items() if part}

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
            num_pages = scheduler.pool.num_findable
            scheduler.reset_prefix_cache()
            return num_pages
        return self._loop.executor.control(name, args)


def _error(request_id: str, code: str, message: str) -> Delta:
    return Delta(request_id, finish="error", error_code=code, error=message)
