"""Executors carry a plan to every rank's worker and bring rank 0's result back.

An executor hosts workers; it does not know what a worker does. Plans go in and results come out in
the same order, up to ``depth`` of them under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from octavo.core.plan import StepPlan, StepResult


class Worker(Protocol):
    """One rank: a plan in, a result out. Only rank 0's result counts."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        """An administrative verb; an unknown name raises KeyError."""

    def reset(self) -> None:
        """Forget every slot, in whatever state an interrupted plan left them."""

    def close(self) -> None: ...


class OverlappedWorker(Worker, Protocol):
    """One whose device works while the host goes on."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan; what is returned waits for its result."""


class Executor(Protocol):
    depth: int  # plans that may be under way at once

    def submit(self, plan: StepPlan) -> None:
        """Start a plan. At most ``depth`` may be waiting for their result."""

    def result(self) -> StepResult:
        """The oldest plan's result; blocks. Raises what the worker raised."""

    def control(self, name: str, args: Mapping[str, Any]) -> Any: ...

    def reset(self) -> None:
        """Drop the plans under way and let every worker forget its slots. Raises if one cannot."""

    def close(self) -> None: ...


Rescue = Callable[[StepPlan, Exception], StepResult | None]
"""The result of a plan that an error ended, or None if there is none: then it is raised."""


class LocalExecutor:
    """One rank in this process: runs a plan when its result is asked for."""

    def __init__(self, worker: Worker, depth: int = 1, *, rescue: Rescue | None = None) -> None:
        self.depth = depth
        self._worker = worker
        self._rescue = rescue
        self._results: deque[Callable[[], StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._results.append(partial(self._execute, plan))

    def result(self) -> StepResult:
        return self._results.popleft()()

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        return self._worker.control(name, args)

    def reset(self) -> None:
        self._results.clear()
        self._worker.reset()

    def close(self) -> None:
        self._results.clear()
        self._worker.close()

    def _execute(self, plan: StepPlan) -> StepResult:
        try:
            return self._worker.execute(plan)
        except Exception as error:
            return self._rescued(plan, error)

    def _rescued(self, plan: StepPlan, error: Exception) -> StepResult:
        result = None if self._rescue is None else self._rescue(plan, error)
        if result is None:
            raise error
        return result


class OverlappedExecutor(LocalExecutor):
    """The same for a device that works beside the host: a plan starts when it is submitted."""

    def __init__(
        self, worker: OverlappedWorker, depth: int = 2, *, rescue: Rescue | None = None
    ) -> None:
        super().__init__(worker, depth, rescue=rescue)
        self._launch = worker.launch

    def submit(self, plan: StepPlan) -> None:
        try:
            result = self._launch(plan)
        except Exception as error:
            result = partial(_same, self._rescued(plan, error))
        self._results.append(result)


def _same(result: StepResult) -> StepResult:
    return result
