"""What a scheduler tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Gauges of this moment, and counters that only ever grow."""

    waiting: int = 0  # parked ones among them
    swapped: int = 0  # parked on the host
    running: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_referenced: int = 0
    host_pages_total: int = 0
    host_pages_free: int = 0
    prefix_query_tokens: int = 0  # tokens of admitted requests that asked the prefix cache
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    preemption_reasons: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    recomputed_tokens: int = 0  # computed before, and lost to a preemption
    prompt_tokens: int = 0  # of admitted requests, each counted once
    generation_tokens: int = 0  # accepted
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    timeouts: dict[str, int] = field(default_factory=dict)  # by limit
    queue_times: list[int] = field(default_factory=list)  # admissions, by ``LATENCY_BOUNDS``
    queue_time_sum: float = 0.0  # seconds from arrival to admission
