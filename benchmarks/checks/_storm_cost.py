"""What the scheduler costs on the host, in microseconds.

Decoding: ``plan`` + ``apply`` while nothing starts or ends, with 256 and 1,024 requests running,
nobody or 10,000 waiting, contexts short or of 8k tokens; each request is of a tenant of its own,
and each policy has its turn. A round is as many steps as four pages have tokens (the first ones
find the cache as another case has left it); of the steps that fill the same pages the least of all
rounds counts. Cases that are compared take turns, so that both see the same machine. All answers
have a page before the first round: until then there is less to count, and prompts of 8k tokens take
so many steps that most answers are longer when the last one begins.

Pages: what one costs when requests of 512 pages are admitted, published, released, and admitted
again on hits, in a pool that is full of cached pages. What a request of few pages costs is noted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from benchmarks.check import Check
from octavo.core.pages import PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.prefix import prompt_hashes, root_hash
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.waiting import AgedPriority, FairShare, Fcfs

PAGE_SIZE = 16
ROUNDS = 20
RUNNING = (256, 1024)
POLICIES = {"fcfs": Fcfs, "priority": AgedPriority, "fair": FairShare}
WAITING = 10_000
SHORT, LONG = 512, 8192  # tokens of context (numbers up to 256 are free in CPython)
GROWTH_PAGES = 128  # for each running request: more than it takes, so that all are admitted
PREFILL_TOKENS = 1 << 16  # a step, while they start
ROUND_PAGES, FIRST_PAGES = 4, 2  # of each answer: in a round, and before the first one
BATCH = 8  # requests that are admitted, and released, together
BATCH_PAGES = 512  # of each of them
FEW_PAGES = 8

MAX_GROWTH = 5.0  # from 256 to 1,024 running
MAX_BESIDE = 1.1  # of the same without anybody waiting, or with short contexts
MAX_PAGE_US = 2.0


def lines(check: Check, rounds: int = ROUNDS) -> None:
    """Bounds are on ratios of costs and on what a page costs; steps themselves are noted."""
    costs = decoding_costs(rounds)
    _note(costs, check)

    def ratio(case: Case, plain: Case) -> float:
        return sum(costs[case]) / sum(costs[plain])

    few, many = (Case(running) for running in RUNNING)
    check.line("step_1024_running_over_256", ratio(many, few), "<=", MAX_GROWTH)
    for plain in (few, many):
        name = f"step_{plain.running}_running"
        for policy in POLICIES:
            alone = replace(plain, policy=policy)
            beside = ratio(replace(alone, waiting=WAITING), alone)
            check.line(f"{name}_{policy}_10000_waiting_over_none", beside, "<=", MAX_BESIDE)
        long = ratio(replace(plain, context=LONG), plain)
        check.line(f"{name}_8k_context_over_none", long, "<=", MAX_BESIDE)
    for name, cost in page_costs(rounds, BATCH_PAGES).items():
        check.line(f"{name}_us_a_page", cost, "<=", MAX_PAGE_US)
    for name, cost in page_costs(rounds, FEW_PAGES).items():
        _tell(f"{name}_of_{FEW_PAGES}_pages", check, us_a_request=cost * FEW_PAGES)


@dataclass(frozen=True)
class Case:
    running: int
    waiting: int = 0
    context: int = SHORT
    policy: str = "fcfs"

    def __str__(self) -> str:
        return f"{self.running}_running_{self.waiting}_waiting_context_{self.context}_{self.policy}"


def cases_of(running: int) -> list[Case]:
    """Those that are compared."""
    cases = [Case(running, context=LONG)]
    for policy in POLICIES:
        cases += [Case(running, waiting, policy=policy) for waiting in (0, WAITING)]
    return cases


Costs = dict[Case, tuple[float, float]]


class Decoding:
    """A scheduler under which ``case.running`` requests decode."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._least = [[inf] * PAGE_SIZE for _ in ("plan", "apply")]
        self._scheduler = Scheduler(
            pool=PagePool(case.running * (case.context // PAGE_SIZE + GROWTH_PAGES), PAGE_SIZE),
            max_num_seqs=case.running,
            max_num_batched_tokens=PREFILL_TOKENS,
            max_model_len=4 * LONG,
            policy=POLICIES[case.policy](),
        )
        for index in range(case.running + case.waiting):
            # Prompts differ in length, so that in each step some of them fill a page.
            prompt = list(range(case.context - index % PAGE_SIZE))
            name = str(index)
            request = Request(name, prompt, LONG, tenant=name, hash_seed=root_hash(name))
            self._scheduler.submit(request, 0.0)
        while (plan := self._scheduler.plan(0.0)).counts != [1] * case.running:
            self._scheduler.apply(result_of(plan), 0.0)
        self._scheduler.apply(result_of(plan), 0.0)
        for _ in range(FIRST_PAGES * PAGE_SIZE):
            self._scheduler.apply(result_of(self._scheduler.plan(0.0)), 0.0)

    def round(self) -> None:
        for phase in list(range(PAGE_SIZE)) * ROUND_PAGES:
            begin = time.perf_counter_ns()
            plan = self._scheduler.plan(0.0)
            self._note(0, phase, begin)
            result = result_of(plan)
            assert len(result.ids) == self.case.running
            begin = time.perf_counter_ns()
            self._scheduler.apply(result, 0.0)
            self._note(1, phase, begin)

    def _note(self, call: int, phase: int, begin: int) -> None:
        taken = (time.perf_counter_ns() - begin) / 1e3
        self._least[call][phase] = min(taken, self._least[call][phase])

    @property
    def cost(self) -> tuple[float, float]:
        """Of a step's ``plan`` and ``apply``."""
        plan, apply = (sum(least) / PAGE_SIZE for least in self._least)
        return plan, apply


def decoding_costs(rounds: int) -> Costs:
    costs: Costs = {}
    for running in RUNNING:
        engines = [Decoding(case) for case in cases_of(running)]
        for _ in range(rounds):
            for engine in engines:
                engine.round()
        costs |= {engine.case: engine.cost for engine in engines}
    return costs


def page_costs(rounds: int, pages: int) -> dict[str, float]:
    """Admission, publication, release, and admission on hits, in µs a page of requests of so many
    ``pages``."""
    num_tokens = pages * PAGE_SIZE
    prompt = list(range(num_tokens))
    scheduler = Scheduler(
        pool=PagePool(3 * BATCH * pages, PAGE_SIZE),
        max_num_seqs=BATCH,
        max_num_batched_tokens=2 * BATCH * num_tokens,
        max_model_len=2 * num_tokens,
    )
    least: dict[str, float] = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begin = time.perf_counter_ns()
        yield
        taken = (time.perf_counter_ns() - begin) / 1e3 / (BATCH * pages)
        least[name] = min(taken, least.get(name, inf))

    for index in range(rounds):
        keys = [
            prompt_hashes(prompt, PAGE_SIZE, root_hash(f"{index} {one}")) for one in range(BATCH)
        ]
        for suffix in ("", "_on_hits"):
            requests = [
                Request(f"{index} {one}{suffix}", prompt, 9, block_hashes=hashes)
                for one, hashes in enumerate(keys)
            ]
            with timed(f"admission{suffix}"):
                for request in requests:
                    scheduler.submit(request, 0.0)
                plan = scheduler.plan(0.0)
            assert len(plan.joins) == BATCH
            result = result_of(plan)
            with timed(f"publication{suffix}"):
                scheduler.apply(result, 0.0)
            with timed(f"release{suffix}"):
                for request in requests:
                    scheduler.abort(request.id, 0.0)
    del least["publication_on_hits"], least["release_on_hits"]  # nothing new
    return least


def result_of(plan: StepPlan) -> StepResult:
    slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
    return StepResult(plan.step, slots, [1] * len(slots), [7] * len(slots))


def _note(costs: Costs, check: Check) -> None:
    for case, (plan, apply) in costs.items():
        _tell(str(case), check, plan_us=plan, apply_us=apply)


def _tell(what: str, check: Check, **values: float) -> None:
    told = ", ".join(f"{name} {value:.1f}" for name, value in values.items())
    print(f"NOTE {check.name} {what}: {told}", flush=True)
    check.note(**{what: values})
