"""Each policy: who is next, who must go, how far anybody can be overtaken, who pays for what."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.core.steptime import StepTimeFit
from octavo.core.waiting import AgedPriority, FairShare, Fcfs, Policy
from tests.fakes.loop import AdmitAll, SchedulerLoop, expected, ids_of, make_loop, request

AGEING = 10.0


def joins_of(loop: SchedulerLoop) -> list[str]:
    """Names in the order of admission; a prompt's first id is the number of its request."""
    return [str(join.tokens[0]) for plan in loop.history for join in plan.joins]


def numbered(number: int, length: int = 3, max_tokens: int = 4, **terms: Any) -> Request:
    return request(str(number), [number, *range(100, 99 + length)], max_tokens, **terms)


# ---- order


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Fcfs(), "0123"),
        (AgedPriority(AGEING), "1203"),
        (FairShare(), "1320"),  # the most urgent one of a, then b's, then the others of a
    ],
    ids=["fcfs", "priority", "fair"],
)
def test_order_of_admission(policy: Policy, order: str) -> None:
    loop = make_loop(seqs=1, policy=policy)
    terms = [(1, "a"), (0, "a"), (0, "a"), (1, "b")]
    for number, (priority, tenant) in enumerate(terms):
        loop.submit(numbered(number, priority=priority, tenant=tenant))
    loop.run()
    assert "".join(joins_of(loop)) == order


class Victims(Preemption):
    """Remembers who was preempted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def swaps(self, seq: Sequence, step_time: StepTimeFit) -> bool:
        self.names.append(seq.id)
        return False


@pytest.mark.parametrize(
    ("policy", "first_victim"),
    [(Fcfs(), "2"), (AgedPriority(AGEING), "1"), (FairShare(AGEING), "1")],
    ids=["fcfs", "priority", "fair"],
)
def test_order_of_preemption(policy: Policy, first_victim: str) -> None:
    """The newest goes, among those of the lowest aged priority if the policy knows any."""
    victims = Victims()
    loop = make_loop(pages=7, policy=policy, admission=AdmitAll(), preemption=victims)
    requests = [numbered(i, 7, 12, priority=p, tenant=str(i)) for i, p in enumerate([0, 3, 0])]
    loop.submit(*requests)
    outputs = loop.run()
    assert victims.names[0] == first_victim
    assert "0" not in victims.names  # the oldest of the best priority never goes
    assert ids_of(outputs) == {r.id: expected(r) for r in requests}


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 25)), min_size=2, max_size=12
)  # priority, and seconds after the one before


@given(arrivals=arrivals, seqs=st.integers(1, 2))
@settings(max_examples=50)
def test_ageing_bounds_how_long_anybody_is_overtaken(
    arrivals: list[tuple[int, int]], seqs: int
) -> None:
    loop = make_loop(seqs=seqs, policy=AgedPriority(AGEING))
    arrived, priorities = [], []
    for number, (priority, wait) in enumerate(arrivals):
        for _ in range(wait):
            loop.step()
        arrived.append(loop.now)
        priorities.append(priority)
        loop.submit(numbered(number, max_tokens=30, priority=priority))
    loop.run()
    order = [int(name) for name in dict.fromkeys(joins_of(loop))]  # of first admissions
    for index, later in enumerate(order):
        for earlier in order[index + 1 :]:
            if arrived[later] > arrived[earlier]:
                advantage = (priorities[earlier] - priorities[later]) * AGEING
                assert arrived[later] - arrived[earlier] <= advantage


def test_an_urgent_request_takes_the_place_of_one_whose_row_is_planned_already() -> None:
    loop = make_loop(seqs=2, policy=AgedPriority())
    requests = [numbered(i, 9, 12, priority=p) for i, p in enumerate([1, 1, 0])]
    loop.submit(*requests[:2])
    loop.step()
    loop.step()
    loop.submit(requests[2])
    loop.step()  # the loop checks that no slot has two slices
    assert loop.scheduler.stats().preemption_reasons == {"priority": 1}
    assert ids_of(loop.run()) == {r.id: expected(r) for r in requests}


def test_an_urgent_request_waits_for_no_prompt_that_is_less_urgent() -> None:
    loop = make_loop(pages=200, tokens=8, policy=AgedPriority())
    loop.submit(numbered(1, 150, priority=1))
    loop.step()
    loop.submit(numbered(0, 6))
    loop.step()
    assert loop.outputs["0"].ids
    assert loop.history[-1].counts == [6, 2]
    loop.run()


def test_an_urgent_request_needs_no_token_that_a_step_has_left() -> None:
    """As many sequences as tokens: a row of the step is given up for it."""
    loop = make_loop(seqs=2, tokens=2, policy=AgedPriority())
    loop.submit(*(numbered(i, 2, 30, priority=1) for i in (1, 2)))
    for _ in range(6):
        loop.step()
    loop.submit(numbered(0, 1))
    loop.step()
    assert loop.outputs["0"].ids
    loop.run()


def test_pages_are_parked_only_with_what_earlier_plans_have_computed() -> None:
    """The victim's slice of this very plan is not on the host: swaps come before slices."""
    loop = make_loop(
        seqs=2,
        tokens=8,
        policy=AgedPriority(),
        preemption=Preemption("swap"),
        host_pages=16,
        worker={"host_pages": 16},
    )
    requests = [numbered(0, 3, 12), numbered(1, 30, 4, priority=1), numbered(2, 3, 4)]
    loop.submit(*requests[:2])
    loop.step()
    loop.step()
    loop.submit(requests[2])
    assert ids_of(loop.run()) == {r.id: expected(r) for r in requests}
    assert loop.scheduler.stats().preemptions_swap == 1


# ---- shares


class Ledger(FairShare):
    """Remembers what each tenant was charged."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: Counter[tuple[str, str]] = Counter()

    def charge(self, request: Request, inputs: int, outputs: int) -> None:
        super().charge(request, inputs, outputs)
        self.charged[request.tenant, "in"] += inputs
        self.charged[request.tenant, "out"] += outputs


def test_what_is_cached_costs_nothing_and_the_rest_is_charged_once() -> None:
    policy = Ledger()
    loop = make_loop(pages=12, policy=policy, admission=AdmitAll())
    prompt = list(range(18))
    for tenant in "ab":
        loop.submit(request(tenant, prompt, 5, tenant=tenant))
        loop.run()
    assert (policy.charged["a", "in"], policy.charged["b", "in"]) == (18, 2)
    assert (policy.charged["a", "out"], policy.charged["b", "out"]) == (5, 5)
    loop.submit(*(numbered(i, 7, 20, tenant="c") for i in range(3)))
    loop.run()
    assert loop.scheduler.stats().preemptions
    assert (policy.charged["c", "in"], policy.charged["c", "out"]) == (3 * 7, 3 * 20)


def test_tenants_share_the_slots_from_the_first_step_on() -> None:
    loop = make_loop(seqs=6, policy=FairShare())
    loop.submit(*(request(f"a{i}", 8, tenant="a") for i in range(12)))
    loop.submit(*(request(f"b{i}", 8, tenant="b") for i in range(12)))
    loop.step()
    running = Counter(seq.request.tenant for seq in loop.scheduler._running)
    assert running == {"a": 3, "b": 3}
    loop.run()


def test_a_pause_saves_nothing_up() -> None:
    loop = make_loop(seqs=1, policy=FairShare())
    loop.submit(*(numbered(i, tenant="a") for i in range(8)))
    for _ in range(18):
        loop.step()
    loop.submit(*(numbered(i, tenant="b") for i in range(10, 14)))
    loop.run()
    order = joins_of(loop)
    first = order.index("10")
    tenants = ["b" if len(name) == 2 else "a" for name in order[first:]]
    assert tenants[:6] in (list("bababa"), list("bbabab"))


def test_tenants_that_are_gone_are_forgotten() -> None:
    policy = FairShare()
    loop = make_loop(policy=policy)
    for number in range(50):
        loop.submit(numbered(number, tenant=str(number)))
        loop.step()
    loop.run()
    assert not policy._tenants
