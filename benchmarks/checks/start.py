"""A stranger's first hour: install, answers, right ids, many users, speed, an honest bench."""

from __future__ import annotations

from benchmarks.check import Check
from benchmarks.checks import _chats, _fresh, _ids, _logits, _throughput, bench


def run(check: Check) -> None:
    _fresh.measure(check)
    _ids.measure(check)
    _logits.measure(check)
    _chats.measure(check)
    _throughput.measure(check)
    bench.measure(check)
