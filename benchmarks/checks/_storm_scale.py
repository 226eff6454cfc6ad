"""How long the simulator takes for 100,000 requests."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.check import Check
from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.tools.simulate.cost import GPU
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import backlog

NUM_REQUESTS = 100_000
MAX_SECONDS = 60
MAX_NUM_SEQS = 256
POOL_TOKENS = 400 * MAX_NUM_SEQS  # room for all that run


def scale(check: Check, count: int = NUM_REQUESTS, max_seconds: float = MAX_SECONDS) -> None:
    """All wait from the start; 256 run. Building the requests is part of it."""
    draw = np.random.default_rng(0)
    started = time.process_time()
    prompts, outputs = draw.integers(100, 301, count), draw.integers(1, 301, count)
    scheduler = Scheduler(
        pool=PagePool(POOL_TOKENS // 16),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=4096,
    )
    outcome = Simulator(scheduler, GPU).run(backlog(prompts, outputs, 512))
    seconds = time.process_time() - started
    check.line("simulated_requests_ended", outcome.num_finished, "==", count)
    check.line("simulation_cpu_seconds", seconds, "<=", max_seconds)
    check.note(
        simulated_steps=len(outcome.steps),
        simulated_output_tokens=outcome.output_tokens,
        simulated_mean_running=float(np.mean(outcome.steps.running)),
    )
