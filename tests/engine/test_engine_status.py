"""The status line: when it comes, and what it says."""

from __future__ import annotations

import logging

import pytest

from octavo.core.stats import SchedulerStats
from octavo.engine.status import StatusLog

BEFORE = SchedulerStats(prompt_tokens=100, generation_tokens=50, preemptions=3, pages_total=200)
AFTER = SchedulerStats(
    waiting=7,
    swapped=2,
    running=12,
    pages_total=200,
    pages_referenced=50,
    prefix_query_tokens=400,
    prefix_hit_tokens=100,
    preemptions=8,
    prompt_tokens=1100,
    generation_tokens=300,
)


def test_the_line_has_the_words_that_people_grep_for() -> None:
    line = StatusLog("cuda").line(AFTER, BEFORE, 10.0)
    assert line == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, "
        "Avg generation throughput: 25.0 tokens/s, "
        "Running: 12 reqs, Waiting: 5 reqs, Swapped: 2 reqs, Preemptions: 5, "
        "GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0% | "
        "running=12 pending=5 swapped=2 gpu_cache=25% preempt=5"
    )


def test_a_line_comes_every_ten_seconds_of_load(caplog: pytest.LogCaptureFixture) -> None:
    status = StatusLog("cpu")
    with caplog.at_level(logging.INFO, "octavo.engine"):
        for now in (0.0, 9.9, 10.0, 15.0, 20.1):
            status.observe(lambda: AFTER, now)
        assert len(caplog.records) == 2
        status.idle()
        for now in (50.0, 59.0, 61.0):
            status.observe(lambda: AFTER, now)
    assert len(caplog.records) == 3
    assert "CPU KV cache usage" in caplog.text
