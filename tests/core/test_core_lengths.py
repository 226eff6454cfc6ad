"""The estimate of answers' lengths finds what it is shown, counts who still runs, and follows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.core.lengths import DRIFT_MEMORY, MAX_DRIFT, MEMORY, LengthEstimate

PAGES = 40
Lengths = NDArray[np.int64]


def answers(estimate: LengthEstimate, lengths: Iterable[int], every: int = 10) -> None:
    """So many whole answers, one after the other, each ending in the page of its length."""
    for number, length in enumerate(lengths):
        for age in range(length + 1):
            estimate.entered(age)
        estimate.ended(length)
        if number % every == 0:
            estimate.refresh()


def geometric(draw: np.random.Generator, count: int) -> Lengths:
    return draw.geometric(0.1, count) - 1


def uniform(draw: np.random.Generator, count: int) -> Lengths:
    return draw.integers(0, 24, count)


def bimodal(draw: np.random.Generator, count: int) -> Lengths:
    return np.where(
        draw.random(count) < 2 / 3, draw.integers(0, 4, count), draw.integers(18, 30, count)
    )


@pytest.mark.parametrize("shape", [geometric, uniform, bimodal])
def test_survival_is_that_of_the_answers_seen(shape) -> None:  # type: ignore[no-untyped-def]
    estimate = LengthEstimate(100)
    lengths = shape(np.random.default_rng(0), 3 * MEMORY)
    answers(estimate, lengths)
    true = np.array([(lengths >= age).mean() for age in range(PAGES)])
    assert np.abs(estimate.survival(PAGES) - true).max() < 0.08


def test_answers_that_still_run_count_from_their_first_page_on() -> None:
    """Half end in their third page; the others are in their twelfth, and none of them has ended."""
    estimate = LengthEstimate(100)
    for _ in range(200):
        answers(estimate, [2])
        for age in range(13):
            estimate.entered(age)
    estimate.refresh()
    survival = estimate.survival(PAGES)
    assert survival[3] == pytest.approx(0.5, abs=0.05)  # 0 from ended answers alone
    assert survival[12] > 0.4


def test_drift_reacts_before_the_first_long_answer_has_ended() -> None:
    estimate = LengthEstimate(100)
    draw = np.random.default_rng(0)
    answers(estimate, draw.integers(1, 5, 2 * MEMORY))
    assert estimate.drift == pytest.approx(1, abs=0.35)
    before = estimate.survival(PAGES)[4]
    expected = 0.0
    while expected < DRIFT_MEMORY:  # ends that stay away: answers go on past their third page
        for age in (0, 1, 2, 3):
            expected += estimate._hazard[age]
            estimate.entered(age)
    assert estimate.drift < 0.65
    assert estimate.survival(PAGES)[4] > 1.6 * before


def test_drift_has_an_upper_bound() -> None:
    estimate = LengthEstimate(100)
    answers(estimate, [30] * MEMORY)
    for _ in range(200):
        answers(estimate, [0])
    assert estimate.drift == MAX_DRIFT


def test_what_was_long_ago_is_forgotten() -> None:
    estimate = LengthEstimate(100)
    answers(estimate, [3] * 2 * MEMORY)
    answers(estimate, [20] * 5 * MEMORY)
    assert estimate.survival(PAGES)[10] > 0.9


def test_short_answers_are_forgotten_while_nobody_ends() -> None:
    """Time is counted in expected ends, so it goes on while long answers make them stay away."""
    estimate = LengthEstimate(100)
    answers(estimate, [3] * 2 * MEMORY)
    for _ in range(2 * MEMORY):
        for age in range(12):
            estimate.entered(age)
        estimate.refresh()
    undrifted = np.cumprod(1 - np.array(estimate._hazard)[estimate._bin[:12]])
    assert undrifted[-1] > 0.75  # counted in ends, of which there are none, it would be 0.69


def test_a_long_run_changes_nothing_but_the_units() -> None:
    """Weights grow by 1/MEMORY an expected end; all of them are divided in time."""
    estimate = LengthEstimate(100)
    draw = np.random.default_rng(1)
    estimate._weight = 0.99e9
    estimate._risk = [value * 1e9 for value in estimate._risk]
    answers(estimate, uniform(draw, 3 * MEMORY))
    assert estimate._weight < 1e9
    other = LengthEstimate(100)
    answers(other, uniform(np.random.default_rng(1), 3 * MEMORY))
    assert estimate.survival(PAGES) == pytest.approx(other.survival(PAGES))


def test_nothing_seen_is_the_prior_and_the_longest_length_has_its_place() -> None:
    estimate = LengthEstimate(2048)
    survival = estimate.survival(2048)
    assert np.all(np.diff(survival) <= 0)
    assert survival[0] == 1
    assert 0 < survival[8] < 1
    assert survival[-1] > 0
    estimate.entered(2048)
    estimate.ended(2048)
