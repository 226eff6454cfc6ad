"""SchedulerLoop: drives a scheduler and an executor, and checks what must hold after each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.core.admission import AdmitWhatFits
from octavo.core.pages import BlockSpec, PagePool
from octavo.core.plan import Delta, FinishReason, StepPlan, TokenLogprobs
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import Executor, LocalExecutor
from tests.fakes.runner import FakeWorker, Script, hash_script


@dataclass(slots=True)
class Output:
    """Everything that was told about one request."""

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_id: int | None = None
    cached_tokens: int | None = None
    error_code: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class SchedulerLoop:
    """Keeps up to ``executor.depth`` plans under way.

    After each step it audits the scheduler and checks the budgets, that no request is in several
    plans but as a decode chain, and that each one ends once and says nothing after that.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.outputs: dict[str, Output] = {}
        self.plans: deque[StepPlan] = deque()  # under way
        self.history: list[StepPlan] = []
        self.now = 0.0

    def submit(self, *requests: Request) -> None:
        for request in requests:
            assert request.id not in self.outputs
            self.outputs[request.id] = Output()
            self._hear([self.scheduler.submit(request, self.now)])

    def abort(self, request_id: str) -> None:
        self._hear([self.scheduler.abort(request_id, self.now)])
        self.scheduler.audit()

    def step(self) -> None:
        """Plan as far ahead as possible, then take in one result."""
        self.now += 1.0
        self._hear(self.scheduler.expire(self.now))
        while len(self.plans) < self.executor.depth:
            preemptions = self._shortages()
            plan = self.scheduler.plan(self.now)
            self.scheduler.audit()
            if self._shortages() > preemptions:  # only who comes before them all may join
                joins = int(self.scheduler._policy.preempts)
                assert len(plan.joins) <= joins, "admission without room for those that run"
            if plan.is_empty:
                assert not plan.leaves, "an empty plan must not carry leaves"
                assert not plan.joins, "an empty plan must not carry joins"
                break
            self._check_plan(plan)
            self.executor.submit(plan)
            self.plans.append(plan)
            self.history.append(plan)
        if self.plans:
            self.plans.popleft()
            output = self.scheduler.apply(self.executor.result(), self.now)
            self._hear(output.deltas)
            for request_id, token in zip(output.request_ids, output.tokens, strict=True):
                self._hear([Delta(request_id, [token])])
            self.scheduler.audit()

    def run(self, max_steps: int = 10_000) -> dict[str, Output]:
        """Step until every request has ended and no plan is under way."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work or self.plans):
                self._check_idle()
                return self.outputs
            before = self._progress()
            self.step()
            assert self._progress() != before, "nothing moves"
        raise AssertionError(f"work is left after {max_steps} steps")

    def _progress(self) -> tuple[int, int, int]:
        ended = sum(output.finish is not None for output in self.outputs.values())
        return len(self.history), len(self.plans), ended

    def _shortages(self) -> int:
        """Preemptions for want of pages by those that run."""
        reasons = self.scheduler.stats().preemption_reasons
        return reasons.get("decode", 0) + reasons.get("prefill", 0)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.slots) <= self.scheduler.max_num_seqs
        joined = {join.slot for join in plan.joins}
        for index, slot in enumerate(plan.slots):
            if slot in joined:
                continue
            for earlier in reversed(self.plans):  # up to where the slot changed hands
                if slot in earlier.slots:
                    assert plan.counts[index] == 1, "a slice of a request under way"
                    assert earlier.samples[earlier.slots.index(slot)], "no decode chain"
                if slot in {join.slot for join in earlier.joins}:
                    break

    def _hear(self, deltas: Iterable[Delta | None]) -> None:
        for delta in deltas:
            if delta is None:
                continue
            output = self.outputs[delta.id]
            assert output.finish is None, f"{delta.id} speaks after its end"
            first = not output.ids and output.cached_tokens is None
            assert first == (delta.cached_tokens is not None), "cached_tokens: once, at first"
            output.cached_tokens = delta.cached_tokens if first else output.cached_tokens
            output.ids.extend(delta.ids)
            output.logprobs.extend(delta.logprobs)
            output.prompt_logprobs.extend(delta.prompt_logprobs)
            output.finish, output.stop_id = delta.finish, delta.stop_id
            output.error_code = delta.error_code

    def _check_idle(self) -> None:
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.pages_referenced) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.pages_total
        assert all(output.finish for output in self.outputs.values())


class AdmitAll(AdmitWhatFits):
    """Keeps nothing back for growth, so that a small pool leads to preemption."""

    def __init__(self) -> None:
        super().__init__(watermark=0.0)


def ids_of(outputs: dict[str, Output]) -> dict[str, list[int]]:
    return {name: output.ids for name, output in outputs.items()}


def make_loop(
    *,
    pages: int = 64,
    page_size: int = 4,
    blocks: tuple[BlockSpec, ...] = (BlockSpec(),),
    seqs: int = 8,
    tokens: int = 64,
    max_len: int = 256,
    script: Script | None = None,
    worker: dict[str, Any] | None = None,
    **scheduler: Any,
) -> SchedulerLoop:
    """``pages`` usable pages, and a worker to match."""
    fake = FakeWorker(
        script,
        num_pages=pages + 1,
        page_size=page_size,
        blocks=blocks,
        max_num_seqs=seqs,
        **(worker or {}),
    )
    return SchedulerLoop(
        Scheduler(
            pool=PagePool(pages + 1, page_size, blocks),
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=max_len,
            **scheduler,
        ),
        LocalExecutor(fake),
    )


def request(name: str, prompt: list[int] | int, max_tokens: int = 4, **kwargs: Any) -> Request:
    """An int prompt is that many ids, different for each name."""
    if isinstance(prompt, int):
        prompt = [(sum(name.encode()) * 31 + i) % 500 for i in range(prompt)]
    return Request(name, prompt, max_tokens, **kwargs)


def expected(r: Request, count: int | None = None, script: Script | None = None) -> list[int]:
    """What the script alone yields."""
    script = script or hash_script()
    tokens = [*r.prompt, *r.generated]
    while len(tokens) < len(r.prompt) + (count or r.max_tokens):
        tokens.append(script(tokens, len(r.prompt)))
    return tokens[len(r.prompt) + len(r.generated) :]
