"""A histogram counts each value under the first bound that is not below it."""

from __future__ import annotations

from octavo.core.histogram import LATENCY_BOUNDS, Histogram


def test_counts_are_cumulative_and_bounds_are_inclusive() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 6


def test_bounds_ascend() -> None:
    assert list(LATENCY_BOUNDS) == sorted(set(LATENCY_BOUNDS))
