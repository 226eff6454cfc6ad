"""Prometheus metrics: one table, two names each (``octavo:x`` and vLLM's ``vllm:x``).

The engine's numbers come with a scrape; latencies and token counts are taken here, where the
answers pass. Nothing that goes wrong in here ever reaches a request.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.engine.client import EngineInfo

log = logging.getLogger("octavo.server")
PREFIXES = ("octavo", "vllm")
CONTENT_TYPE = exposition.CONTENT_TYPE_LATEST
Labels = dict[str, str]
Stats = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., None])

# vLLM's bucket bounds, in seconds: dashboards and autoscalers are written for them.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass(frozen=True, slots=True)
class EngineNumber:
    """One of the engine's numbers: its name here, its kind, and how to read it."""

    name: str
    counter: bool
    help: str
    read: Callable[[Stats], float]


ENGINE_NUMBERS = (
    EngineNumber(
        "num_requests_running", False, "Sequences in the running batch.", lambda s: s["running"]
    ),
    EngineNumber(
        "num_requests_waiting", False, "Sequences waiting to be run.", lambda s: s["waiting"]
    ),
    EngineNumber(
        "kv_cache_usage_perc",
        False,
        "Share of KV cache pages in use; 1 is all of them.",
        lambda s: s["pages_referenced"] / max(1, s["pages_total"]),
    ),
    EngineNumber("num_preemptions", True, "Sequences preempted.", lambda s: s["preemptions"]),
    EngineNumber(
        "prefix_cache_queries",
        True,
        "Tokens looked up in the prefix cache.",
        lambda s: s["prefix_query_tokens"],
    ),
    EngineNumber(
        "prefix_cache_hits",
        True,
        "Tokens found in the prefix cache.",
        lambda s: s["prefix_hit_tokens"],
    ),
)


class Histogram:
    """Counts by upper bound; observing is a bisection and two additions."""

    def __init__(self, name: str, help: str, bounds: Iterable[float]) -> None:
        self.name = name
        self.help = help
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


class Ratchet:
    """Keeps the engine's counters from going back when a new engine starts from zero."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._lost: dict[str, float] = {}

    def read(self, name: str, value: float) -> float:
        last = self._last.get(name, 0.0)
        if value < last:
            self._lost[name] = self._lost.get(name, 0.0) + last
        self._last[name] = value
        return value + self._lost.get(name, 0.0)


def harmless(method: F) -> F:
    """An exception in ``method`` goes to the log, not to the request that is being counted."""

    @functools.wraps(method)
    def guarded(*args: Any) -> None:
        try:
            method(*args)
        except Exception:
            log.exception("Metrics failed; the request goes on.")

    return guarded  # type: ignore[return-value]


class Metrics(Collector):
    """What this front has seen, and on a scrape what the engine reports."""

    def __init__(self, model_name: str) -> None:
        self._labels: Labels = {"model_name": model_name, "engine": "0"}
        self._ratchet = Ratchet()
        self._engine: Stats | None = None
        self._info: EngineInfo | None = None
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[str, int] = dict.fromkeys(
            ("stop", "length", "abort", "error", "timeout"), 0
        )
        self.ttft = Histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.itl = Histogram("inter_token_latency_seconds", "Between tokens.", ITL_BUCKETS)
        self.e2e = Histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS
        )
        self.request_prompt = Histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_generation = Histogram(
            "request_generation_tokens", "Tokens generated for a sequence.", TOKEN_BUCKETS
        )

    @harmless
    def count_prompt(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self.request_prompt.observe(num_tokens)

    @harmless
    def count_tokens(self, num_tokens: int, since_last_s: float, first: bool) -> None:
        self.generation_tokens += num_tokens
        (self.ttft if first else self.itl).observe(since_last_s)

    @harmless
    def count_end(self, reason: str, num_tokens: int, since_arrival_s: float) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1
        if reason in ("stop", "length"):
            self.e2e.observe(since_arrival_s)
            self.request_generation.observe(num_tokens)

    def scrape(self, engine: Stats | None, info: EngineInfo | None) -> bytes:
        """The exposition text. ``engine`` None: no engine answers at the moment."""
        self._engine, self._info = engine, info
        return exposition.generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        rows = [*self._engine_rows(), *self._front_rows()]
        for prefix in PREFIXES:
            for build in rows:
                yield build(prefix)

    def _engine_rows(self) -> Iterator[Callable[[str], Metric]]:
        yield self._gauge(
            "engine_up", "1 while an engine answers.", float(self._engine is not None)
        )
        for number in ENGINE_NUMBERS if self._engine is not None else ():
            value = number.read(self._engine or {})
            if number.counter:
                value = self._ratchet.read(number.name, value)
                yield self._counter(number.name, number.help, [({}, value)])
            else:
                yield self._gauge(number.name, number.help, value)
        if self._info is not None:
            config = {
                "block_size": str(self._info.page_size),
                "num_gpu_blocks": str(self._info.num_pages),
                "cache_tokens": str(self._info.kv_tokens),
            }
            yield self._gauge("cache_config_info", "The KV cache's shape.", 1.0, config)

    def _front_rows(self) -> Iterator[Callable[[str], Metric]]:
        yield self._counter("prompt_tokens", "Prompt tokens served.", [({}, self.prompt_tokens)])
        yield self._counter(
            "generation_tokens", "Tokens generated and delivered.", [({}, self.generation_tokens)]
        )
        yield self._counter(
            "request_success",
            "Sequences that ended, by reason.",
            [({"finished_reason": reason}, n) for reason, n in self.finished.items()],
        )
        for histogram in (
            self.ttft,
            self.itl,
            self.e2e,
            self.request_prompt,
            self.request_generation,
        ):
            yield self._histogram(histogram)

    def _gauge(
        self, name: str, help: str, value: float, extra: Labels | None = None
    ) -> Callable[[str], Metric]:
        labels = {**self._labels, **(extra or {})}

        def build(prefix: str) -> Metric:
            family = GaugeMetricFamily(f"{prefix}:{name}", help, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        return build

    def _counter(
        self, name: str, help: str, samples: list[tuple[Labels, float]]
    ) -> Callable[[str], Metric]:
        def build(prefix: str) -> Metric:
            names = [*self._labels, *samples[0][0]]
            family = CounterMetricFamily(f"{prefix}:{name}", help, labels=names)
            for extra, value in samples:
                family.add_metric([*self._labels.values(), *extra.values()], value)
            return family

        return build

    def _histogram(self, histogram: Histogram) -> Callable[[str], Metric]:
        def build(prefix: str) -> Metric:
            family = HistogramMetricFamily(
                f"{prefix}:{histogram.name}", histogram.help, labels=list(self._labels)
            )
            family.add_metric(
                list(self._labels.values()), histogram.cumulative(), sum_value=histogram.sum
            )
            return family

        return build
