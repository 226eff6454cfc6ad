"""The loop at depth 3 over two ranks says what the plain loop says."""

from __future__ import annotations

from octavo.core.pages import PagePool
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import Executor, LocalExecutor
from octavo.engine.loop import EngineLoop
from tests.fakes.executor import FakeExecutor
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
        for delta in loop.step(0.0):
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
