"""The step: plan, execute, apply. Everything else is somebody's collaborator.

With an executor of depth d, up to d plans are under way before the oldest is applied. Depth 1 is
the plain loop and the oracle for deeper ones.
"""

from __future__ import annotations

from octavo.core.plan import Delta
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler, SchedulerStats
from octavo.distributed.executor import Executor


class EngineLoop:
    """Drives one scheduler and one executor; owns no thread and reads no clock."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._under_way = 0
        self._step = 0

    @property
    def has_work(self) -> bool:
        return self._under_way > 0 or self.scheduler.has_work

    def submit(self, request: Request, now: float) -> Delta | None:
        """Take a request; its last delta at once if there is nothing to compute."""
        return self.scheduler.submit(request, now)

    def abort(self, request_id: str, now: float) -> Delta | None:
        return self.scheduler.abort(request_id, now)

    def step(self, now: float) -> list[Delta]:
        """Start as many plans as the executor takes, then finish the oldest one."""
        while self._under_way < self.executor.depth:
            plan = self.scheduler.plan(now)
            if plan.is_empty:
                break
            self.executor.submit(plan)
            self._under_way += 1
        if not self._under_way:
            return []
        result = self.executor.result()
        self._under_way -= 1
        return self.scheduler.apply(result, now)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def close(self) -> None:
        self.executor.close()
