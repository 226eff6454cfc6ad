"""The storm check's lines on fair shares, targets and waste, small: they hold, and can fail."""

from __future__ import annotations

import pytest

from benchmarks.check import Check
from benchmarks.checks import _storm_fair, _storm_targets, _storm_waste
from octavo.tools.simulate.cost import GPU


def test_each_quiet_tenant_gets_its_share_and_fcfs_would_not_give_it() -> None:
    check = Check("fair")
    _storm_fair.lines(check, num_requests=60, seeds=1)
    assert check.passed


def test_streams_keep_their_rhythm_with_a_target_and_lose_it_without() -> None:
    check = Check("targets")
    _storm_targets.rhythm(check, num_requests=200)
    assert check.passed


def test_chats_fill_their_pages() -> None:
    assert _storm_waste.measure(GPU, 500) <= _storm_waste.MAX_WASTE
    assert _storm_waste.measure(GPU, 500, page_size=128) > _storm_waste.MAX_WASTE


def test_drawn_chats_are_as_long_as_those_counted() -> None:
    prompts, answers = _storm_waste.draw_chats(20_000, seed=1)
    assert (prompts.min(), prompts.max()) == (4, pytest.approx(4096, abs=100))
    assert answers.max() <= 2048
    assert answers.mean() == pytest.approx(300, rel=0.05)
