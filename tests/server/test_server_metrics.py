"""/metrics: names, agreement with usage, and that it never harms a request."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.metrics import ITL_BUCKETS, TTFT_BUCKETS, Histogram
from tests.fakes.bytetok import byte_ids
from tests.fakes.engine import Script
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


LABELS = ("finished_reason", "le", "mode", "reason", "limit")


async def scrape(served) -> dict[str, float]:
    """Sample name (with the label that tells it from others) to value."""
    reply = await served.client.get("/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k in LABELS}
            samples["|".join([sample.name, *extra.values()])] = sample.value
    return samples


NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("num_preemptions_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total|stop"),
    *("num_requests_swapped", "cpu_cache_usage_perc", "recomputed_tokens_total"),
    *("num_preemptions_by_mode_total|swap", "request_timeouts_total|queue_timeout"),
    *("num_preemptions_by_reason_total|decode", "request_queue_time_seconds_bucket|0.3"),
    *("time_to_first_token_seconds_count", "inter_token_latency_seconds_sum"),
    *("e2e_request_latency_seconds_bucket|+Inf", "cache_config_info"),
)


async def test_each_number_has_both_names(serve):
    samples = await scrape(await serve())
    for name in NAMES:
        assert samples[f"vllm:{name}"] == samples[f"octavo:{name}"]


async def test_counters_equal_the_sum_of_usage(serve):
    served = await serve(Script(byte_ids("hello")))
    bodies = [
        (CHAT, chat()),
        (CHAT, chat(n=3)),
        (COMPLETIONS, prompt(["ab", "c"], n=2, max_tokens=2)),
        (COMPLETIONS, prompt(stop="l")),
    ]
    usages = [(await served.client.post(path, body)).json()["usage"] for path, body in bodies]
    samples = await scrape(served)
    assert samples["vllm:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages)
    assert samples["vllm:generation_tokens_total"] == sum(u["completion_tokens"] for u in usages)
    assert samples["vllm:request_success_total|stop"] == 5
    assert samples["vllm:request_success_total|length"] == 4
    assert samples["vllm:time_to_first_token_seconds_count"] == 9
    assert samples["vllm:e2e_request_latency_seconds_count"] == 9
    assert (
        samples["vllm:inter_token_latency_seconds_count"]
        == sum(u["completion_tokens"] for u in usages) - 9
    )


async def test_aborts_and_errors_are_counted(serve):
    served = await serve(Script(fault_at=2))
    await served.client.post(CHAT, chat())
    stalled = await serve(Script(stall_at=2))
    exchange = await stalled.client.open("POST", CHAT, chat(stream=True))
    await exchange.body_part()
    await exchange.hang_up()
    assert (await scrape(served))["vllm:request_success_total|error"] == 1
    assert (await scrape(stalled))["vllm:request_success_total|abort"] == 1


async def test_engine_numbers(serve):
    served = await serve()
    samples = await scrape(served)
    assert samples["vllm:kv_cache_usage_perc"] == 4 / 256
    assert samples["octavo:engine_up"] == 1
    served.engine.stats["waiting"] = 7
    assert (await scrape(served))["vllm:num_requests_waiting"] == 7


async def test_numbers_of_a_scheduler_under_pressure(serve):
    served = await serve()
    stats = served.engine.stats
    stats |= {"waiting": 7, "swapped": 2, "recomputed_tokens": 64, "preemptions_swap": 3}
    stats |= {"preemption_reasons": {"priority": 4}, "timeouts": {"queue_timeout": 5}}
    stats["queue_times"][0], stats["queue_times"][-1], stats["queue_time_sum"] = 9, 1, 8000.5
    samples = await scrape(served)
    assert samples["vllm:num_requests_waiting"] == 5
    assert samples["vllm:num_requests_swapped"] == 2
    assert samples["vllm:cpu_cache_usage_perc"] == 0.25
    assert samples["octavo:recomputed_tokens_total"] == 64
    assert samples["octavo:num_preemptions_by_mode_total|swap"] == 3
    assert samples["octavo:num_preemptions_by_reason_total|priority"] == 4
    assert samples["octavo:request_timeouts_total|queue_timeout"] == 5
    assert samples["octavo:request_timeouts_total|request_timeout"] == 0
    buckets = [
        samples[f"vllm:request_queue_time_seconds_bucket|{x}"] for x in ("0.3", "7680.0", "+Inf")
    ]
    assert buckets == [9, 9, 10]
    assert samples["vllm:request_queue_time_seconds_sum"] == 8000.5
    stats["queue_times"][0], stats["queue_time_sum"] = 2, 0.5  # a new engine
    samples = await scrape(served)
    assert samples["vllm:request_queue_time_seconds_bucket|0.3"] == 11
    assert samples["vllm:request_queue_time_seconds_sum"] == 8001


async def test_counters_do_not_fall_when_a_new_engine_starts_from_zero(serve):
    served = await serve()
    seen = []
    for value in (5, 9, 1, 2, 0, 3):
        served.engine.stats["preemptions"] = value
        seen.append((await scrape(served))["vllm:num_preemptions_total"])
    assert seen == [5, 9, 10, 11, 11, 14]


async def test_a_scrape_works_without_an_engine(serve):
    served = await serve(ready=False)
    samples = await scrape(served)
    assert samples["octavo:engine_up"] == 0
    assert samples["vllm:prompt_tokens_total"] == 0


async def test_broken_metrics_do_not_reach_a_request(serve, monkeypatch, caplog):
    served = await serve()

    def broken(self, value):
        raise ValueError("Counters can only be incremented by non-negative amounts")

    monkeypatch.setattr(Histogram, "observe", broken)
    reply = await served.client.post(CHAT, chat(max_tokens=3))
    assert reply.status == 200
    assert len(await served.client.stream(CHAT, chat(max_tokens=3))) == 5
    assert "Metrics failed" in caplog.text


@pytest.mark.parametrize("bounds", [TTFT_BUCKETS, ITL_BUCKETS])
def test_bounds_ascend(bounds):
    assert list(bounds) == sorted(set(bounds))
