"""Prometheus metrics: one table, two names each (``octavo:x`` and vLLM's ``vllm:x``).

The engine's numbers come with a scrape; latencies and token counts are taken here, where the
answers pass. Nothing that goes wrong in here ever reaches a request.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
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

from octavo.core.histogram import LATENCY_BOUNDS, Histogram
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
        "num_requests_waiting",
        False,
        "Sequences waiting to be run, with nothing kept of them.",
        lambda s: s["waiting"] - s["swapped"],
    ),
    EngineNumber(
        "num_requests_swapped",
        False,
        "Preempted sequences whose pages wait in host memory.",
        lambda s: s["swapped"],
    ),
    EngineNumber(
        "kv_cache_usage_perc",
        False,
        "Share of KV cache pages in use; 1 is all of them.",
        lambda s: s["pages_referenced"] / max(1, s["pages_total"]),
    ),
    EngineNumber(
        "cpu_cache_usage_perc",
        False,
        "Share of the host's pages (--swap-space) in use; 1 is all of them.",
        lambda s: 1 - s["host_pages_free"] / max(1, s["host_pages_total"]),
    ),
    EngineNumber("host_pages", False, "Pages in host memory.", lambda s: s["host_pages_total"]),
    EngineNumber(
        "host_pages_free", False, "Those that hold nothing.", lambda s: s["host_pages_free"]
    ),
    EngineNumber("num_preemptions", True, "Sequences preempted.", lambda s: s["preemptions"]),
    EngineNumber(
        "computed_tokens", True, "Tokens that steps have computed.", lambda s: s["computed_tokens"]
    ),
    EngineNumber(
        "recomputed_tokens",
        True,
        "Those among them that a preemption had lost.",
        lambda s: s["recomputed_tokens"],
    ),
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


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Counters of the engine that differ in one label."""

    name: str
    label: str
    help: str
    read: Callable[[Stats], Mapping[str, float]]


ENGINE_COUNTERS = (
    EngineCounters(
        "num_preemptions_by_mode",
        "mode",
        "Sequences preempted, by what becomes of their pages.",
        lambda s: {"recompute": s["preemptions_recompute"], "swap": s["preemptions_swap"]},
    ),
    EngineCounters(
        "num_preemptions_by_reason",
        "reason",
        "Sequences preempted, by what their pages were needed for.",
        lambda s: s["preemption_reasons"],
    ),
    EngineCounters(
        "request_timeouts",
        "limit",
        "Sequences that ran out of time, by limit.",
        lambda s: {"request_timeout": 0, "queue_timeout": 0, **s["timeouts"]},
    ),
)


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
        self.ttft = Histogram(TTFT_BUCKETS)
        self.itl = Histogram(ITL_BUCKETS)
        self.e2e = Histogram(LATENCY_BOUNDS)
        self.request_prompt = Histogram(TOKEN_BUCKETS)
        self.request_generation = Histogram(TOKEN_BUCKETS)

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
        if self._engine is not None:
            yield from self._engine_families(self._engine)
        if self._info is not None:
            config = {
                "block_size": str(self._info.page_size),
                "num_gpu_blocks": str(self._info.num_pages),
                "cache_tokens": str(self._info.kv_tokens),
            }
            yield self._gauge("cache_config_info", "The KV cache's shape.", 1.0, config)

    def _engine_families(self, engine: Stats) -> Iterator[Callable[[str], Metric]]:
        for family in ENGINE_COUNTERS:
            samples = [
                ({family.label: value}, self._ratchet.read(f"{family.name} {value}", count))
                for value, count in family.read(engine).items()
            ]
            yield self._counter(family.name, family.help, samples)
        waits = Histogram(LATENCY_BOUNDS)
        for i, count in enumerate(engine["queue_times"]):
            waits.counts[i] = int(self._ratchet.read(f"queue time {i}", count))
        waits.sum = self._ratchet.read("queue time", engine["queue_time_sum"])
        yield self._histogram(
            "request_queue_time_seconds", "From arrival to the first step.", waits
        )

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
        for name, help, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.ttft),
            ("inter_token_latency_seconds", "Between tokens.", self.itl),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.e2e),
            ("request_prompt_tokens", "Prompt tokens of a request.", self.request_prompt),
            (
                "request_generation_tokens",
                "Tokens generated for a sequence.",
                self.request_generation,
            ),
        ):
            yield self._histogram(name, help, histogram)

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
            names = [*self._labels, *(samples[0][0] if samples else ())]
            family = CounterMetricFamily(f"{prefix}:{name}", help, labels=names)
            for extra, value in samples:
                family.add_metric([*self._labels.values(), *extra.values()], value)
            return family

        return build

    def _histogram(self, name: str, help: str, histogram: Histogram) -> Callable[[str], Metric]:
        def build(prefix: str) -> Metric:
            family = HistogramMetricFamily(f"{prefix}:{name}", help, labels=list(self._labels))
            family.add_metric(
                list(self._labels.values()), histogram.cumulative(), sum_value=histogram.sum
            )
            return family

        return build
