"""The loop at depth 3 over two ranks says what the plain loop says."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.errors import InvalidRequest
from octavo.core.pages import PagePool
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import Executor, LocalExecutor
from octavo.engine.loop import EngineLoop
from tests.fakes.executor import FakeExecutor
from tests.fakes.news import as_deltas
from tests.fakes.runner import FakeWorker

NUM_PAGES = 24  # too few for all at once: some are preempted


def worker(rank: int = 0) -> FakeWorker:
    return FakeWorker(num_pages=NUM_PAGES, max_num_seqs=8)


def outputs(executor: Executor) -> tuple[dict[str, list[int]], dict[str, str | None]]:
    scheduler = Scheduler(
        pool=PagePool(NUM_PAGES, 16), max_num_seqs=8, max_num_batched_tokens=48, max_model_len=200
    )
    loop = EngineLoop(scheduler, executor)
    ids: dict[str, list[int]] = {}
    finish: dict[str, str | None] = {}
    for index in range(12):
        prompt = [index % 3, *range(10 + 7 * index)]
        loop.submit(Request(f"r{index}", prompt, max_tokens=20 + index, stop_ids=frozenset({9})), 0)
    while loop.has_work:
        for delta in as_deltas(loop.step(0.0)):
            assert finish.get(delta.id) is None, "a delta after the last one"
            ids.setdefault(delta.id, []).extend(delta.ids)
            finish[delta.id] = delta.finish
    scheduler.audit()
    assert loop.stats().pages_referenced == 0
    loop.close()
    return ids, finish


def test_depth_three_over_two_ranks_equals_the_plain_loop() -> None:
    plain = outputs(LocalExecutor(worker()))
    assert len(plain[0]) == 12
    assert all(plain[1].values())
    assert outputs(FakeExecutor(worker, ranks=2, depth=3)) == plain


def make_loop(executor: Executor) -> EngineLoop:
    scheduler = Scheduler(
        pool=PagePool(NUM_PAGES, 16), max_num_seqs=8, max_num_batched_tokens=48, max_model_len=200
    )
    return EngineLoop(scheduler, executor)


def run(loop: EngineLoop) -> list[int]:
    ids: list[int] = []
    while loop.has_work:
        ids += [token for delta in as_deltas(loop.step(0.0)) for token in delta.ids]
    return ids


@pytest.mark.parametrize("place", ["worker", "plan", "submit", "apply"])
@pytest.mark.parametrize("depth", [1, 3])
def test_after_a_step_that_was_cut_short_new_requests_are_served(
    place: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = FakeExecutor(worker, ranks=2, depth=depth)
    loop = make_loop(executor)
    prompt = list(range(40))

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    loop.submit(Request("alone", prompt, 9), 0.0)
    expected = run(loop)
    for index in range(6):
        loop.submit(Request(f"r{index}", [*prompt, index], 30), 0.0)
    loop.step(0.0)
    loop.step(0.0)
    with monkeypatch.context() as patched:
        owner: Any = loop.scheduler if place in ("plan", "apply") else executor
        patched.setattr(owner, "result" if place == "worker" else place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(loop)
    assert loop.abort("r0", 0.0) is None
    loop.scheduler.audit()
    assert not loop.has_work
    loop.submit(Request("alone", prompt, 9), 0.0)
    assert run(loop) == expected


def test_a_refused_request_harms_nobody() -> None:
    loop = make_loop(LocalExecutor(worker()))
    loop.submit(Request("a", [1], 3), 0.0)
    with pytest.raises(InvalidRequest):
        loop.submit(Request("a", [1], 3), 0.0)
    assert len(run(loop)) == 3
