"""The driver: failed steps and failed audits are told, and the engine goes on as long as it can."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from octavo.core.plan import Delta, StepOutput
from octavo.core.request import Request
from octavo.engine.driver import MAX_FAILED_STEPS, Call, Driver, Drop
from tests.engine.conftest import NUM_PAGES, make_loop
from tests.fakes.news import as_deltas
from tests.fakes.runner import FakeWorker


class Told:
    """A driver that is run by hand: what each front was told, by request."""

    def __init__(self, worker: FakeWorker) -> None:
        self.deltas: dict[tuple[str, str], list[Delta]] = {}
        self.driver = Driver(make_loop(worker), self._emit)

    def _emit(self, front: str, output: StepOutput) -> None:
        for delta in as_deltas(output):
            self.deltas.setdefault((front, delta.id), []).append(delta)

    def run(self, *items: Any) -> None:
        """Take the items, work until idle, then stop."""
        for item in items:
            self.driver._take(item)
        while self.driver._loop.has_work:
            self.driver._step()

    def last(self, name: str, front: str = "f") -> Delta:
        *before, last = self.deltas[front, name]
        assert all(delta.finish is None for delta in before)
        return last

    def stats(self) -> dict[str, Any]:
        answers: list[Any] = []
        self.driver._take(Call("stats", {}, lambda value, error: answers.append(value)))
        return answers[0]


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(num_pages=NUM_PAGES, max_num_seqs=8)


def requests(tag: str, count: int = 12) -> list[tuple[str, Request]]:
    return [("f", Request(f"{tag}{i}", [5, 6, i], 6)) for i in range(count)]


def test_a_failed_step_ends_every_open_request_once_and_the_engine_goes_on(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.raise_at = {3: OSError("secret path")}
    told = Told(worker)
    with caplog.at_level(logging.ERROR):
        told.run(*requests("a"))
    assert "secret path" in caplog.text
    for index in range(12):  # 8 ran, 4 waited
        last = told.last(f"a{index}")
        assert (last.finish, last.error_code) == ("error", "engine_error")
        assert last.error is not None
        assert "OSError" in last.error
        assert "secret" not in last.error
    told.run(*requests("b"))
    assert {told.last(f"b{i}").finish for i in range(12)} == {"length"}
    assert told.stats()["finished"] == {"error": 12, "length": 12}
    assert told.stats()["pages_referenced"] == 0
    told.driver._loop.scheduler.audit()


def test_requests_that_a_half_done_step_forgot_are_told_too(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(worker)
    scheduler = told.driver._loop.scheduler

    def apply(*args: Any) -> Any:
        del scheduler._live["a0"]  # ended, but its delta is lost with the others
        raise MemoryError

    monkeypatch.setattr(scheduler, "apply", apply)
    told.run(*requests("a", 2))
    assert {told.last(f"a{i}").error_code for i in range(2)} == {"engine_error"}


def test_too_many_failures_in_a_row_end_the_engine(worker: FakeWorker) -> None:
    told = Told(worker)
    told_of = 0
    for round_ in range(3):  # failures between which something works do not add up
        worker.raise_at = {
            worker.steps + k: RuntimeError("flaky") for k in range(1, MAX_FAILED_STEPS)
        }
        for attempt in range(MAX_FAILED_STEPS):
            told.run(*requests(f"{round_}-{attempt}-", 1))
            told_of += 1
    assert len(told.deltas) == told_of
    worker.raise_at = {worker.steps + k: RuntimeError("device lost") for k in range(1, 9)}
    for attempt in range(MAX_FAILED_STEPS - 1):
        told.run(*requests(f"last{attempt}-", 1))
    with pytest.raises(RuntimeError, match="device lost"):
        told.run(*requests("end", 1))
    assert told.last("end0").error_code == "engine_error"


def test_a_duplicate_id_is_answered(worker: FakeWorker) -> None:
    told = Told(worker)
    told.run(("f", Request("a", [5], 4)), ("g", Request("a", [6], 4)))
    assert told.last("a", "g").error_code == "duplicate_request_id"
    assert "'a'" in str(told.last("a", "g").error)
    assert told.last("a", "f").finish == "length"


def test_columns_reach_their_fronts_whatever_is_open(worker: FakeWorker) -> None:
    told = Told(worker)
    for name, front in (("a", "f"), ("b", "g"), ("c", "f")):
        told.driver._take((front, Request(name, [5], 20)))
    told.driver._take(Drop("g"))
    rows = StepOutput(["a", "b", "c"], [7, 8, 9], [])
    told.driver._take(("g", Request("d", [5], 20)))
    told.driver._deliver(rows)
    told.driver._deliver(StepOutput(["a"], [1], [Delta("d", [4], "stop"), Delta("c", [3])]))
    told.driver._deliver(StepOutput(["a", "c"], [2, 5]))  # one front is left
    ids = {key: [i for delta in news for i in delta.ids] for key, news in told.deltas.items()}
    assert ids == {("f", "a"): [7, 1, 2], ("f", "c"): [9, 3, 5], ("g", "d"): [4]}


def test_the_reason_of_an_abort_reaches_the_counters(worker: FakeWorker) -> None:
    told = Told(worker)
    told.run(*requests("a", 2), ("f", "a0", "stop"), ("f", "a1", "abort"), ("f", "nobody", "stop"))
    assert told.stats()["finished"] == {"stop": 1, "abort": 1}


@pytest.mark.breaks_audit
def test_a_failed_audit_is_told_once_and_no_end(
    worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told(worker)
    told.run(*requests("a", 1))
    told.driver._loop.scheduler._free_slots.append(3)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            told.driver._idle()
    assert caplog.text.count("slots free and in use are") == 1
    assert told.stats()["audit_failures"] == 3
    answers: list[Any] = []
    told.driver._take(Call("audit", {}, lambda value, error: answers.append(error)))
    assert "slots free and in use" in answers[0]


def test_a_reset_of_the_cache_tells_how_many_pages_were_forgotten(worker: FakeWorker) -> None:
    told = Told(worker)
    told.run(("f", Request("a", list(range(40)), 4)))  # two full pages
    answers: list[Any] = []
    for _ in range(2):
        told.driver._take(Call("reset_prefix_cache", {}, lambda v, e: answers.append((v, e))))
    assert answers == [(2, None), (0, None)]
    assert told.stats()["pages_cached"] == 0
