"""The status line: what an operator greps for, every ten seconds under load.

The first half is the line that vLLM prints, so that scripts written for it keep
working; the second is the key=value form found in tuning guides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from octavo.core.stats import SchedulerStats

log = logging.getLogger("octavo.engine")


class StatusLog:
    """Turns counters into rates. ``observe`` is called after each step and mostly returns:
    the counters are read only when a line is due."""

    def __init__(self, device: str, interval_seconds: float = 10.0) -> None:
        self._cache = "GPU" if device == "cuda" else device.upper()
        self._interval = interval_seconds
        self._since: float | None = None
        self._last: SchedulerStats | None = None

    def observe(self, read: Callable[[], SchedulerStats], now: float) -> None:
        if self._since is None or self._last is None:
            self._since, self._last = now, read()
        elif now - self._since >= self._interval:
            stats = read()
            log.info(self.line(stats, self._last, now - self._since))
            self._since, self._last = now, stats

    def idle(self) -> None:
        """Load has ended: the next period starts with its first step."""
        self._since = self._last = None

    def line(self, stats: SchedulerStats, before: SchedulerStats, seconds: float) -> str:
        prompt = (stats.prompt_tokens - before.prompt_tokens) / seconds
        generated = (stats.generation_tokens - before.generation_tokens) / seconds
        usage = 100 * stats.pages_referenced / max(1, stats.pages_total)
        hits = 100 * stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens)
        preempted = stats.preemptions - before.preemptions
        waiting = stats.waiting - stats.swapped
        return (
            f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
            f"Avg generation throughput: {generated:.1f} tokens/s, "
            f"Running: {stats.running} reqs, Waiting: {waiting} reqs, "
            f"Swapped: {stats.swapped} reqs, Preemptions: {preempted}, "
            f"{self._cache} KV cache usage: {usage:.1f}%, "
            f"Prefix cache hit rate: {hits:.1f}% | "
            f"running={stats.running} pending={waiting} swapped={stats.swapped} "
            f"{self._cache.lower()}_cache={usage:.0f}% preempt={preempted}"
        )
