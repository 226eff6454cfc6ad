"""What a GPU's engine does inside a step, seen from around its executor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.distributed.executor import Executor, LocalExecutor, OverlappedExecutor

SYNC_WARNING = "synchronizing CUDA operation"
WAITS = ("cuda.synchronize", "cuda.Event.synchronize", "cuda.Stream.synchronize")

Ids = tuple[list[int], list[int]]  # slots, and the new id of each


class Probe:
    """An executor around an executor; changes nothing."""

    def __init__(self, inner: Executor) -> None:
        self.depth = inner.depth
        self._inner = inner

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)

    def result(self) -> StepResult:
        return self._inner.result()

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        return self._inner.control(name, args)

    def reset(self) -> None:
        self._inner.reset()

    def close(self) -> None:
        self._inner.close()


@contextmanager
def probed(loop: Any, probe: Executor) -> Iterator[None]:
    """``loop`` runs over ``probe`` inside the block."""
    inner, loop.executor = loop.executor, probe
    try:
        yield
    finally:
        loop.executor = inner


class SyncCounter(Probe):
    """How often each step made the host wait for the device before it was started.

    Counts what torch warns of in its sync debug mode, and the explicit waits in ``WAITS``. The wait
    for an earlier step's result is not inside a step.
    """

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.counts: list[int] = []
        self.first: str | None = None  # what the first of them was

    def submit(self, plan: StepPlan) -> None:
        with host_waits() as waits:
            super().submit(plan)
        found = waits()
        self.counts.append(len(found))
        if found and self.first is None:
            self.first = found[0]


@contextmanager
def host_waits() -> Iterator[Callable[[], list[str]]]:
    """Calls the names, or warnings, of what waited for the device inside the block."""
    import torch

    found: list[str] = []
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        for name in WAITS:
            stack.enter_context(mock.patch(f"torch.{name}", _noting(found, name)))
        if torch.cuda.is_available():
            before = torch.cuda.get_sync_debug_mode()
            stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("warn")
        yield lambda: [*found, *(str(w.message) for w in caught if SYNC_WARNING in str(w.message))]


def _noting(found: list[str], name: str) -> Callable[..., Any]:
    import torch

    *owners, last = name.split(".")
    owner: Any = torch
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, last)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return original(*args, **kwargs)

    return waiting


class PlanRecorder(Probe):
    """Keeps the plans and the ids that they gave, in order."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.plans: list[StepPlan] = []
        self.ids: list[Ids] = []

    def submit(self, plan: StepPlan) -> None:
        # A request's list of ids grows while it runs.
        joins = [replace(join, tokens=list(join.tokens)) for join in plan.joins]
        self.plans.append(replace(plan, joins=joins))
        super().submit(plan)

    def result(self) -> StepResult:
        result = super().result()
        self.ids.append((result.slots, result.ids))
        return result


def replay(executor: Executor, plans: Sequence[StepPlan]) -> list[Ids]:
    """The ids that ``plans`` give on a runner without requests, ``executor.depth`` under way."""
    executor.reset()
    found: list[Ids] = []
    under_way = 0
    for plan in plans:
        if under_way == executor.depth:
            result = executor.result()
            found.append((result.slots, result.ids))
            under_way -= 1
        executor.submit(plan)
        under_way += 1
    for _ in range(under_way):
        result = executor.result()
        found.append((result.slots, result.ids))
    executor.reset()
    return found


def both_loops(executor: Any) -> dict[str, Executor]:
    """The worker of a local executor, behind the plain loop and behind the overlapped one."""
    worker = executor._worker
    return {"plain": LocalExecutor(worker), "overlapped": OverlappedExecutor(worker, 2)}


def closed_loop(loop: Any, requests: Sequence[Request], streams: int) -> int:
    """Serve ``requests``, ``streams`` of them at a time, and return how many tokens came out."""
    waiting, open_requests, tokens = list(reversed(requests)), 0, 0
    while waiting or open_requests:
        while waiting and open_requests < streams:
            loop.submit(waiting.pop(), time.monotonic())
            open_requests += 1
        output = loop.step(time.monotonic())
        tokens += len(output.tokens) + sum(len(delta.ids) for delta in output.deltas)
        open_requests -= sum(delta.finish is not None for delta in output.deltas)
    return tokens
