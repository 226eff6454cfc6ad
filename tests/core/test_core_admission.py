"""The growth estimate: bounded by what is left, careful after preemption, forgetful."""

from __future__ import annotations

from octavo.core.admission import FIRST_GUESS_TOKENS, MAX_CAUTION, GrowthEstimate


def test_growth_is_bounded_by_what_each_sequence_may_still_say() -> None:
    estimate = GrowthEstimate(page_size=16)
    assert estimate.pages([]) == 0
    assert estimate.pages([1, 16, 17]) == 1 + 1 + 2
    assert estimate.pages([10**6]) == FIRST_GUESS_TOKENS // 2 // 16 + 1


def test_output_lengths_are_learned() -> None:
    estimate = GrowthEstimate(page_size=1)
    for _ in range(300):
        estimate.ended(1000)
    assert 495 <= estimate.pages([10**6]) <= 501
    for _ in range(300):
        estimate.ended(10)
    assert estimate.pages([10**6]) <= 7


def test_preemption_makes_careful_and_ends_make_bold_again() -> None:
    estimate = GrowthEstimate(page_size=1)
    calm = estimate.pages([10**6])
    estimate.preempted()
    assert estimate.pages([10**6]) == 2 * calm - 1
    for _ in range(20):
        estimate.preempted()
    assert estimate.pages([10**6]) <= MAX_CAUTION * calm
    for _ in range(60):
        estimate.relax()
    assert estimate.pages([10**6]) == calm
