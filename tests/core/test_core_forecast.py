"""The forecast: what it counts, what bounds it, how careful it gets, and what it costs."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from octavo.core.admission import PoolState
from octavo.core.forecast import MAX_CAUTION, MIN_CAUTION, Forecast
from octavo.core.plan import StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence
from octavo.core.waiting import AgedPriority, FairShare, Fcfs, Policy
from tests.fakes.loop import make_loop, request

PAGE = 16


class Pool:
    """Sequences that hold what they claim, and a forecast that hears of all of them."""

    def __init__(self, usable: int) -> None:
        self.usable = usable
        self.forecast = Forecast(PAGE, 1 << 14)
        self.seqs: list[tuple[Sequence, int]] = []

    def admits(self, prompt: int = PAGE, max_tokens: int = 1024, claims: int = 1) -> bool:
        seq = self._sequence(prompt, max_tokens)
        self.forecast.begin_step()
        held = sum(pages for _, pages in self.seqs)
        if not self.forecast.admits(seq, claims, PoolState(self.usable, held)):
            return False
        seq.slot = len(self.seqs)
        self.seqs.append((seq, claims))
        self.forecast.joined(seq, claims)
        return True

    def fill(self, **terms: Any) -> int:
        """How many can join at once."""
        before = len(self.seqs)
        while self.admits(**terms):
            pass
        return len(self.seqs) - before

    def preempt(self, tokens: int = 400) -> None:
        """One joins, and loses so many computed tokens."""
        seq = self._sequence(PAGE, PAGE)
        seq.slot, seq.scheduled = len(self.seqs), tokens
        self.forecast.joined(seq, 1)
        self.forecast.preempted(seq)
        self.forecast.left(seq, ended=False)

    def emptied(self) -> Pool:
        for seq, _ in self.seqs:
            self.forecast.left(seq, ended=False)
        self.seqs.clear()
        return self

    def _sequence(self, prompt: int, max_tokens: int) -> Sequence:
        name = str(len(self.seqs))
        return Sequence(Request(name, [1] * prompt, max_tokens), (0.0, 0), prompt + max_tokens)


def learn(pool: Pool, pages: int, count: int = 300) -> None:
    """So many answers of that many pages, one after the other."""
    forecast = pool.forecast
    for _ in range(count):
        assert pool.admits()
        seq, _ = pool.seqs[-1]
        for _ in range(pages):
            seq.tokens += [0] * PAGE
            forecast.grew(seq)
            forecast.begin_step()
        forecast.left(seq, ended=True)
        pool.seqs.pop()


def test_max_tokens_bounds_what_is_expected() -> None:
    room = [Pool(200).fill(max_tokens=pages * PAGE) for pages in (1, 4, 64)]
    assert room[0] == pytest.approx(99, abs=2)  # each takes the page that it claims, and one more
    assert room[0] > 1.5 * room[1] > 1.5 * room[2] > 0


@pytest.mark.parametrize("pages", [5, 7, 16, 40, 128, 130])
def test_who_must_end_between_two_horizons_counts_with_all_it_may_take(pages: int) -> None:
    """Of answers as long as they may be, no more join than fit at their ends."""
    pool = Pool(10 * (1 + pages))
    pool.forecast._lengths.survival = lambda ages: np.ones(ages)  # type: ignore[method-assign]
    assert pool.fill(max_tokens=pages * PAGE) == 9  # 1 % is kept free


def test_answers_seen_decide_how_many_join() -> None:
    room = []
    for pages in (1, 8, 40):
        pool = Pool(400)
        learn(pool, pages)
        room.append(pool.fill())
    assert room[0] > 2 * room[1] > 3 * room[2] > 0
    assert room[2] * 42 <= 2 * 400  # what the long ones take if they never overlap better


def test_caution_rises_with_preemptions_and_falls_with_ends() -> None:
    calm, warned = Pool(400), Pool(400)
    forecast = warned.forecast
    for _ in range(8):
        before = forecast.caution
        warned.preempt()
        assert forecast.caution > before
    high = forecast.caution
    learn(warned, 1, count=5)
    assert forecast.caution < high
    learn(calm, 1, count=5)
    assert warned.fill() < calm.fill()
    learn(warned.emptied(), 1, count=2000)
    assert forecast.caution == MIN_CAUTION
    for _ in range(400):
        warned.preempt()
        assert forecast.caution <= MAX_CAUTION
    assert forecast.caution > MAX_CAUTION - 0.1


def test_a_shared_prefix_is_counted_once() -> None:
    prefix = list(range(400))
    running = []
    for shared in (True, False):
        loop = make_loop(pages=60, page_size=16, tokens=512, max_len=512)
        heads = [prefix if shared else [500 + i, *prefix[1:]] for i in range(8)]
        loop.submit(request("first", prefix, 30))
        loop.step()
        loop.submit(*(Request(str(i), [*heads[i], 7, i], 16) for i in range(7)))
        for _ in range(3):
            loop.step()
        running.append(loop.scheduler.stats().running)
        loop.run()
        assert loop.scheduler.stats().preemptions == 0
    assert running == [8, 2]


def test_shared_pages_stay_counted_when_the_first_owner_leaves() -> None:
    """Whoever came first was charged for the prefix; the others still hold it."""
    pool = Pool(100)
    assert pool.admits(claims=60, max_tokens=PAGE)
    assert pool.admits(claims=1, max_tokens=PAGE)
    owner, _ = pool.seqs[0]
    pool.forecast.left(owner, ended=True)
    newcomer = pool._sequence(PAGE, PAGE)
    assert not pool.forecast.admits(newcomer, 45, PoolState(100, held=61))
    assert pool.forecast.admits(newcomer, 30, PoolState(100, held=61))


def calls_of(scheduler: Scheduler, steps: int) -> int:
    """Function calls, of Python and of C, that so many steps make."""
    count = 0

    def tell(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for step in range(steps):
        sys.setprofile(tell)
        plan = scheduler.plan(float(step))
        sys.setprofile(None)
        slots = [s for s, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        result = StepResult(plan.step, slots, [1] * len(slots), [5] * len(slots))
        sys.setprofile(tell)
        scheduler.apply(result, float(step))
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("policy", [Fcfs, AgedPriority, FairShare])
def test_a_step_costs_the_same_however_many_wait(policy: type[Policy]) -> None:
    calls = []
    for waiting in (50, 5000):
        loop = make_loop(pages=64, page_size=16, seqs=64, max_len=512, policy=policy())
        for number in range(waiting):
            terms = {"tenant": f"t{number}", "timeout": 1e6}
            loop.scheduler.submit(request(str(number), 40, 200, **terms), 0.0)
        calls.append(calls_of(loop.scheduler, 60))
    assert calls[1] <= 1.02 * calls[0]


def test_answers_that_are_cut_off_count_as_ended() -> None:
    """Their pages come back as those of complete ones do, and that is what is foretold."""
    loop = make_loop(pages=400, page_size=4, seqs=8, max_len=400)
    for number in range(60):
        loop.submit(request(str(number), 4, 300))
        for _ in range(14):
            loop.step()
        loop.abort(str(number))
    lengths = loop.scheduler._admission._lengths  # type: ignore[attr-defined]
    lengths.refresh()
    assert lengths.survival(40)[10] < 0.3
