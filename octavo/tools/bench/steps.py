"""StepMeter: an executor around an executor that notes what each step was and how long it took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.plan import StepPlan, StepResult
from octavo.distributed.executor import Executor


@dataclass(frozen=True, slots=True)
class Step:
    """Row i computed tokens [starts[i], starts[i] + counts[i]). ``seconds``: in the executor.
    ``ended_at``: on the meter's clock. ``marks``: CUDA events around it, if there is a device."""

    starts: Sequence[int]
    counts: Sequence[int]
    num_samples: int
    seconds: float
    ended_at: float
    marks: tuple[Any, Any] | None = None

    def computes_prompt(self, prompt_len: int) -> bool:
        """True if a row is still within its first ``prompt_len`` tokens."""
        return any(start < prompt_len for start in self.starts)


class StepMeter:
    """Two clock readings a call; keeps references to the plans' lists, and computes nothing.

    ``mark`` records an event on the device's stream.
    """

    def __init__(
        self,
        inner: Executor,
        mark: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.depth = inner.depth
        self._inner = inner
        self._mark = mark
        self._clock = clock
        self._steps: list[Step] = []
        self._under_way: deque[tuple[StepPlan, float]] = deque()

    def submit(self, plan: StepPlan) -> None:
        before = self._clock()
        self._inner.submit(plan)
        self._under_way.append((plan, self._clock() - before))

    def result(self) -> StepResult:
        plan, seconds = self._under_way.popleft()
        before, first = self._clock(), self._mark and self._mark()
        result = self._inner.result()
        now, last = self._clock(), self._mark and self._mark()
        seconds += now - before
        marks = (first, last) if self._mark else None
        samples = sum(plan.samples)
        self._steps.append(Step(plan.starts, plan.counts, samples, seconds, now, marks))
        return result

    def take(self) -> list[Step]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        return self._inner.control(name, args)

    def reset(self) -> None:
        self._under_way.clear()
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


def cuda_mark() -> Any:
    """A timing event on the current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_seconds(steps: Sequence[Step]) -> float | None:
    """Time on the device's stream from each step's first mark to its last; None without marks.

    An upper bound of the time in which it computed: gaps within a step are part of it.
    """
    pairs = [step.marks for step in steps if step.marks is not None]
    if not pairs or len(pairs) < len(steps):
        return None
    import torch

    torch.cuda.synchronize()
    return sum(float(first.elapsed_time(last)) for first, last in pairs) / 1e3
