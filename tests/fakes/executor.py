"""FakeExecutor: several ranks in one process, several plans under way, real serialisation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.core.plan import StepPlan, StepResult
from octavo.distributed.executor import Worker


class FakeExecutor:
    """An :class:`octavo.distributed.executor.Executor` over ``ranks`` workers.

    Plans and results cross it as msgpack, each rank decoding its own copy, so nothing is shared by
    accident. A plan is encoded when submitted and executed when its result is asked for: as
    late as a device may run it. AssertionError if ranks disagree or more than ``depth``
    plans are under way.
    """

    def __init__(
        self, make_worker: Callable[[int], Worker], ranks: int = 2, depth: int = 3
    ) -> None:
        self.depth = depth
        self.workers = [make_worker(rank) for rank in range(ranks)]
        self._plans: deque[bytes] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._plans) < self.depth, f"more than {self.depth} plans under way"
        self._plans.append(msgspec.msgpack.encode(plan))

    def result(self) -> StepResult:
        message = self._plans.popleft()
        results: list[bytes] = []
        errors: list[Exception] = []
        for worker in self.workers:  # all of them, as ranks do not know of each other's errors
            plan = msgspec.msgpack.decode(message, type=StepPlan)
            try:
                results.append(msgspec.msgpack.encode(worker.execute(plan)))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        assert all(result == results[0] for result in results), "ranks disagree"
        return msgspec.msgpack.decode(results[0], type=StepResult)

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        answers = [worker.control(name, args) for worker in self.workers]
        assert all(answer == answers[0] for answer in answers), "ranks disagree"
        return answers[0]

    def reset(self) -> None:
        self._plans.clear()
        for worker in self.workers:
            worker.reset()

    def close(self) -> None:
        self._plans.clear()
        for worker in self.workers:
            worker.close()
