"""Nobody starves: not a stream beside a long prompt, not the oldest, not whoever was preempted."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.admission import AdmitWhatFits
from octavo.core.pages import BlockSpec, PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.scheduler import SPENT_LIVES, Scheduler
from octavo.core.waiting import AgedPriority, FairShare, Fcfs, Policy
from tests.fakes.loop import SchedulerLoop, expected, make_loop, request

MAX_PREEMPTIONS = 20

# ---- a long prompt beside streams

STREAMS = 12
WINDOWS = (BlockSpec(), BlockSpec(window=64))


class Streams:
    """Running answers, with ``depth`` plans under way; counts the steps since each one spoke."""

    def __init__(self, depth: int, **scheduler: Any) -> None:
        self.scheduler = Scheduler(
            max_num_seqs=STREAMS + 1, max_num_batched_tokens=256, max_model_len=8192, **scheduler
        )
        self.depth = depth
        self.plans: deque[StepPlan] = deque()
        self.silent: Counter[str] = Counter()
        self.longest_silence = 0
        for number in range(STREAMS):
            self.scheduler.submit(Request(f"s{number}", [number, 1, 2], 4000), 0.0)
        for _ in range(4):
            self.step()
        self.silent = Counter({f"s{number}": 0 for number in range(STREAMS)})

    def step(self) -> list[str]:
        while len(self.plans) < self.depth:
            self.plans.append(self.scheduler.plan(0.0))
        plan = self.plans.popleft()
        slots = [s for s, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        result = StepResult(plan.step, slots, [1] * len(slots), [5] * len(slots))
        output = self.scheduler.apply(result, 0.0)
        spoke = [*output.request_ids, *(delta.id for delta in output.deltas)]
        for name in self.silent:
            self.silent[name] = 0 if name in spoke else self.silent[name] + 1
        self.longest_silence = max(self.longest_silence, *self.silent.values(), 0)
        return spoke


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("policy", [Fcfs, AgedPriority, FairShare])
@pytest.mark.parametrize(
    ("blocks", "threshold"), [((BlockSpec(),), 0), ((BlockSpec(),), 100), (WINDOWS, 0)]
)
def test_no_stream_waits_while_a_long_prompt_is_computed(
    depth: int, policy: type[Policy], blocks: tuple[BlockSpec, ...], threshold: int
) -> None:
    streams = Streams(
        depth,
        pool=PagePool(8000, 16, blocks),
        policy=policy(),
        long_prefill_token_threshold=threshold,
    )
    streams.scheduler.submit(Request("long", [7] * 4096, 4), 0.0)
    steps = 1
    while "long" not in streams.step():
        steps += 1
    assert steps >= 4096 // (threshold or 256)
    assert streams.longest_silence <= 2


@pytest.mark.parametrize("pages", [272, 278])
def test_no_stream_waits_for_pages_that_a_long_prompt_may_give_back(pages: int) -> None:
    """The pool is full while it is computed; it came last, and starts over."""
    streams = Streams(1, pool=PagePool(pages, 16), admission=AdmitWhatFits(0.0))
    for _ in range(8):
        streams.step()
    streams.scheduler.submit(Request("long", [7] * 4096, 4), 0.0)
    for _ in range(40):
        streams.step()
    assert streams.scheduler.stats().preemptions == 1
    assert streams.longest_silence <= 2


# ---- the oldest of the best aged priority, and those that were preempted

loads = st.lists(
    st.tuples(
        st.integers(1, 30),  # tokens of prompt
        st.integers(1, 40),  # and of answer
        st.integers(0, 2),  # priority
        st.integers(0, 6),  # steps until it arrives
        st.booleans(),  # whether it has a sibling
    ),
    min_size=2,
    max_size=14,
)


class Watch:
    """Steps a loop, and looks at every plan for the one request that must not wait."""

    def __init__(self, loop: SchedulerLoop) -> None:
        self.loop = loop
        self.joins: Counter[int] = Counter()

    def step(self) -> None:
        loop, scheduler = self.loop, self.loop.scheduler
        seen = len(loop.history)
        live = dict(scheduler._live)
        loop.step()
        for plan in loop.history[seen:]:
            self.joins.update(join.tokens[0] for join in plan.joins)
            best = min(live.values(), key=lambda seq: seq.key)
            rows = {self._owner(slot) for slot in plan.slots}
            assert best.request.prompt[0] in rows

    def _owner(self, slot: int) -> int:
        """First id of the prompt: the number of the request."""
        worker = self.loop.executor._worker  # type: ignore[attr-defined]
        return int(worker.rows[slot].tokens[0])

    def run(self) -> None:
        while self.loop.scheduler.has_work:
            self.step()


@given(
    load=loads,
    pages=st.integers(18, 30),
    seqs=st.integers(2, 6),
    tokens=st.sampled_from([6, 24]),
    policy=st.builds(Fcfs) | st.builds(AgedPriority, st.just(20.0)),
    admission=st.builds(AdmitWhatFits, st.just(0.0)) | st.none(),
    mode=st.sampled_from(["recompute", "swap"]),
    caching=st.booleans(),
)
@settings(max_examples=60)
def test_the_oldest_of_the_best_aged_priority_advances_in_every_step(
    load: list[tuple[int, int, int, int, bool]], mode: Any, caching: bool, **terms: Any
) -> None:
    loop = make_loop(
        preemption=Preemption(mode),
        prefix_caching=caching,
        host_pages=10,
        worker={"host_pages": 10},
        **terms,
    )
    watch = Watch(loop)
    for number, (prompt, output, priority, wait, sibling) in enumerate(load):
        for _ in range(wait):
            watch.step()
        for index in range(1 + sibling):
            ids = [2 * number + index, *range(1000, 999 + prompt)]
            loop.submit(
                Request(
                    f"{number}-{index}",
                    ids,
                    output,
                    priority=priority,
                    parent=f"{number}-0" if index else None,
                )
            )
    watch.run()
    assert all(out.finish == "length" for out in loop.outputs.values())
    assert max(watch.joins.values()) <= 1 + MAX_PREEMPTIONS


def test_who_was_preempted_often_gives_way_no_more() -> None:
    """Ever more urgent requests, one after the other, each take the one slot."""
    loop = make_loop(seqs=1, max_len=512, policy=AgedPriority())
    patient = request("patient", 9, 60)
    loop.submit(patient)
    for number in range(SPENT_LIVES + 5):
        loop.step()
        loop.step()
        loop.submit(request(str(number), 5, 1, priority=-1 - number))
    loop.run()
    reasons = loop.scheduler.stats().preemption_reasons
    assert reasons == {"priority": SPENT_LIVES - 2}
    assert loop.outputs["patient"].ids == expected(patient)


def test_who_lost_its_pages_often_comes_first_and_loses_them_no_more() -> None:
    """Whenever a patient answer runs alone, an urgent prompt comes that needs its pages."""
    loop = make_loop(pages=200, seqs=3, tokens=64, max_len=790, policy=AgedPriority(1e9))
    patient = request("patient", 100, 300, priority=9)
    loop.submit(patient)
    for number in range(2000):
        live = loop.scheduler._live
        if len(live) == 1 and live["patient"].slot >= 0:
            loop.submit(request(str(number), 600, 60, priority=0))
        lives = live["patient"].lives
        loop.step()
        if "patient" not in live:
            break
    assert lives in (SPENT_LIVES - 1, SPENT_LIVES)
    assert loop.outputs["patient"].ids == expected(patient)
    loop.run()
