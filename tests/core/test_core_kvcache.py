"""Pages of sequences by layer group: quotes are exact, and groups multiply what is held."""

from __future__ import annotations

import pytest

from octavo.core.kvcache import KVCache
from octavo.core.pages import BlockSpec, PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence

FULL, SLIDING = BlockSpec(), BlockSpec(window=10)


def make_cache(*blocks: BlockSpec, pages: int = 64, host_pages: int = 0) -> KVCache:
    return KVCache(PagePool(pages + 1, 4, blocks), host_pages=host_pages)


def sequence(num_tokens: int, name: str = "a") -> Sequence:
    prompt = [(sum(name.encode()) * 31 + i) % 500 for i in range(num_tokens)]
    return Sequence(Request(name, prompt, 20), (0.0, 0), num_tokens + 20)


def compute(cache: KVCache, seq: Sequence, budget: int) -> None:
    """The whole prompt, in slices of ``budget``."""
    assert cache.begin(seq, cache.quote(seq, budget))
    at = min(seq.total, seq.scheduled + budget)
    while at < seq.total:
        cache.settle(seq, at)
        at = min(seq.total, at + budget)
        assert cache.grow(seq, at) is not None
    seq.scheduled = at
    cache.settle(seq, at)


@pytest.mark.parametrize("blocks", [(FULL,), (SLIDING,), (FULL, SLIDING, FULL)])
@pytest.mark.parametrize("budget", [3, 16, 100])
def test_a_quote_is_what_a_sequence_comes_to_hold(
    blocks: tuple[BlockSpec, ...], budget: int
) -> None:
    cache, seq = make_cache(*blocks), sequence(50)
    quote = cache.quote(seq, budget)
    assert quote.claims + quote.promised == cache.pool.layout.peak_pages(50, budget)
    compute(cache, seq, budget)
    assert cache.pool.num_referenced <= quote.claims + quote.promised
    cache.audit([seq], [])
    cache.release(seq)
    assert (cache.num_held, cache.promised) == (0, 0)


def test_a_quote_counts_cached_pages_once_and_promises_the_rest() -> None:
    cache, first, second = make_cache(FULL), sequence(50), sequence(50)
    compute(cache, first, 100)
    quote = cache.quote(second, 100)
    assert (quote.start, quote.end) == (48, 50)  # twelve pages are shared
    assert (quote.claims, quote.promised) == (1, 0)
    cache.release(first)
    assert cache.quote(second, 100).claims == 13  # nobody else holds them now


def test_promises_are_kept_page_by_page() -> None:
    cache, seq = make_cache(FULL), sequence(50)
    assert cache.begin(seq, cache.quote(seq, 8))
    held = [cache.num_held]
    for end in range(16, 51, 8):
        assert cache.grow(seq, end) is not None
        held.append(cache.num_held)
    assert cache.grow(seq, 50) is not None
    assert {*held, cache.num_held} == {13}
    assert cache.promised == 0
    assert cache.grow(seq, 53) is not None
    assert cache.num_held == 14


def test_a_failed_beginning_changes_nothing() -> None:
    cache, seq = make_cache(FULL, pages=5), sequence(50)
    assert not cache.begin(seq, cache.quote(seq, 100))
    assert (cache.num_held, seq.tables, seq.scheduled) == (0, [], 0)
    cache.audit([], [seq])


@pytest.mark.parametrize("blocks", [(FULL,), (SLIDING, FULL)])
def test_a_parked_sequence_needs_what_it_held(blocks: tuple[BlockSpec, ...]) -> None:
    cache, seq = make_cache(*blocks, host_pages=40), sequence(50)
    compute(cache, seq, 100)
    seq.tokens.append(7)  # what was sampled is known, and not computed
    seq.total += 1
    before = [list(table) for table in seq.tables]
    held = cache.pool.num_referenced
    heir = seq.successor()
    assert cache.park(seq, heir)
    cache.release(seq)
    cache.pool.reset_cache()
    out = StepPlan(0)
    cache.take_swaps(out)
    assert len(out.swap_out_hosts) == held == 40 - cache.host.num_free
    quote = cache.quote(heir, 100)
    assert (quote.start, quote.end, quote.claims) == (50, 51, held)
    assert cache.begin(heir, quote)
    back = StepPlan(1)
    cache.take_swaps(back)
    where = dict(zip(out.swap_out_hosts, out.swap_out_pages, strict=True))
    moved = {
        page: where[host] for host, page in zip(back.swap_in_hosts, back.swap_in_pages, strict=True)
    }
    assert [[moved.get(page, page) for page in table] for table in heir.tables] == before
    assert cache.host.num_free == 40
    cache.audit([heir], [])


def test_without_room_on_the_host_nothing_is_parked() -> None:
    cache, seq = make_cache(FULL, host_pages=12), sequence(50)
    compute(cache, seq, 100)
    heir = seq.successor()
    assert not cache.park(seq, heir)
    assert (heir.parked, cache.host.num_free) == ([], 12)


def test_twice_the_groups_in_twice_the_pages_admit_as_many() -> None:
    def most_running(groups: int) -> int:
        pool = PagePool(200 * groups + 1, 4, (FULL,) * groups)
        scheduler = Scheduler(
            pool=pool, max_num_seqs=64, max_num_batched_tokens=64, max_model_len=200
        )
        for index in range(64):
            scheduler.submit(Request(str(index), [index + 1] * 5, 100), 0.0)
        most = 0
        for _ in range(30):
            plan = scheduler.plan(0.0)
            slots = [slot for slot, last in zip(plan.slots, plan.samples, strict=True) if last]
            ids = [7] * len(slots)
            scheduler.apply(StepResult(plan.step, slots, [1] * len(slots), ids), 0.0)
            most = max(most, scheduler.stats().running)
        return most

    assert most_running(1) == most_running(2) == most_running(3) < 64


def test_a_hit_with_windows_is_promised_what_it_will_take() -> None:
    """Entries that a window hides are no pages: what follows a long hit needs new ones."""
    cache, first = make_cache(FULL, SLIDING), sequence(48)
    compute(cache, first, 100)
    cache.release(first)
    longer = Sequence(Request("b", [*first.tokens, *range(40)], 20), (0.0, 1), 108)
    quote = cache.quote(longer, 8)
    assert quote.start == 48
    assert cache.begin(longer, quote)
    most = 0
    for at in range(56, 89, 8):
        assert cache.grow(longer, at) is not None
        most = max(most, cache.pool.num_referenced)
        cache.settle(longer, at)
    assert most <= quote.claims + quote.promised
