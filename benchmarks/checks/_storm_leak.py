"""A soak: requests of every kind come, a fifth of them is aborted, and nothing is left behind."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from random import Random

from benchmarks.check import Check
from octavo.core.admission import Admission, AdmitWhatFits
from octavo.core.pages import BlockSpec, PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.preemption import Preemption
from octavo.core.prefix import root_hash
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.waiting import AgedPriority, FairShare, Fcfs, Policy

NUM_REQUESTS = 20_000
WARM_UP = 5_000  # requests, until memory is compared
ABORTED = 0.2  # of them, at least
MAX_GROWTH_MIB = 10

NUM_PAGES = 300
HOST_PAGES = 60
BLOCKS = (BlockSpec(), BlockSpec(window=48))
MAX_NUM_SEQS = 24
MOST_LIVE = 60
STEP_SECONDS = 0.02
ABORT_CHANCE = 0.135  # a step
STOP = 0
_STOP_IDS = frozenset([STOP])


def soaks() -> dict[str, Soak]:
    """Each policy; the first one admits without foresight, so that more is preempted."""
    return {
        "fcfs": Soak(Fcfs(), AdmitWhatFits(0.0)),
        "priority": Soak(AgedPriority()),
        "fair": Soak(FairShare()),
    }


def lines(check: Check, num_requests: int = NUM_REQUESTS, warm_up: int = WARM_UP) -> None:
    for name, soak in soaks().items():
        soak.run(warm_up)
        before = rss_mib()
        soak.run(num_requests)
        growth = rss_mib() - before
        stats = soak.scheduler.stats()
        in_use = stats.pages_referenced + stats.host_pages_total - stats.host_pages_free
        soak.scheduler.audit()
        check.line(f"soak_{name}_ended", sum(stats.finished.values()), "==", num_requests)
        check.line(f"soak_{name}_aborted", stats.finished["abort"] / num_requests, ">=", ABORTED)
        check.line(f"soak_{name}_pages_in_use", in_use, "==", 0)
        check.line(f"soak_{name}_rss_growth_mib", growth, "<=", MAX_GROWTH_MIB)
        check.note(**{f"soak_{name}": {"ended": stats.finished, "swaps": stats.preemptions_swap}})


def rss_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


class Soak:
    """Clients of one scheduler on a virtual clock. About a fifth of their requests is aborted:
    while it waits, while it runs, or while it is parked on the host."""

    def __init__(self, policy: Policy, admission: Admission | None = None, seed: int = 0) -> None:
        self.scheduler = Scheduler(
            pool=PagePool(NUM_PAGES + 1, 16, BLOCKS),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
            max_model_len=1024,
            policy=policy,
            admission=admission,
            preemption=Preemption("swap"),
            host_pages=HOST_PAGES,
        )
        self.now = 0.0
        self._draw = Random(seed)
        self._requests = self._all_requests()
        self._num_sent = 0
        self._live: list[str] = []
        self._prompts = [self._ids(120) for _ in range(40)]  # what several requests begin with

    def run(self, until: int) -> None:
        """Until so many requests were sent, from the start on, and all of them have ended."""
        scheduler, draw = self.scheduler, self._draw
        while self._num_sent < until or scheduler.has_work:
            while len(self._live) < MOST_LIVE and self._num_sent < until:
                self._send()
            self._forget(delta.id for delta in scheduler.expire(self.now))
            plan = scheduler.plan(self.now)
            self.now += STEP_SECONDS
            output = scheduler.apply(self._answer(plan), self.now)
            self._forget(delta.id for delta in output.deltas if delta.finish)
            if self._live and draw.random() < ABORT_CHANCE:
                name = draw.choice(self._live)
                scheduler.abort(name, self.now)
                self._forget([name])
            if draw.random() < 1e-4:
                scheduler.reset_prefix_cache()

    # ---- one request

    def _send(self) -> None:
        request = next(self._requests)
        self._num_sent += 1
        if self.scheduler.submit(request, self.now) is None:
            self._live.append(request.id)

    def _forget(self, names: Iterator[str] | list[str]) -> None:
        for name in names:
            self._live.remove(name)

    def _all_requests(self) -> Iterator[Request]:
        draw, number = self._draw, 0
        while True:
            prompt = draw.choice(self._prompts)[: draw.randrange(120)] + self._ids(
                draw.randint(1, 200)
            )
            terms = {
                "max_tokens": draw.choice([8, 60, 300]),
                "priority": draw.randrange(3),
                "tenant": f"tenant-{draw.randrange(1 + number // 10)}",  # ever new ones
                "hash_seed": root_hash(f"salt-{draw.randrange(3)}"),
                "timeout": draw.choice([None, 10.0, 1e6]),
                "queue_timeout": draw.choice([None, 3.0, 1e6]),
            }
            first = f"r{number}"
            for index in range(draw.choice([1, 1, 1, 3])):
                parent = first if index else None
                yield Request(f"r{number}", prompt, stop_ids=_STOP_IDS, parent=parent, **terms)
                number += 1

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(1, 1000) for _ in range(count)]

    def _answer(self, plan: StepPlan) -> StepResult:
        slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        ids = [STOP if self._draw.random() < 0.01 else 7 for _ in slots]
        return StepResult(plan.step, slots, [1] * len(slots), ids)
