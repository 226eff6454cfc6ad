"""The step: plan, execute, apply. Everything else is somebody's collaborator.

With an executor of depth d, up to d plans are under way before the oldest is applied. Depth 1 is
the plain loop and the oracle for deeper ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from octavo.core.errors import CallerError
from octavo.core.plan import AbortReason, Delta, StepOutput
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.stats import SchedulerStats
from octavo.distributed.executor import Executor
from octavo.engine.record import Recorder

T = TypeVar("T")


class EngineLoop:
    """Drives one scheduler and one executor; owns no thread. The clock is read once a step.

    A call that does not come to its end (a fault of a worker, Ctrl-C) leaves both in an unknown
    state. The next one starts them afresh: the requests of then are forgotten, new ones are served.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._recorder = recorder
        self._under_way = 0
        self._torn = False  # a call is under way, or was cut short

    @property
    def has_work(self) -> bool:
        return self._under_way > 0 or self.scheduler.has_work

    def submit(self, request: Request, now: float) -> Delta | None:
        """Take a request; its last delta at once if there is nothing to compute."""
        delta = self._whole(partial(self.scheduler.submit, request, now))
        if self._recorder is not None:
            self._recorder.submitted(request, delta, now)
        return delta

    def abort(self, request_id: str, now: float, reason: AbortReason = "abort") -> Delta | None:
        delta = self._whole(partial(self.scheduler.abort, request_id, now, reason=reason))
        if self._recorder is not None and delta is not None:
            self._recorder.told([delta], now)
        return delta

    def step(self, now: float) -> StepOutput:
        """Start as many plans as the executor takes, then finish the oldest one."""
        return self._whole(partial(self._step, now))

    def mend(self) -> None:
        """Start afresh if the last call was cut short."""
        if self._torn:
            self.executor.reset()
            self.scheduler.forget_all()
            if self._recorder is not None:
                self._recorder.forget_all()
            self._under_way = 0
            self._torn = False

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def close(self) -> None:
        self.executor.close()
        if self._recorder is not None:
            self._recorder.close()

    def _whole(self, call: Callable[[], T]) -> T:
        self.mend()
        self._torn = True
        try:
            value = call()
        except CallerError:  # refused before anything was changed
            self._torn = False
            raise
        self._torn = False
        return value

    def _step(self, now: float) -> StepOutput:
        late = self.scheduler.expire(now)
        if self._recorder is not None and late:
            self._recorder.told(late, now)
        while self._under_way < self.executor.depth:
            plan = self.scheduler.plan(now)
            if plan.is_empty:
                break
            if self._recorder is not None:
                self._recorder.planned(plan, now)
            self.executor.submit(plan)
            self._under_way += 1
        output = StepOutput()
        if self._under_way:
            result = self.executor.result()
            self._under_way -= 1
            now = self._clock()
            output = self.scheduler.apply(result, now)
            if self._recorder is not None:
                self._recorder.applied(output, now)
        output.deltas += late
        return output
