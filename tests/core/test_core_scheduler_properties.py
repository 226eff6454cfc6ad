"""What holds for any load: ids depend on the request alone, every one ends once, nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.core.pages import BlockSpec, PagePool
from octavo.core.preemption import Preemption
from octavo.core.prefix import root_hash
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.core.waiting import AgedPriority, FairShare, Fcfs
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
    blocks: tuple[BlockSpec, ...] = (BlockSpec(),),
    host_pages: int = 0,
    **scheduler: Any,
) -> SchedulerLoop:
    """Several plans under way, on several ranks, for contexts of at most 100 tokens."""

    def worker(rank: int) -> FakeWorker:
        return FakeWorker(
            SCRIPT,
            num_pages=pages + 1,
            page_size=page_size,
            blocks=blocks,
            max_num_seqs=seqs,
            host_pages=host_pages,
        )

    return SchedulerLoop(
        Scheduler(
            pool=PagePool(pages + 1, page_size, blocks),
            max_num_seqs=seqs,
            max_num_batched_tokens=max(tokens, seqs),
            max_model_len=100,
            host_pages=host_pages,
            **scheduler,
        ),
        FakeExecutor(worker, ranks, depth),
    )


def alone(request: Request, max_len: int) -> tuple[list[int], str]:
    """Ids and reason by the rules, without a scheduler."""
    limit = min(len(request.prompt) + request.max_tokens, max_len)
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
        "prefix_caching": st.booleans(),
        "admission": st.none() | st.builds(AdmitAll),
        "blocks": st.sampled_from(
            [
                (BlockSpec(),),
                (BlockSpec(window=6),),
                (BlockSpec(), BlockSpec(window=6)),
                (BlockSpec(window=9), BlockSpec(), BlockSpec(window=5)),
            ]
        ),
        "policy": st.builds(Fcfs) | st.builds(AgedPriority) | st.builds(FairShare),
        "preemption": st.builds(
            Preemption, st.sampled_from(["recompute", "swap", "auto"]), st.just(1e-3)
        ),
        "host_pages": st.integers(0, 12),
        "long_prefill_token_threshold": st.sampled_from([0, 1, 7]),
    }
)
SALTS = [b"", root_hash("one"), root_hash("two")]
TENANTS = ["a", "b", "c"]


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
    for request in requests:
        output = outputs[request.id]
        assert (output.ids, output.finish) == alone(request, loop.scheduler.max_len)
        if not output.ids:
            continue  # no token fits into this pool
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
            pages=16, page_size=4, seqs=6, tokens=16, depth=depth, ranks=ranks, admission=AdmitAll()
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
    """Everything a front can do to a scheduler, in any order; the loop checks each step.

    Under recomputation, swaps to a host pool that is too small, hits and evictions, windows and
    full layers, and each policy: pages, host pages and slots are conserved after every step, and
    who is not aborted and not late gets the ids that the rules say.
    """

    loop: SchedulerLoop
    num_steps = 0  # of all machines

    @initialize(shape=shapes)
    def start(self, shape: dict[str, Any]) -> None:
        self.loop = make_loop(**shape)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    def _submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.loop.submit(request)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 14),
        priority=st.integers(0, 2),
        tenant=st.sampled_from(TENANTS),
        salt=st.sampled_from(SALTS),
        timeout=st.sampled_from([None, None, 5.0, 20.0]),
        queue_timeout=st.sampled_from([None, None, 2.0, 8.0]),
    )
    def submit(self, prompt: list[int], max_tokens: int, salt: bytes, **terms: Any) -> None:
        name = f"r{len(self.requests)}"
        self._submit(
            Request(name, prompt, max_tokens, stop_ids=STOPS, hash_seed=salt, **terms),
        )

    @rule(
        prompt=prompts,
        n=st.integers(2, 4),
        max_tokens=st.integers(1, 9),
        timeout=st.sampled_from([None, 6.0]),
    )
    def submit_siblings(
        self, prompt: list[int], n: int, max_tokens: int, timeout: float | None
    ) -> None:
        first = f"r{len(self.requests)}"
        for index in range(n):
            name, parent = f"r{len(self.requests)}", first if index else None
            self._submit(
                Request(name, prompt, max_tokens, stop_ids=STOPS, parent=parent, timeout=timeout)
            )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), n=st.integers(1, 3))
    def submit_again(self, data: st.DataObject, n: int) -> None:
        known = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        self.submit_siblings(known.prompt, n, known.max_tokens, None)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()
            SchedulerMachine.num_steps += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.loop.outputs[name].finish is None:
            self.aborted.add(name)
        self.loop.abort(name)

    @rule(seconds=st.sampled_from([3.0, 30.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.loop.now += seconds

    @rule()
    def reset(self) -> None:
        self.loop.scheduler.reset_prefix_cache()
        self.loop.scheduler.audit()

    @rule(dice=st.integers(1, 6))
    def start_afresh(self, dice: int) -> None:
        """Now and then, as after a step that failed."""
        if dice == 6:
            self.loop.executor.reset()
            self.loop.scheduler.forget_all()
            self.loop.plans.clear()
            self.loop.scheduler.audit()
            for name, output in self.loop.outputs.items():
                if output.finish is None:
                    output.finish = "abort"
                    self.aborted.add(name)

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        outputs = self.loop.run()
        for name, request in self.requests.items():
            output = outputs[name]
            ids, finish = alone(request, self.loop.scheduler.max_len)
            if output.finish == "timeout":
                assert request.timeout or request.queue_timeout
                assert output.ids == ids[: len(output.ids)]
            elif name in self.aborted:
                assert output.finish == "abort"
                assert output.ids == ids[: len(output.ids)]
            else:
                assert (output.ids, output.finish) == (ids, finish)
        host = self.loop.scheduler.stats()
        assert host.host_pages_free == host.host_pages_total


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.slow
def test_nothing_leaks_in_ten_thousand_steps() -> None:
    before = SchedulerMachine.num_steps
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=700, stateful_step_count=60)
    )
    assert SchedulerMachine.num_steps - before >= 10_000
