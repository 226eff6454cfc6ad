"""A step that runs out of memory ends its own requests; the engine goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo.core.pages import PagePool
from octavo.core.plan import Delta, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import LocalExecutor, OverlappedExecutor
from octavo.engine.loop import EngineLoop
from octavo.runner.rescue import out_of_memory
from tests.fakes.news import as_deltas
from tests.fakes.runner import FakeWorker

NUM_PAGES = 32


class ShortWorker(FakeWorker):
    """Runs out of memory at ``short_at`` steps, after it has taken in the plan."""

    def __init__(self, error: Exception, short_at: set[int]) -> None:
        super().__init__(num_pages=NUM_PAGES, max_num_seqs=4)
        self.error, self.short_at = error, short_at

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.steps in self.short_at:
            raise self.error
        return result

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        result = self.execute(plan)
        return lambda: result


def run(executor: LocalExecutor) -> dict[str, Delta]:
    """Last deltas: of "a" and "long", whose prompt takes several steps, and of a late "b"."""
    scheduler = Scheduler(
        pool=PagePool(NUM_PAGES, 16), max_num_seqs=4, max_num_batched_tokens=48, max_model_len=200
    )
    loop = EngineLoop(scheduler, executor)
    loop.submit(Request("a", list(range(20)), max_tokens=6), 0.0)
    loop.submit(Request("long", list(range(100)), max_tokens=2), 0.0)
    last: dict[str, Delta] = {}
    while loop.has_work:
        for delta in as_deltas(loop.step(0.0)):
            assert delta.id not in last or last[delta.id].finish is None
            last[delta.id] = delta
        if last and "b" not in last:
            last["b"] = Delta("b")
            loop.submit(Request("b", list(range(20)), max_tokens=3), 0.0)
    scheduler.audit()
    assert loop.stats().pages_referenced == 0
    return last


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of it\nmore"), MemoryError()])
@pytest.mark.parametrize(("depth", "failed"), [(1, {"a", "long"}), (2, {"a"})])
def test_only_requests_of_the_step_end(
    error: Exception, depth: int, failed: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """At depth 2 the second step starts while the long prompt's first part is under way."""
    worker = ShortWorker(error, {2})
    if depth == 1:
        last = run(LocalExecutor(worker, rescue=out_of_memory))
    else:
        last = run(OverlappedExecutor(worker, depth, rescue=out_of_memory))
    assert {name for name, delta in last.items() if delta.finish == "error"} == failed
    for name in failed:
        assert last[name].error_code == "out_of_memory"
        assert "ran out of memory" in (last[name].error or "")
    assert all(delta.finish == "length" for name, delta in last.items() if name not in failed)
    assert f"{len(failed)} requests" in caplog.text


def test_any_other_error_is_raised() -> None:
    worker = ShortWorker(RuntimeError("else"), {1})
    with pytest.raises(RuntimeError, match="else"):
        run(LocalExecutor(worker, rescue=out_of_memory))
    worker = ShortWorker(torch.OutOfMemoryError("nobody saves it"), {1})
    with pytest.raises(torch.OutOfMemoryError):
        run(LocalExecutor(worker))
