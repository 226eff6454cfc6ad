"""What does the scheduler cost on the host? Alone, on a quiet machine; part of ``storm`` too."""

from __future__ import annotations

from benchmarks.check import Check
from benchmarks.checks._storm_cost import lines


def run(check: Check) -> None:
    lines(check)
