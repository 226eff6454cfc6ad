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
from octavo.core.scheduler import Scheduler, SchedulerStats
from octavo.distributed.executor import Executor

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
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._under_way = 0
        self._torn = False  # a call is under way, or was cut short

    @property
    def has_work(self) -> bool:
        return self._under_way > 0 or self.scheduler.has_work

    def submit(self, request: Request, now: float) -> Delta | None:
        """Take a request; its last delta at once if there is nothing to compute."""
        return self._whole(partial(self.scheduler.submit, request, now))

    def abort(self, request_id: str, now: float, reason: AbortReason = "abort") -> Delta | None:
        return self._whole(partial(self.scheduler.abort, request_id, now, reason=reason))

    def step(self, now: float) -> StepOutput:
        """Start as many plans as the executor takes, then finish the oldest one."""
        return self._whole(partial(self._step, now))

    def mend(self) -> None:
        """Start afresh if the last call was cut short."""
        if self._torn:
            self.executor.reset()
            self.scheduler.forget_all()
            self._under_way = 0
            self._torn = False

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def close(self) -> None:
        self.executor.close()

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
        while self._under_way < self.executor.depth:
            plan = self.scheduler.plan(now)
            if plan.is_empty:
                break
            self.executor.submit(plan)
            self._under_way += 1
        output = StepOutput()
        if self._under_way:
            result = self.executor.result()
            self._under_way -= 1
            output = self.scheduler.apply(result, self._clock())
        output.deltas += late
        return output
