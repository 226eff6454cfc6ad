"""Swap or recompute: by what a copy and a token cost."""

from __future__ import annotations

import pytest

from octavo.core.pages import NULL_PAGE, BlockSpec, CacheLayout, PagePool
from octavo.core.preemption import Preemption, PreemptionMode, newest
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import SPENT_LIVES, Scheduler
from octavo.core.sequence import Sequence
from octavo.core.steptime import StepTimeFit
from octavo.core.waiting import AgedPriority
from tests.fakes.executor import FakeExecutor
from tests.fakes.loop import AdmitAll, SchedulerLoop, make_loop, request
from tests.fakes.runner import FakeWorker

TOKEN_SECONDS = 1e-3
NUM_TOKENS = 40


def running(tables: list[list[int]], **sampling: int) -> Sequence:
    """One that has computed ``NUM_TOKENS`` tokens."""
    seq = Sequence(Request("a", [1] * NUM_TOKENS, 9, Sampling(**sampling)), (0.0, 0), 99)
    seq.scheduled = NUM_TOKENS
    seq.tables = tables
    return seq


def learned() -> StepTimeFit:
    fit = StepTimeFit()
    for step in range(64):
        prefill, rows, context = 32 * (step % 2), step % 5, 7 * step
        fit.observe(prefill, rows, context, 0.01 + TOKEN_SECONDS * (prefill + rows))
    return fit


def test_auto_swaps_where_copies_out_and_back_cost_less_than_the_tokens() -> None:
    even = NUM_TOKENS * TOKEN_SECONDS / 2 / 3  # seconds a page at which both cost the same
    for page_seconds, swaps in ((0.0, True), (0.98 * even, True), (1.02 * even, False)):
        assert Preemption("auto", page_seconds).swaps(running([[4, 5, 6]]), learned()) is swaps


def test_pages_that_have_left_a_window_cost_no_copy() -> None:
    even = NUM_TOKENS * TOKEN_SECONDS / 2 / 4
    preemption = Preemption("auto", 0.98 * even)
    assert preemption.swaps(running([[4, 5, 6], [NULL_PAGE, NULL_PAGE, 7]]), learned())
    assert not preemption.swaps(running([[4, 5, 6], [8, 9, 7]]), learned())


def test_before_the_price_of_a_token_is_known_auto_recomputes() -> None:
    assert not Preemption("auto", 0.0).swaps(running([[4]]), StepTimeFit())


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_a_mode_is_kept_but_prompt_log_probabilities_are_never_parked(mode: str) -> None:
    preemption = Preemption(mode)  # type: ignore[arg-type]
    assert preemption.swaps(running([[4]]), learned()) is (mode != "recompute")
    assert not preemption.swaps(running([[4]], prompt_logprobs=1), learned())


def test_the_newest_has_the_highest_key() -> None:
    seqs = [Sequence(Request(str(key), [1], 1), key, 2) for key in ((1, 0), (3, 1), (3, 2), (2, 3))]
    assert newest(seqs).id == "(3, 2)"


def test_groups_that_grow_are_those_without_a_window() -> None:
    full, sliding = BlockSpec(), BlockSpec(window=8)
    state = BlockSpec(kind="state", bytes_per_sequence=8)
    for blocks, growing in (((full,), 1), ((full, sliding, full, state), 2), ((sliding,), 0)):
        assert CacheLayout(blocks, 4).num_growing == growing


def pressed(patience: int, *outputs: int) -> SchedulerLoop:
    """Requests of 7 tokens in pages of 4, and one page more than they hold at first."""
    loop = make_loop(
        pages=2 * len(outputs) + 1,
        admission=AdmitAll(),
        preemption=Preemption(patience=patience),
        prefix_caching=False,
    )
    loop.submit(*(request(str(index), 7, count) for index, count in enumerate(outputs)))
    loop.run()
    return loop


def test_one_that_is_short_of_a_page_waits_for_another_to_end() -> None:
    assert pressed(0, 4, 4).scheduler.stats().preemptions == 1
    assert pressed(4, 4, 4).scheduler.stats().preemptions == 0


def test_nobody_waits_longer_than_patience_lasts() -> None:
    loop = pressed(4, 9, 9)
    assert loop.scheduler.stats().preemptions == 1
    both = [len(plan.slots) for plan in loop.history[:9]]
    assert both == [2, 2, 1, 1, 1, 1, 1, 1, 1]  # short from the third step on; gone at the seventh
    assert loop.history[6].leaves == [1]


def test_who_is_spared_shields_nobody_else() -> None:
    loop = make_loop(pages=100, seqs=4, policy=AgedPriority())
    loop.submit(*(request(f"bulk {index}", 8, 60, priority=5) for index in range(4)))
    loop.step()
    loop.scheduler._live["bulk 3"].lives = SPENT_LIVES - 1
    loop.submit(request("urgent", 8, 2))
    loop.step()
    assert loop.outputs["urgent"].ids
    assert loop.scheduler._live["bulk 3"].slot >= 0
    loop.run()


def test_tokens_that_are_lost_while_they_are_computed_again_count_once_a_time() -> None:
    loop = make_loop(seqs=1, tokens=4, max_len=64, policy=AgedPriority(1e6), prefix_caching=False)
    loop.submit(request("slow", 40, 4, priority=9))
    for number in range(6):
        for _ in range(3):
            loop.step()
        loop.submit(request(f"urgent {number}", 4, 1, priority=number - 6))
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.preemptions == 6
    assert stats.recomputed_tokens == stats.computed_tokens - (40 + 3) - 6 * 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_alone_nobody_is_preempted_however_little_a_step_computes(
    depth: int, mode: PreemptionMode
) -> None:
    blocks = (BlockSpec(), BlockSpec(window=24))
    pages = CacheLayout(blocks, 4).peak_pages(120, 1)

    def worker(rank: int) -> FakeWorker:
        return FakeWorker(
            num_pages=pages + 1, page_size=4, blocks=blocks, max_num_seqs=1, host_pages=99
        )

    scheduler = Scheduler(
        pool=PagePool(pages + 1, 4, blocks),
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=120,
        preemption=Preemption(mode),
        host_pages=99,
    )
    loop = SchedulerLoop(scheduler, FakeExecutor(worker, 1, depth))
    loop.submit(request("alone", 19, 200))
    loop.run()
    assert scheduler.stats().preemptions == 0
