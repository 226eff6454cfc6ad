"""Every option of scheduling acts: from options to what the scheduler plans, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.facts import HostFacts
from octavo.config.load import load_options
from octavo.config.resolve import Config, resolve
from octavo.core.capacity import cache_layout
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import LocalExecutor
from octavo.engine.scheduling import build_scheduler, describe_scheduling, swap_warning
from tests.fakes.loop import AdmitAll, SchedulerLoop
from tests.fakes.runner import FakeWorker
from tests.fakes.tiny_models import tiny_spec

GIB = 2**30
FACTS = HostFacts(cpu_count=2, total_bytes=8 * GIB, available_bytes=6 * GIB)
SPEC = tiny_spec(max_position=4096)  # a page is 8 KiB
STEP_SECONDS, TOKEN_SECONDS = 0.01, 0.001  # what a step and a token of it cost in these tests


def make_config(**options: Any) -> Config:
    return resolve(load_options({"kv_cache_tokens": 4096, **options}, {}), FACTS, SPEC)


def make_scheduler(page_seconds: float = 0.0, **options: Any) -> Scheduler:
    config = make_config(**options)
    return build_scheduler(config, cache_layout(SPEC), page_seconds)


def make_loop(page_seconds: float = 0.0, **options: Any) -> SchedulerLoop:
    scheduler = make_scheduler(page_seconds, **options)
    worker = FakeWorker(
        num_pages=scheduler.pool.num_pages,
        blocks=scheduler.pool.layout.blocks,
        max_num_seqs=scheduler.max_num_seqs,
        host_pages=scheduler.cache.host.num_pages,
    )
    return SchedulerLoop(scheduler, LocalExecutor(worker))


def teach(scheduler: Scheduler) -> None:
    """Let it see enough steps of known cost to predict others."""
    for step in range(64):
        prefill, rows = 40 * (step % 3), 1 + step % 7
        seconds = STEP_SECONDS + TOKEN_SECONDS * (prefill + rows)
        scheduler.pace.observe(prefill, rows, 100 * (step % 5 + rows), seconds)


def started(loop: SchedulerLoop) -> list[int]:
    """First ids of the prompts, in the order in which they started."""
    loop.run()
    return [join.tokens[0] for plan in loop.history for join in plan.joins]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [1, 2, 3, 4]), ("priority", [3, 4, 1, 2]), ("fair", [3, 1, 4, 2])],
)
def test_the_policy_says_who_is_first(policy: str, order: list[int]) -> None:
    loop = make_loop(scheduling_policy=policy, max_num_seqs=1)
    for first, tenant, priority in ((1, "a", 1), (2, "a", 1), (3, "b", 0), (4, "b", 0)):
        loop.submit(Request(str(first), [first, 9], 3, tenant=tenant, priority=priority))
    assert started(loop) == order


@pytest.mark.parametrize(("ageing", "order"), [(60, [1, 3, 2]), (5, [1, 2, 3])])
def test_ageing_is_what_a_level_of_priority_is_worth(ageing: float, order: list[int]) -> None:
    loop = make_loop(scheduling_policy="priority", priority_ageing=ageing, max_num_seqs=1)
    loop.submit(Request("1", [1], 20, priority=-9), Request("2", [2], 3, priority=1))
    for _ in range(10):
        loop.step()
    loop.submit(Request("3", [3], 3, priority=0))
    assert started(loop) == order


def test_a_threshold_cuts_long_prompts() -> None:
    for options, longest in (({}, 600), ({"long_prefill_token_threshold": 50}, 50)):
        loop = make_loop(max_model_len=1024, **options)
        loop.submit(Request("long", [7] * 600, 2))
        loop.run()
        assert max(loop.history[0].counts) == longest


def test_a_target_for_the_time_between_tokens_bounds_what_prompts_get() -> None:
    def prompt_tokens_beside_a_decode(**options: Any) -> int:
        loop = make_loop(max_model_len=1024, max_num_batched_tokens=512, **options)
        teach(loop.scheduler)
        loop.submit(Request("talks", [5], 50))
        loop.step()
        loop.submit(Request("long", [7] * 900, 2))
        loop.step()
        return loop.history[-1].num_tokens - 1

    assert prompt_tokens_beside_a_decode() == 511
    budget_ms = 1e3 * (STEP_SECONDS + TOKEN_SECONDS * (100 + 1))
    assert prompt_tokens_beside_a_decode(target_itl_ms=budget_ms) == pytest.approx(100, abs=8)


def test_a_target_for_the_first_token_lets_prompts_hurry_under_pressure() -> None:
    def prompt_tokens_while_others_wait(**options: Any) -> int:
        loop = make_loop(
            kv_cache_tokens=512, max_model_len=512, long_prefill_token_threshold=32, **options
        )
        teach(loop.scheduler)
        loop.scheduler.pace._sum = 0.0  # prompts need hardly anything
        loop.submit(Request("talks", [5], 90))
        loop.step()
        loop.submit(Request("long", [6] * 100, 2), Request("waits", [7] * 500, 2))
        loop.step()
        loop.step()
        return loop.history[-1].num_tokens - 1

    assert prompt_tokens_while_others_wait() == 16
    assert prompt_tokens_while_others_wait(target_ttft_ms=1e6) == 16
    assert prompt_tokens_while_others_wait(target_ttft_ms=2100) == 32  # the loop: a second a step


@pytest.mark.parametrize(
    ("mode", "page_seconds", "swapped"),
    [("recompute", 0.0, False), ("swap", 9.0, True), ("auto", 1e-6, True), ("auto", 9.0, False)],
)
def test_preemption_modes(mode: str, page_seconds: float, swapped: bool) -> None:
    space = {} if mode == "recompute" else {"swap_space": "320KiB"}
    loop = make_loop(
        page_seconds, kv_cache_tokens=192, max_model_len=192, preemption_mode=mode, **space
    )
    loop.scheduler._admission = AdmitAll()
    teach(loop.scheduler)
    loop.submit(*(Request(str(i), [i] * 30, 100) for i in range(6)))
    most_parked = 0
    while loop.scheduler.has_work:
        loop.step()
        most_parked = max(most_parked, loop.scheduler.stats().swapped)
    stats = loop.scheduler.stats()
    assert stats.preemptions == stats.preemptions_swap + stats.preemptions_recompute > 0
    assert (stats.preemptions_swap > 0, stats.preemptions_recompute > 0) == (swapped, not swapped)
    assert (most_parked > 0) == swapped
    assert (stats.recomputed_tokens > 0) == (not swapped)
    assert stats.host_pages_free == stats.host_pages_total == (0 if mode == "recompute" else 40)


def test_no_more_run_than_the_ceiling() -> None:
    for options, most in (({"max_num_seqs": 3}, 3), ({}, 64)):  # auto: pool over a short request
        loop = make_loop(**options)
        loop.submit(*(Request(str(i), [i], 9) for i in range(80)))
        loop.step()
        assert loop.scheduler.stats().running == most


def test_the_start_says_what_was_chosen() -> None:
    plain = make_config(preemption_mode="recompute")
    assert describe_scheduling(plain) == (
        "fcfs; at most 64 requests at once (requests of 64 tokens that the KV cache holds, at "
        "least 16); preemption by recompute"
    )
    config = make_config(
        scheduling_policy="fair",
        priority_ageing=5,
        long_prefill_token_threshold=64,
        target_itl_ms=50,
        target_ttft_ms=900,
        swap_space="8000KiB",
        max_num_seqs=7,
    )
    assert describe_scheduling(config, page_seconds=4e-6) == (
        "fair (a level of priority is worth 5 s); at most 7 requests at once (flag "
        "--max-num-seqs); at most 64 tokens of a prompt a step; "
        "target ITL 50 ms; target TTFT 900 ms; preemption by swap or recompute, "
        "1,000 host pages (0.01 GiB: flag --swap-space), 4 µs a page (2.0 GB/s)"
    )


@pytest.mark.parametrize(
    ("mode", "pages", "warned"), [("swap", 255, True), ("swap", 256, False), ("auto", 255, False)]
)
def test_swap_space_without_room_for_the_longest_request_is_warned_of(
    mode: str, pages: int, warned: bool
) -> None:
    config = make_config(preemption_mode=mode, swap_space=f"{8 * pages}KiB")
    warning = swap_warning(config, cache_layout(SPEC))
    assert (warning is not None) == warned
    if warning:
        assert "holds 255 pages and a request of 4,096 tokens may take 256;" in warning
