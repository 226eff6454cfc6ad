"""`make check NAME=bench`, in full: the instrument keeps its promises."""

from __future__ import annotations

import pytest

from benchmarks.check import Check
from benchmarks.checks.bench import at_least, measure


def test_fewer_tries_keep_the_share() -> None:
    assert [at_least(19, tries) for tries in (20, 10, 1)] == [19, 9, 0]


@pytest.mark.slow
def test_known_delays_equal_servers_and_a_planted_slow_down() -> None:
    check = Check("bench")
    measure(check)
    assert check.passed, check.lines
