"""Cost of plan + apply for pure decode: ``python benchmarks/scheduler_cost.py``.

Prints microseconds a step with 256 and 1,024 requests running and 0 and 10,000 waiting. A round is
as many steps as a page has tokens; of each of its steps the minimum over rounds counts.
Prompts are short, contexts grow page by page, nothing ends.
"""

from __future__ import annotations

import time
from statistics import mean

from octavo.core.pages import PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

PAGE_SIZE = 16
ROUNDS = 40


def result_of(plan: StepPlan) -> StepResult:
    slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
    return StepResult(plan.step, slots, [1] * len(slots), [7] * len(slots))


def microseconds_a_step(num_running: int, num_waiting: int) -> tuple[float, float]:
    """Cost of ``plan`` and of ``apply``."""
    scheduler = Scheduler(
        pool=PagePool(64 * num_running, PAGE_SIZE),
        max_num_seqs=num_running,
        max_num_batched_tokens=8192 + num_running,
        max_model_len=4096,
    )
    for index in range(num_running + num_waiting):
        prompt = [index % 251 + 1, index // 251 + 1, *range(1, 1 + index % PAGE_SIZE)]
        scheduler.submit(Request(str(index), prompt, max_tokens=2048), now=0.0)
    while scheduler.stats().running < num_running:
        scheduler.apply(result_of(scheduler.plan(0.0)), 0.0)
    planning = [[] for _ in range(PAGE_SIZE)]  # by phase: which rows fill a page differs
    applying = [[] for _ in range(PAGE_SIZE)]
    for step in range(ROUNDS * PAGE_SIZE):
        begin = time.perf_counter_ns()
        plan = scheduler.plan(0.0)
        planning[step % PAGE_SIZE].append(time.perf_counter_ns() - begin)
        result = result_of(plan)
        begin = time.perf_counter_ns()
        deltas = scheduler.apply(result, 0.0)
        applying[step % PAGE_SIZE].append(time.perf_counter_ns() - begin)
        assert len(deltas) == num_running
    return mean(map(min, planning)) / 1e3, mean(map(min, applying)) / 1e3


def main() -> None:
    for num_running in (256, 1024):
        for num_waiting in (0, 10_000):
            plan, apply = microseconds_a_step(num_running, num_waiting)
            print(
                f"{num_running:5d} running {num_waiting:6d} waiting: "
                f"plan {plan:6.1f} µs + apply {apply:6.1f} µs = {plan + apply:6.1f} µs a step"
            )


if __name__ == "__main__":
    main()
