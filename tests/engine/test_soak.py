"""Thousands of requests, a fifth of them aborted: pages, host pages and memory are as before."""

from __future__ import annotations

import gc
import sys

import pytest

from benchmarks.check import Check
from benchmarks.checks import _storm_leak
from benchmarks.checks._storm_leak import soaks

MAX_MORE_BLOCKS = 600  # of memory: one for each fifth request


@pytest.mark.parametrize("name", ["fcfs", "priority", "fair"])
def test_nothing_is_left_of_requests_that_have_ended(name: str) -> None:
    soak = soaks()[name]
    soak.run(1000)
    before = blocks()
    soak.run(4000)
    assert blocks() - before <= MAX_MORE_BLOCKS
    scheduler = soak.scheduler
    scheduler.audit()
    stats = scheduler.stats()
    assert sum(stats.finished.values()) == 4000
    assert stats.finished["abort"] >= 0.2 * 4000
    assert stats.preemptions_swap > 0
    assert (stats.pages_referenced, stats.waiting) == (0, 0)
    assert stats.host_pages_free == stats.host_pages_total
    scheduler.reset_prefix_cache()
    assert scheduler.stats().pages_free == stats.pages_total


def blocks() -> int:
    """What the interpreter has allocated and not freed."""
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.slow
def test_the_long_soak() -> None:
    check = Check("soak")
    _storm_leak.lines(check)
    assert check.passed
