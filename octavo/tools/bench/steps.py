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
    ``ended_at``: on the meter's clock. ``marks``: CUDA events around its start and around the wait
    for its result, if there is a device. ``starved_s``: the time that the host took to start it
    while the device had nothing to do."""

    starts: Sequence[int]
    counts: Sequence[int]
    num_samples: int
    seconds: float
    ended_at: float
    marks: tuple[Any, ...] = ()
    starved_s: float = 0.0

    def computes_prompt(self, prompt_len: int) -> bool:
        """True if a row is still within its first ``prompt_len`` tokens."""
        return any(start < prompt_len for start in self.starts)


@dataclass(slots=True)
class _Started:
    plan: StepPlan
    seconds: float
    marks: tuple[Any, ...]
    starved_s: float


class StepMeter:
    """Two clock readings a call; keeps references to the plans' lists, and computes nothing.

    ``mark`` records an event on the device's stream, whose ``query`` tells whether the device has
    got there.
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
        self._under_way: deque[_Started] = deque()

    def submit(self, plan: StepPlan) -> None:
        starved = not self._under_way or all(m.query() for m in self._under_way[-1].marks[-1:])
        before, first = self._clock(), self._marked()
        self._inner.submit(plan)
        seconds, last = self._clock() - before, self._marked()
        self._under_way.append(_Started(plan, seconds, first + last, seconds if starved else 0.0))

    def result(self) -> StepResult:
        started = self._under_way.popleft()
        plan = started.plan
        before, first = self._clock(), self._marked()
        result = self._inner.result()
        now, last = self._clock(), self._marked()
        self._steps.append(
            Step(
                plan.starts, plan.counts, sum(plan.samples), started.seconds + now - before, now,
                started.marks + first + last, started.starved_s,
            )
        )  # fmt: skip
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

    def _marked(self) -> tuple[Any, ...]:
        return (self._mark(),) if self._mark else ()


def cuda_mark() -> Any:
    """A timing event on the current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def device_seconds(steps: Sequence[Step]) -> float | None:
    """Time that the device spent in ``steps``; None without marks.

    The device's own time between the marks around each call, less what the host took to start a
    step for which the device already waited. Gaps within a step that was started in time count as
    work: for steps that are launched kernel by kernel this is an upper bound.
    """
    if not steps or not all(step.marks for step in steps):
        return None
    import torch

    torch.cuda.synchronize()
    return sum(busy_seconds(step) for step in steps)


def busy_seconds(step: Step) -> float:
    """Between the marks of each call, less ``starved_s``."""
    pairs = zip(step.marks[::2], step.marks[1::2], strict=True)
    milliseconds = sum(float(a.elapsed_time(b)) for a, b in pairs)
    return max(0.0, milliseconds / 1e3 - step.starved_s)
