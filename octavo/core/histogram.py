"""Histogram: counts of values by upper bound, as Prometheus keeps them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# Seconds. vLLM's bounds: dashboards and autoscalers are written for them.
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip


class Histogram:
    """Observing is a bisection and two additions. The last of ``counts`` has no bound."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return rows
