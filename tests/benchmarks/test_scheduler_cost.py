"""The cost check measures what it says it measures."""

from __future__ import annotations

import pytest

from benchmarks.check import Check
from benchmarks.checks import _storm_cost as cost


@pytest.mark.parametrize("policy", cost.POLICIES)
def test_decoding_is_all_that_is_measured(policy: str) -> None:
    decoding = cost.Decoding(cost.Case(running=6, waiting=9, context=64, policy=policy))
    before = decoding._scheduler.stats()
    decoding.round()
    after = decoding._scheduler.stats()
    assert (after.running, after.waiting) == (before.running, before.waiting) == (6, 9)
    tokens = after.generation_tokens - before.generation_tokens
    assert tokens == cost.ROUND_PAGES * cost.PAGE_SIZE * 6
    assert after.prompt_tokens == before.prompt_tokens
    assert all(0 < part < 10_000 for part in decoding.cost)


def test_all_answers_have_a_page_when_the_first_round_begins() -> None:
    decoding = cost.Decoding(cost.Case(running=6, context=64))
    assert decoding._scheduler.stats().generation_tokens > 6 * cost.PAGE_SIZE


@pytest.mark.parametrize("pages", [cost.FEW_PAGES, 64])
def test_pages_are_admitted_published_and_hit(pages: int) -> None:
    costs = cost.page_costs(2, pages)
    assert set(costs) == {"admission", "publication", "release", "admission_on_hits"}
    assert all(0 < value < 1000 for value in costs.values())


def test_a_cost_out_of_bounds_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def microseconds(case: cost.Case) -> float:
        if case.context == cost.LONG or (case.waiting and case.policy == "fair"):
            return 1.2 * case.running
        return 1.05 * case.running if case.waiting else case.running

    def costs(rounds: int) -> cost.Costs:
        cases = [case for running in cost.RUNNING for case in cost.cases_of(running)]
        return {case: (microseconds(case), 0.0) for case in cases}

    monkeypatch.setattr(cost, "decoding_costs", costs)
    monkeypatch.setattr(cost, "page_costs", lambda rounds, pages: {"release": 2.5})
    check = Check("storm")
    cost.lines(check)
    assert [line["metric"] for line in check.lines if not line["passed"]] == [
        "step_256_running_fair_10000_waiting_over_none",
        "step_256_running_8k_context_over_none",
        "step_1024_running_fair_10000_waiting_over_none",
        "step_1024_running_8k_context_over_none",
        "release_us_a_page",
    ]
    assert len(check.lines) == 10
