"""Cost of plan + apply for pure decode: ``python benchmarks/scheduler_cost.py``.

Prints the minimum over rounds, in microseconds a step, with 256 and 1,024 requests running and
0 and 10,000 waiting. Prompts are short, contexts grow page by page, nothing ends.
"""

from __future__ import annotations

import time

from octavo.core.pages import PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler

PAGE_SIZE = 16
STEPS_A_ROUND = 4 * PAGE_SIZE  # whole pages, so that each round grows and publishes equally
ROUNDS = 7


def result_of(plan: StepPlan) -> StepResult:
    slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
    return StepResult(plan.step, slots, [1] * len(slots), [7] * len(slots))


def microseconds_a_step(num_running: int, num_waiting: int) -> tuple[float, float]:
    """Minimum over rounds of the mean cost of ``plan`` and of ``apply``."""
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
    best = (float("inf"), float("inf"))
    for _ in range(ROUNDS):
        planning = applying = 0
        for _ in range(STEPS_A_ROUND):
            begin = time.perf_counter_ns()
            plan = scheduler.plan(0.0)
            planned = time.perf_counter_ns()
            result = result_of(plan)
            begin_apply = time.perf_counter_ns()
            deltas = scheduler.apply(result, 0.0)
            applying += time.perf_counter_ns() - begin_apply
            planning += planned - begin
            assert len(deltas) == num_running
        cost = (planning / STEPS_A_ROUND / 1e3, applying / STEPS_A_ROUND / 1e3)
        best = min(best, cost, key=sum)
    return best


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
