"""Is a difference more than noise? Ratios of repetitions with an interval around them."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

FALSE_ALARMS = 0.01  # share of comparisons of equals that may show a difference, in any figure
MIN_EFFECT = 0.01  # smaller changes are not worth a name, however sure they are

Verdict = Literal["no difference", "better", "worse", "unknown"]


@dataclass(frozen=True, slots=True)
class Metric:
    label: str
    name: str
    key: str | None = None  # which number of a spread
    higher_is_better: bool = False

    def of(self, rep: Mapping[str, Any]) -> float | None:
        value = rep.get(self.name)
        if self.key is not None and isinstance(value, Mapping):
            value = value.get(self.key)
        return float(value) if isinstance(value, int | float) and value > 0 else None


METRICS = (
    Metric("Output token throughput (tok/s)", "output_tok_s", higher_is_better=True),
    Metric("Median TTFT (ms)", "ttft_ms", "p50"),
    Metric("P99 TTFT (ms)", "ttft_ms", "p99"),
    Metric("Median ITL (ms)", "itl_ms", "p50"),
    Metric("P99 ITL (ms)", "itl_ms", "p99"),
    Metric("Median E2EL (ms)", "e2e_ms", "p50"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """B against A in one figure. ``ratio`` is B / A, the geometric mean over repetitions;
    ``low`` and ``high`` bound it, None where repetitions are too few."""

    metric: Metric
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


def compare(
    a: Sequence[Mapping[str, Any]],
    b: Sequence[Mapping[str, Any]],
    *,
    false_alarms: float = FALSE_ALARMS,
    min_effect: float = MIN_EFFECT,
) -> list[Comparison]:
    """Each figure that all repetitions of both sides have.

    Interleaved repetitions are compared pair by pair, so that what drifts cancels; others as two
    samples with their own variances (Welch 1947). Both are t intervals of log-ratios. All of
    them together hold with probability 1 - ``false_alarms`` (Bonferroni).
    """
    samples = []
    for metric in METRICS:
        values = [[metric.of(rep) for rep in side] for side in (a, b)]
        known = [[value for value in side if value is not None] for side in values]
        if known == values and known[0] and known[1]:
            samples.append((metric, known[0], known[1]))
    paired = interleaved(a, b)
    level = false_alarms / max(1, len(samples))
    return [_compare(metric, x, y, paired, level, min_effect) for metric, x, y in samples]


def overall(comparisons: Sequence[Comparison]) -> Verdict | Literal["mixed"]:
    """What B is, all figures considered."""
    found = {comparison.verdict for comparison in comparisons}
    if {"better", "worse"} <= found:
        return "mixed"
    for verdict in ("worse", "better"):
        if verdict in found:
            return verdict
    return "no difference" if "no difference" in found else "unknown"


def interleaved(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    """True if the repetitions, by the time at which they started, come in pairs of one of each."""
    order = sorted([(rep["started"], 0) for rep in a] + [(rep["started"], 1) for rep in b])
    sides = [side for _, side in order]
    return len(a) == len(b) and all(x != y for x, y in zip(sides[::2], sides[1::2], strict=True))


def _compare(
    metric: Metric,
    a: Sequence[float],
    b: Sequence[float],
    paired: bool,
    level: float,
    min_effect: float,
) -> Comparison:
    log_a, log_b = [math.log(x) for x in a], [math.log(x) for x in b]
    middle = statistics.fmean(log_b) - statistics.fmean(log_a)
    error, freedom = paired_error(log_a, log_b) if paired else welch_error(log_a, log_b)
    low = high = None
    verdict: Verdict = "unknown"
    if freedom > 0:
        half = error * t_quantile(1 - level / 2, freedom)
        low, high = math.exp(middle - half), math.exp(middle + half)
        differs = not low <= 1 <= high and abs(math.expm1(middle)) >= min_effect
        up: Verdict = "better" if metric.higher_is_better else "worse"
        down: Verdict = "worse" if metric.higher_is_better else "better"
        verdict = "no difference" if not differs else up if middle > 0 else down
    medians = statistics.median(a), statistics.median(b)
    return Comparison(metric, *medians, math.exp(middle), low, high, verdict)


def paired_error(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Standard error of mean(b - a), and its degrees of freedom (0: not known)."""
    if len(a) < 2:
        return 0.0, 0.0
    gaps = [y - x for x, y in zip(a, b, strict=True)]
    return statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1


def welch_error(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Standard error of mean(b) - mean(a), and Welch's degrees of freedom (0: not known)."""
    if len(a) < 2 or len(b) < 2:
        return 0.0, 0.0
    va, vb = statistics.variance(a) / len(a), statistics.variance(b) / len(b)
    if va + vb == 0:
        return 0.0, len(a) + len(b) - 2
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    return math.sqrt(va + vb), freedom


@functools.cache
def t_quantile(p: float, freedom: float) -> float:
    """Quantile ``p`` > 1/2 of Student's t distribution, by bisection on :func:`t_tail`."""
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - p else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def t_tail(angle: float, freedom: float, steps: int = 400) -> float:
    """P(T > √freedom · tan(angle)): with t = √freedom · tan θ the density is ∝ cos^(freedom-1) θ.

    Simpson's rule, good to six digits for any freedom ≥ 1.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    width = (math.pi / 2 - angle) / steps
    heights = [math.cos(angle + i * width) ** (freedom - 1) for i in range(steps)]
    heights.append(0.0 if freedom > 1 else 1.0)
    inner = 4 * sum(heights[1:steps:2]) + 2 * sum(heights[2:steps:2])
    area: float = width / 3 * (heights[0] + inner + heights[-1])
    return scale * area
