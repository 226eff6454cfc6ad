"""What holds for any load: ids depend on the request alone, every one ends once, nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo.core.pages import BlockSpec, PagePool
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from tests.fakes.executor import FakeExecutor
from tests.fakes.loop import AdmitAll, SchedulerLoop, ids_of
from tests.fakes.runner import FakeWorker, hash_script

STOPS = frozenset({3, 11})
SCRIPT = hash_script(40)  # a small vocabulary: stop ids and repeated prefixes come up


def make_loop(
    *,
    pages: int,
    page_size: int,
    seqs: int,
    tokens: int,
    depth: int = 1,
    ranks: int = 1,
    caching: bool = True,
    admit_all: bool = False,
    blocks: tuple[BlockSpec, ...] = (BlockSpec(),),
) -> SchedulerLoop:
    scheduler = Scheduler(
        pool=PagePool(pages + 1, page_size, blocks),
        max_num_seqs=seqs,
        max_num_batched_tokens=max(tokens, seqs),
        max_model_len=100,
        prefix_caching=caching,
        admission=AdmitAll() if admit_all else None,
    )

    def worker(rank: int) -> FakeWorker:
        return FakeWorker(
            SCRIPT, num_pages=pages + 1, page_size=page_size, blocks=blocks, max_num_seqs=seqs
        )

    return SchedulerLoop(scheduler, FakeExecutor(worker, ranks, depth))


def alone(request: Request, capacity: int) -> tuple[list[int], str]:
    """Ids and reason by the rules, without a scheduler."""
    limit = min(len(request.prompt) + request.max_tokens, capacity, 100)
    tokens = list(request.prompt)
    while len(tokens) < limit:
        tokens.append(SCRIPT(tokens, len(request.prompt)))
        if tokens[-1] in request.stop_ids:
            return tokens[len(request.prompt) :], "stop"
    return tokens[len(request.prompt) :], "length"


prompts = st.builds(
    lambda shared, own: [*range(shared), *own],
    st.integers(0, 14),
    st.lists(st.integers(0, 39), min_size=1, max_size=12),
)
loads = st.lists(
    st.tuples(prompts, st.integers(1, 14), st.integers(0, 2), st.integers(0, 3)),
    min_size=1,
    max_size=9,
)
shapes = st.fixed_dictionaries(
    {
        "pages": st.integers(7, 40),
        "page_size": st.sampled_from([4, 5, 8]),
        "seqs": st.integers(1, 6),
        "tokens": st.integers(1, 40),
        "depth": st.integers(1, 4),
        "caching": st.booleans(),
        "admit_all": st.booleans(),
        "blocks": st.sampled_from([(BlockSpec(),), (BlockSpec(window=6),)]),
    }
)


@given(load=loads, shape=shapes)
@settings(max_examples=150)
def test_ids_depend_on_the_request_alone(load: Any, shape: dict[str, Any]) -> None:
    loop = make_loop(**shape)
    requests = [
        Request(f"r{i}", prompt, max_tokens, stop_ids=STOPS, priority=priority)
        for i, (prompt, max_tokens, priority, _) in enumerate(load)
    ]
    for request, (*_, wait) in zip(requests, load, strict=True):
        loop.submit(request)
        for _ in range(wait):
            loop.step()
    outputs = loop.run()
    capacity = shape["pages"] * shape["page_size"]
    for request in requests:
        output = outputs[request.id]
        assert (output.ids, output.finish) == alone(request, capacity)
        hit = output.cached_tokens
        assert hit is not None
        assert hit % shape["page_size"] == 0
        assert 0 <= hit < len(request.prompt)


@given(prompt=prompts, n=st.integers(2, 5), tokens=st.integers(5, 40), depth=st.integers(1, 3))
@settings(max_examples=60)
def test_several_choices_of_a_prompt_take_no_longer_the_second_time(
    prompt: list[int], n: int, tokens: int, depth: int
) -> None:
    loop = make_loop(pages=100, page_size=4, seqs=5, tokens=tokens, depth=depth)
    steps = []
    for family in "ab":
        before = len(loop.history)
        loop.submit(
            *(
                Request(f"{family}{i}", prompt, 9, parent=f"{family}0" if i else None)
                for i in range(n)
            )
        )
        loop.run()
        steps.append(len(loop.history) - before)
    assert steps[1] <= steps[0] + depth  # a tight budget may cut what is left of the prompt


def test_depth_three_and_two_ranks_equal_the_plain_loop() -> None:
    """The overlapped loop over serialised plans, under preemption, against depth 1."""
    requests = [
        Request(
            f"r{i}",
            [*range(6 + i % 5), i, i + 1],
            5 + 3 * (i % 7),
            Sampling(logprobs=1, prompt_logprobs=1 if i % 6 == 0 else None),
            stop_ids=STOPS,
            parent=f"r{i - 1}" if i % 4 == 1 else None,
        )
        for i in range(40)
    ]
    outputs = []
    for depth, ranks in ((1, 1), (3, 2)):
        loop = make_loop(
            pages=16, page_size=4, seqs=6, tokens=16, depth=depth, ranks=ranks, admit_all=True
        )
        for request in requests:
            loop.submit(request)
            loop.step()
        outputs.append(loop.run())
        assert loop.scheduler.stats().preemptions > 0
        longest_chain = max(
            sum(slot in plan.slots for plan in loop.history[i : i + depth])
            for i in range(len(loop.history))
            for slot in range(6)
        )
        assert longest_chain == depth
    assert ids_of(outputs[0]) == ids_of(outputs[1])
    for name, output in outputs[0].items():
        assert outputs[1][name].finish == output.finish
        assert outputs[1][name].logprobs == output.logprobs
        assert outputs[1][name].prompt_logprobs == output.prompt_logprobs
        assert len(output.logprobs) == len(output.ids)


def test_a_worker_error_reaches_the_caller_and_the_scheduler_goes_on() -> None:
    loop = make_loop(pages=24, page_size=4, seqs=4, tokens=16, depth=3, ranks=2)
    executor = loop.executor
    assert isinstance(executor, FakeExecutor)
    for worker in executor.workers:
        assert isinstance(worker, FakeWorker)
        worker.raise_at[4] = RuntimeError("device lost")
    loop.submit(*(Request(f"r{i}", [i, i], 9 if i else 1) for i in range(4)))
    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()
    assert [output.finish for output in loop.outputs.values()] == ["length", None, None, None]
    executor.reset()  # the plans behind the failed one build on it
    loop.scheduler.forget_all()
    loop.plans.clear()
    loop.outputs.clear()
    loop.submit(*(Request(f"again{i}", [5, i], 4) for i in range(4)))
    outputs = loop.run()
    assert all(len(outputs[f"again{i}"].ids) == 4 for i in range(4))


class SchedulerMachine(RuleBasedStateMachine):
    """Everything a front can do to a scheduler, in any order; the loop checks each step."""

    loop: SchedulerLoop

    @initialize(shape=shapes)
    def start(self, shape: dict[str, Any]) -> None:
        self.loop = make_loop(**shape)
        self.capacity = shape["pages"] * shape["page_size"]
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def _submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.loop.submit(request)

    @rule(prompt=prompts, max_tokens=st.integers(1, 14), priority=st.integers(0, 1))
    def submit(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        name = f"r{len(self.requests)}"
        self._submit(Request(name, prompt, max_tokens, stop_ids=STOPS, priority=priority))

    @rule(prompt=prompts, n=st.integers(2, 4), max_tokens=st.integers(1, 9))
    def submit_siblings(self, prompt: list[int], n: int, max_tokens: int) -> None:
        first = f"r{len(self.requests)}"
        for index in range(n):
            name, parent = f"r{len(self.requests)}", first if index else None
            self._submit(Request(name, prompt, max_tokens, stop_ids=STOPS, parent=parent))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(2, 3))
    def submit_siblings_again(self, data: st.DataObject, n: int) -> None:
        known = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.submit_siblings(known.prompt, n, known.max_tokens)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.loop.outputs[name].finish is None:
            self.aborted.add(name)
        self.loop.abort(name)

    @rule()
    def reset(self) -> None:
        self.loop.scheduler.reset_prefix_cache()
        self.loop.scheduler.audit()

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        outputs = self.loop.run()
        for name, request in self.requests.items():
            ids, finish = alone(request, self.capacity)
            if name in self.aborted:
                assert outputs[name].finish == "abort"
                assert outputs[name].ids == ids[: len(outputs[name].ids)]
            else:
                assert (outputs[name].ids, outputs[name].finish) == (ids, finish)


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase
