"""Deadlines: who is late ends at once, with its reason, and leaves nothing behind."""

from __future__ import annotations

import pytest

from octavo.core.preemption import Preemption
from octavo.core.request import Request
from tests.fakes.loop import AdmitAll, SchedulerLoop, expected, make_loop, request


def steps(loop: SchedulerLoop, count: int) -> None:
    """Each takes a second of the loop's clock."""
    for _ in range(count):
        loop.step()


def test_a_request_timeout_ends_what_runs_and_it_keeps_its_ids() -> None:
    loop = make_loop()
    late = request("late", 9, 50, timeout=5.0)
    loop.submit(late, request("other", 9, 8))
    steps(loop, 4)
    assert loop.scheduler.expire(4.9) == []
    (delta,) = loop.scheduler.expire(5.0)
    assert (delta.id, delta.finish, delta.error_code) == ("late", "timeout", "request_timeout")
    assert delta.error == "The request did not end within 5 s."
    loop.scheduler.audit()
    stats = loop.scheduler.stats()
    assert (stats.running, stats.pages_referenced) == (1, 3)
    assert (stats.finished, stats.timeouts) == ({"timeout": 1}, {"request_timeout": 1})
    output = loop.outputs.pop("late")
    assert output.ids == expected(late, 4)
    assert loop.scheduler.expire(100.0) == []
    loop.run()


def test_a_queue_timeout_ends_who_has_not_started() -> None:
    loop = make_loop(seqs=1)
    loop.submit(request("first", 9, 9, queue_timeout=2.5), request("late", 9, queue_timeout=2.5))
    steps(loop, 2)
    (delta,) = loop.scheduler.expire(2.5)
    assert (delta.id, delta.finish, delta.error_code) == ("late", "timeout", "queue_timeout")
    assert delta.error == "The request waited for its start for 2.5 s."
    assert (delta.ids, delta.cached_tokens) == ([], 0)
    assert loop.scheduler.stats().timeouts == {"queue_timeout": 1}
    del loop.outputs["late"]
    assert loop.run()["first"].finish == "length"


def test_who_has_started_and_was_preempted_does_not_queue() -> None:
    loop = make_loop(pages=6, admission=AdmitAll())
    loop.submit(*(request(name, 7, 14, queue_timeout=8.5) for name in ("old", "new")))
    steps(loop, 9)
    assert loop.scheduler.stats().preemptions
    assert loop.scheduler.stats().waiting
    assert {output.finish for output in loop.run().values()} == {"length"}


def test_the_sooner_of_two_limits_is_told_and_only_once() -> None:
    loop = make_loop(seqs=1)
    loop.submit(request("first", 9, 9), request("late", 9, timeout=3.0, queue_timeout=2.0))
    loop.run()
    assert loop.outputs["late"].error_code == "queue_timeout"
    assert loop.scheduler.stats().timeouts == {"queue_timeout": 1}


def test_siblings_go_on_when_their_parent_is_late() -> None:
    loop = make_loop(tokens=8)
    prompt = list(range(30))
    loop.submit(request("s0", prompt, timeout=1.5), request("s1", prompt, parent="s0"))
    steps(loop, 1)
    assert loop.scheduler.stats().running == 1
    outputs = loop.run()
    assert outputs["s0"].error_code == "request_timeout"
    assert outputs["s1"].ids == expected(Request("s1", prompt, 4))


def test_a_parked_one_that_is_late_gives_its_host_pages_back() -> None:
    loop = make_loop(
        pages=6,
        admission=AdmitAll(),
        preemption=Preemption("swap"),
        host_pages=8,
        worker={"host_pages": 8},
    )
    loop.submit(request("old", 7, 14), request("new", 7, 14, timeout=8.5))
    steps(loop, 8)
    stats = loop.scheduler.stats()
    assert stats.swapped == 1
    assert stats.host_pages_free < 8
    steps(loop, 1)
    assert loop.outputs["new"].error_code == "request_timeout"
    assert loop.scheduler.stats().host_pages_free == 8
    loop.run()


@pytest.mark.parametrize("end", ["complete", "abort"])
def test_deadlines_of_ended_requests_do_not_pile_up(end: str) -> None:
    loop = make_loop()
    for number in range(400):
        loop.submit(request(f"r{number}", 3, 1, timeout=1e6, queue_timeout=1e6))
        if end == "abort":
            loop.abort(f"r{number}")
        else:
            loop.step()
    assert len(loop.scheduler._deadlines._heap) < 70
    loop.run()


def test_a_deadline_is_that_of_one_request_not_of_its_id() -> None:
    loop = make_loop()
    loop.submit(request("a", 3, 1, timeout=5.0))
    loop.run()
    del loop.outputs["a"]
    loop.submit(request("a", 3, 9))
    assert loop.run()["a"].finish == "length"
    assert loop.now > 5.0
