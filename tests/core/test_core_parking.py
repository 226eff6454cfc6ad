"""Parked sequences: host pages are conserved, hold what was computed, and share nothing stale."""

from __future__ import annotations

from typing import Any

from octavo.core.kvcache import KVCache
from octavo.core.pages import PagePool
from octavo.core.plan import StepPlan
from octavo.core.preemption import Preemption
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from tests.fakes.loop import AdmitAll, SchedulerLoop, expected, ids_of, make_loop, request


def swapping_loop(host_pages: int = 32, **others: Any) -> SchedulerLoop:
    return make_loop(
        preemption=Preemption("swap"),
        host_pages=host_pages,
        worker={"host_pages": host_pages},
        admission=AdmitAll(),
        **others,
    )


def park(loop: SchedulerLoop, name: str) -> None:
    """Step until that request is parked."""
    for _ in range(50):
        if loop.scheduler._live[name].parked:
            return
        loop.step()
    raise AssertionError(f"{name} is never parked")


def rivals() -> list[Request]:
    """Two that do not both fit into six pages of four tokens to their ends."""
    return [request("old", 7, 14), request("new", 7, 14)]


def test_a_parked_sequence_goes_on_without_computing_anything_again() -> None:
    loop = swapping_loop(pages=6, prefix_caching=False)
    loop.submit(*rivals())
    assert ids_of(loop.run()) == {r.id: expected(r) for r in rivals()}
    stats = loop.scheduler.stats()
    assert stats.preemptions_swap == stats.preemptions > 0
    assert stats.recomputed_tokens == 0
    assert stats.computed_tokens == sum(7 + 14 - 1 for _ in "ab")


def test_without_room_on_the_host_it_is_computed_again() -> None:
    loop = swapping_loop(pages=6, host_pages=1, prefix_caching=False)
    loop.submit(*rivals())
    assert ids_of(loop.run()) == {r.id: expected(r) for r in rivals()}
    stats = loop.scheduler.stats()
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (0, stats.preemptions)
    assert stats.recomputed_tokens > 0


def test_host_pages_come_back_when_a_parked_request_ends() -> None:
    loop = swapping_loop(pages=6)
    loop.submit(*rivals())
    park(loop, "new")
    assert loop.scheduler.stats().host_pages_free < 32
    loop.abort("new")
    assert loop.scheduler.stats().host_pages_free == 32
    loop.run()


def test_what_was_parked_before_a_reset_is_not_shared_after_it() -> None:
    loop = swapping_loop(pages=6)
    loop.submit(*rivals())
    park(loop, "new")
    loop.scheduler.reset_prefix_cache()
    loop.run()
    again = Request("again", rivals()[1].prompt, 1)
    loop.submit(again)
    assert loop.run()["again"].cached_tokens == 0


def test_what_a_reset_has_overtaken_is_not_shared_after_it_was_parked() -> None:
    loop = swapping_loop(pages=6)
    loop.submit(*rivals())
    loop.step()
    loop.scheduler.reset_prefix_cache()
    park(loop, "new")
    loop.run()
    loop.submit(Request("again", rivals()[1].prompt, 1))
    assert loop.run()["again"].cached_tokens == 0


def test_host_pages_that_are_still_to_be_read_are_not_parked_on() -> None:
    """Who resumes reads its host pages after whoever is parked in the same plan has written."""
    cache = KVCache(PagePool(9, 4), prefix_caching=False, host_pages=4)
    first, second = (Sequence(request(name, 8, 8), (0.0, 0), 16) for name in "ab")
    assert cache.begin(first, cache.quote(first, 100))
    first.scheduled = 8
    heir = first.successor()
    assert cache.park(first, heir)
    cache.release(first)
    cache.take_swaps(StepPlan(0))
    assert cache.begin(second, cache.quote(second, 100))
    second.scheduled = 8
    assert cache.begin(heir, cache.quote(heir, 100))
    assert cache.park(second, second.successor())
    plan = StepPlan(1)
    cache.take_swaps(plan)
    assert plan.swap_in_hosts
    assert not set(plan.swap_in_hosts) & set(plan.swap_out_hosts)
    assert cache.host.num_free == 2
