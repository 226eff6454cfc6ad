"""How much of a step prompts get: beside decodes, under pressure, and within the targets."""

from __future__ import annotations

import pytest

from octavo.core.pacing import (
    FIRST_CHUNK,
    LEAST_CHUNK,
    STEADY_SHARE,
    TOKENS_BESIDE,
    TOKENS_BESIDE_EACH,
    PrefillPace,
    Prompt,
)
from tests.fakes.loop import make_loop, request

BUDGET = 2 * TOKENS_BESIDE
ROWS, CONTEXT = 10, 1000


def seconds(prefill: int, rows: int, context: int) -> float:
    """A machine: 10 ms a step, 1 ms a token, 10 µs a token of context."""
    return 10e-3 + 1e-3 * (prefill + rows) + 1e-5 * context


def shown(pace: PrefillPace, steps: int = 200) -> PrefillPace:
    """After steps of many sizes, every fourth of them with a prompt."""
    for step in range(steps):
        prefill, rows, context = (step % 4 == 0) * (20 + step), 5 + step % 7, 300 + 17 * step
        pace.observe(prefill, rows, context, seconds(prefill, rows, context))
    return pace


def tokens(pace: PrefillPace, *, pressed: bool = False, oldest: Prompt | None = None) -> int:
    return pace.tokens(BUDGET, ROWS, CONTEXT, pressed, oldest)


def test_beside_answers_prompts_get_a_bounded_share_of_a_step() -> None:
    pace = shown(PrefillPace())
    assert tokens(pace) == TOKENS_BESIDE < BUDGET
    many = TOKENS_BESIDE  # answers
    assert pace.tokens(10 * many, many, CONTEXT, False) == TOKENS_BESIDE_EACH * many
    assert pace.tokens(100, ROWS, CONTEXT, False) == 100  # all that is left


@pytest.mark.parametrize("pressed", [True, False])
def test_where_nobody_decodes_nobody_is_held_up(pressed: bool) -> None:
    pace = shown(PrefillPace(target_itl=0.02, target_ttft=1.0))
    assert pace.tokens(BUDGET, 0, 0, pressed) == BUDGET


def test_pressure_leaves_prompts_a_little_more_than_their_steady_need() -> None:
    pace = PrefillPace()
    assert tokens(pace, pressed=True) == LEAST_CHUNK
    for step in range(2000):
        pace.observe(400 if step % 4 == 0 else 0, ROWS, CONTEXT, 0.1)
    assert tokens(pace, pressed=True) == pytest.approx(STEADY_SHARE * 100, rel=0.05)
    assert tokens(pace) == TOKENS_BESIDE


def test_a_target_bounds_the_predicted_step() -> None:
    pace = shown(PrefillPace(target_itl=0.1))
    prefill = tokens(pace)
    assert seconds(prefill, ROWS, CONTEXT) == pytest.approx(0.1, rel=0.05)
    tight = shown(PrefillPace(target_itl=0.001))
    assert tokens(tight) == LEAST_CHUNK  # prompts must not starve


def test_before_steps_were_seen_a_target_makes_chunks_small() -> None:
    assert tokens(shown(PrefillPace(target_itl=0.1), steps=8)) == FIRST_CHUNK


TTFT = 100.0


def steady_seconds(pace: PrefillPace, left: int) -> float:
    """What a prompt of ``left`` tokens takes under pressure."""
    rate = tokens(pace, pressed=True)
    return left / rate * seconds(rate, ROWS, CONTEXT)


def test_a_prompt_is_hurried_when_it_would_miss_the_target_at_the_steady_rate() -> None:
    pace = shown(PrefillPace(target_ttft=TTFT))
    needs = steady_seconds(pace, 4000)
    early, late = (Prompt("p", TTFT - margin * needs, 4000) for margin in (1.5, 1.1))
    assert tokens(pace, pressed=True, oldest=early) == tokens(pace, pressed=True) < BUDGET
    assert tokens(pace, pressed=True, oldest=late) == TOKENS_BESIDE
    assert tokens(shown(PrefillPace()), pressed=True, oldest=late) < BUDGET  # no target


def test_who_is_hurried_stays_so_to_the_first_token_though_it_comes_too_late() -> None:
    pace = shown(PrefillPace(target_ttft=TTFT))
    assert tokens(pace, pressed=True, oldest=Prompt("p", TTFT - 0.01, 4000)) == TOKENS_BESIDE
    assert tokens(pace, pressed=True, oldest=Prompt("p", TTFT + 9.0, 1000)) == 1000


def test_who_is_too_late_from_the_start_is_not_hurried() -> None:
    pace = shown(PrefillPace(target_ttft=TTFT))
    assert tokens(pace, pressed=True, oldest=Prompt("p", TTFT + 0.01, 4000)) < BUDGET


def test_a_hurried_prompt_keeps_the_bound_of_the_itl() -> None:
    both = shown(PrefillPace(target_itl=0.1, target_ttft=TTFT))
    late = Prompt("p", TTFT - 0.01, 4000)
    assert tokens(both, pressed=True, oldest=late) == tokens(both) < BUDGET


def test_a_slower_machine_shrinks_the_chunks() -> None:
    pace = shown(PrefillPace(target_itl=0.1))
    before = tokens(pace)
    for step in range(600):
        prefill, rows, context = (step % 4 == 0) * (20 + step % 90), 5 + step % 7, 300 + step
        pace.observe(prefill, rows, context, 2 * seconds(prefill, rows, context))
    assert tokens(pace) == pytest.approx(0.5 * before, rel=0.1)


def steps_to_first_token(pace: PrefillPace) -> int:
    """Of a prompt that is computed beside two answers, while the next one waits for pages."""
    loop = make_loop(
        pages=70,
        page_size=16,
        tokens=64,
        max_len=1024,
        pace=pace,
        long_prefill_token_threshold=48,  # so that the step has a look at who waits
    )
    loop.submit(request("a", 16, 190), request("b", 16, 190))
    for step in range(40):  # the loop's steps take no time themselves
        pace.observe((step % 4 == 0) * 16, 2, 100, 1.0)
    for _ in range(100):  # the need of prompts is hardly anything
        loop.step()
    loop.submit(request("long", 500, 2), request("waits", 500, 2))
    before = len(loop.history)
    while not loop.outputs["long"].ids:
        loop.step()
    assert loop.outputs["waits"].cached_tokens is None
    return len(loop.history) - before


def test_a_ttft_target_acts_under_pressure() -> None:
    """The loop's clock: a second a step."""
    unhurried, hurried = (
        steps_to_first_token(PrefillPace(target_ttft=target)) for target in (None, 20.0)
    )
    assert hurried <= 20
    assert unhurried > 1.5 * hurried


def test_a_long_prompt_keeps_the_target_to_its_end() -> None:
    """What a slice reads of its own prompt takes time too: here half the target, at its end."""
    target, longest = 0.1, 0.0
    loop = make_loop(
        pages=400, page_size=16, tokens=512, max_len=8192, pace=PrefillPace(target_itl=target)
    )
    loop.submit(request("a", 16, 600), request("b", 16, 600))
    scheduler, now = loop.scheduler, 0.0
    for step in range(400):
        if step % 20 == 0 and step < 200:
            loop.scheduler.submit(request(f"short{step}", 40 + step, 1), now)
        if step == 200:
            loop.scheduler.submit(request("long", 5000, 2), now)
        plan = scheduler.plan(now)
        result = loop.executor._worker.execute(plan)  # type: ignore[attr-defined]
        prefill = plan.num_tokens - plan.counts.count(1)
        took = seconds(prefill, plan.counts.count(1), sum(plan.starts) + plan.num_tokens)
        now += took
        if step > 200 and "long" in scheduler._live:
            longest = max(longest, took)
        scheduler.apply(result, now)
    assert "long" not in scheduler._live
    assert longest <= 1.2 * target
