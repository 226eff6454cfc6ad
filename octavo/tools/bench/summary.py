"""From records to figures: percentiles, throughput, and one dictionary a repetition."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the client needs libraries that a machine without a server may lack
    from octavo.tools.bench.client import Outcome, Record

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")

Spread = dict[str, float]
"""mean, p50, p90, p95, p99 of one quantity."""


def spread(values: Iterable[float]) -> Spread | None:
    """None of nothing. Percentiles are interpolated linearly between order statistics."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {"mean": statistics.fmean(ordered)}
    return found | {f"p{q}": percentile(ordered, q) for q in PERCENTILES}


def percentile(ordered: Sequence[float], q: float) -> float:
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(record: Record) -> dict[str, list[float]]:
    """Of one successful request, in ms: ``ttft_ms`` from writing it to its first token, ``itl_ms``
    between events, ``tpot_ms`` from first to last token over the tokens after the first, and
    ``e2e_ms`` to the last token."""
    first, last = record.stamps[0], record.stamps[-1]
    after_first = record.output_tokens - 1
    return {
        "ttft_ms": [1e3 * (first - record.sent_at)],
        "tpot_ms": [1e3 * (last - first) / after_first] if after_first > 0 else [],
        "itl_ms": [1e3 * (b - a) for a, b in pairwise(record.stamps)],
        "e2e_ms": [1e3 * (last - record.sent_at)],
    }


def summarise(outcome: Outcome, goals: Mapping[str, float] | None = None) -> dict[str, Any]:
    """One repetition: latencies (see :func:`latencies`) and rates of its successful requests.

    ``goals`` (by the names of LATENCIES, in ms) bound what a request may take, with its mean of
    each, to count for ``goodput_req_s``. ``late_ms``: the longest that a request waited in the
    client, beyond the time when it was due.
    """
    good = [record for record in outcome.records if record.error is None]
    timed = [latencies(record) for record in good]
    end = max((record.stamps[-1] for record in good), default=outcome.start_at)
    seconds = max(end - outcome.start_at, 1e-9)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    kept = sum(_keeps(each, goals or {}) for each in timed)
    late = max((record.sent_at - record.due_at for record in good), default=0.0)
    return {
        "started": outcome.started,
        "seconds": seconds,
        "completed": len(good),
        "failed": len(outcome.records) - len(good),
        "errors": dict(Counter(r.error for r in outcome.records if r.error is not None)),
        "peak_concurrency": peak_concurrency(good),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "request_s": len(good) / seconds,
        "goodput_req_s": kept / seconds if goals else None,
        "output_tok_s": output_tokens / seconds,
        "input_tok_s": prompt_tokens / seconds,
        **{name: spread(value for each in timed for value in each[name]) for name in LATENCIES},
        "client_cpu_share": outcome.cpu_share,
        "late_ms": 1e3 * late,
    }


def _keeps(timed: Mapping[str, Sequence[float]], goals: Mapping[str, float]) -> bool:
    return all(
        statistics.fmean(timed[name]) <= bound for name, bound in goals.items() if timed[name]
    )


def peak_concurrency(records: Iterable[Record]) -> int:
    """The most requests that were under way at one time."""
    changes = [(r.sent_at, 1) for r in records] + [(r.stamps[-1], -1) for r in records]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def median_of(reps: Sequence[Mapping[str, Any]], name: str) -> Any:
    """The median over repetitions of a number, or of each number of a spread; None if a
    repetition lacks it."""
    values = [rep.get(name) for rep in reps]
    if not values or any(value is None for value in values):
        return None
    if isinstance(values[0], Mapping):
        return {key: statistics.median(value[key] for value in values) for key in values[0]}  # type: ignore[index]
    return statistics.median(values)  # type: ignore[type-var]
