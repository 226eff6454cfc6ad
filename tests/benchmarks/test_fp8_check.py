"""`make check NAME=fp8` measures what fp8 costs and saves; here it must stay near what it was."""

from __future__ import annotations

import pytest

from benchmarks.check import Check
from benchmarks.checks.fp8 import run

MOST_LOST = 1.01  # the check itself aims at half of it


@pytest.mark.slow
def test_fp8_keeps_perplexity_within_one_per_cent_and_nearly_twice_the_tokens() -> None:
    check = Check("fp8")
    run(check)
    perplexity, tokens = check.lines
    assert perplexity["value"] <= MOST_LOST, perplexity
    assert tokens["passed"], tokens
