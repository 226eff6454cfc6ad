"""Each policy: who is next, who must go, how far anybody can be overtaken, who pays for what."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.sequence import GONE, Sequence
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


def test_little_at_a_time_saves_nothing_up() -> None:
    """One answer that takes long costs its tenant little, and buys no precedence later."""
    loop = make_loop(seqs=2, policy=FairShare())
    loop.submit(numbered(50, max_tokens=100, tenant="b"))
    loop.submit(*(numbered(i, tenant="a") for i in range(40)))
    for _ in range(90):
        loop.step()
    before = len(joins_of(loop))
    loop.submit(*(numbered(i, tenant="b") for i in range(60, 66)))
    loop.run()
    next_ones = ["a" if int(name) < 50 else "b" for name in joins_of(loop)[before : before + 8]]
    assert 3 <= next_ones.count("b") <= 5


def test_the_tenant_that_was_served_most_gives_pages_up() -> None:
    """Its newest request goes, though those of others came later."""
    victims, policy = Victims(), FairShare()
    loop = make_loop(
        pages=10, policy=policy, admission=AdmitAll(), preemption=victims, choose=policy.victim
    )
    tenants = "aaab"
    requests = [numbered(i, 7, 12, tenant=tenant) for i, tenant in enumerate(tenants)]
    loop.submit(*requests)
    assert ids_of(loop.run()) == {r.id: expected(r) for r in requests}
    assert victims.names[0] == "2"


def waiting(number: int, tenant: str, priority: int = 0) -> Sequence:
    one = numbered(number, tenant=tenant, priority=priority)
    return Sequence(one, (60.0 * priority, number), 99)


calls = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "start", "abort", "charge", "end", "preempt"]),
        st.integers(0, 9),  # tenant, or index of the sequence
        st.integers(0, 9),  # priority, or tokens
    ),
    max_size=80,
)


@given(calls=calls)
@settings(max_examples=200)
def test_the_head_is_that_of_the_tenant_served_least(calls: list[tuple[str, int, int]]) -> None:
    """As found by looking at all of them."""
    policy = Ledger()
    queue: list[Sequence] = []
    running: list[Sequence] = []

    def rank(seq: Sequence) -> tuple[float, tuple[float, int]]:
        return policy._tenants[seq.request.tenant].served, seq.key

    for number, (call, which, amount) in enumerate(calls):
        if call == "arrive":
            seq = waiting(number, str(which % 5), amount)
            least = min((rank(one)[0] for one in queue), default=0.0)
            queue.append(seq)
            policy.arrived(seq.request)
            policy.push(seq)
            assert rank(seq)[0] >= least
        elif call == "start" and (head := policy.head()):
            policy.pop()
            queue.remove(head)
            running.append(head)
        elif call == "abort" and queue:
            seq = queue.pop(which % len(queue))
            seq.slot = GONE
            policy.left(seq.request)
            policy.prune(len(queue))
        elif call == "charge" and running:
            policy.charge(running[which % len(running)].request, amount, amount)
        elif call == "end" and running:
            policy.left(running.pop(which % len(running)).request)
        elif call == "preempt" and running:
            heir = running.pop(which % len(running)).successor()
            queue.append(heir)
            policy.push(heir)
        assert policy.head() is min(queue, key=rank, default=None)
    for seq in (*queue, *running):
        seq.slot = GONE
        policy.left(seq.request)
    assert not policy._tenants


def instructions_of(work: Callable[[], None]) -> int:
    count = 0

    def tell(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return tell

    before = sys.gettrace()
    sys.settrace(tell)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_what_a_call_costs_does_not_grow_with_the_tenants() -> None:
    def costs(tenants: int) -> int:
        policy = FairShare()
        for number in range(tenants):
            seq = waiting(number, str(number))
            policy.arrived(seq.request)
            policy.push(seq)

        def work() -> None:
            for seq in guests:
                policy.arrived(seq.request)
                policy.push(seq)
            for _ in range(50):
                head = policy.head()
                assert head is not None
                policy.pop()
                policy.charge(head.request, 7, 1)
                policy.left(head.request)
            policy.prune(tenants)

        guests = [waiting(10_000 + number, f"guest {number}") for number in range(50)]
        return instructions_of(work)

    assert costs(5000) <= 1.02 * costs(100)


def test_entries_of_requests_that_are_gone_do_not_pile_up() -> None:
    """The tenant that was served most never comes up, and is ever more urgent."""
    policy = FairShare()
    seqs = [waiting(0, "a"), waiting(1, "b"), waiting(2, "a")]
    for seq in seqs:
        policy.arrived(seq.request)
        policy.push(seq)
    policy.charge(seqs[0].request, 100, 0)
    for number in range(1000):
        seq = waiting(number + 3, "a", -number)
        policy.arrived(seq.request)
        policy.push(seq)
        seq.slot = GONE
        policy.left(seq.request)
        policy.prune(3)
    assert policy.head() is seqs[1]
    assert len(policy._waiting) < 100
    assert len(policy._tenants["a"].queue._heap) < 100


def test_tenants_that_are_gone_are_forgotten() -> None:
    policy = FairShare()
    loop = make_loop(policy=policy)
    for number in range(50):
        loop.submit(numbered(number, tenant=str(number)))
        loop.step()
    loop.run()
    assert not policy._tenants
