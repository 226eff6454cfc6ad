"""The page pool: reference counts, free queue, LRU, duplicates, atomic grants."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.errors import AuditError
from octavo.core.pages import UNLIMITED, BlockSpec, CacheLayout, PagePool


def take(pool: PagePool, count: int, cached: tuple[int, ...] = ()) -> list[int]:
    grant = pool.reserve(cached, count)
    assert grant is not None
    return grant.cached + grant.fresh


def test_null_page_is_never_handed_out() -> None:
    pool = PagePool(5)
    assert sorted(take(pool, 4)) == [1, 2, 3, 4]
    assert pool.reserve((), 1) is None


def test_a_refused_grant_changes_nothing() -> None:
    pool = PagePool(6)
    table = take(pool, 2)
    pool.publish(table[0], b"a")
    pool.release(table)
    held = take(pool, 2)
    before = (pool.num_free, pool.num_cached, pool.num_referenced)
    assert pool.reserve((table[0],), 3) is None
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == before
    pool.audit([held])
    assert pool.lookup(b"a") == table[0]


def test_hits_are_shared() -> None:
    pool = PagePool(6)
    first = take(pool, 2)
    pool.publish(first[0], b"a")
    page = pool.lookup(b"a")
    assert page == first[0]
    grant = pool.reserve((page,), 1)
    assert grant is not None
    pool.audit([first, grant.cached + grant.fresh])
    pool.release(first)
    pool.audit([grant.cached + grant.fresh])
    assert pool.num_referenced == 2


def test_free_pages_go_before_cached_ones_and_those_by_last_use() -> None:
    pool = PagePool(5)
    pages = take(pool, 4)
    for index in (0, 1, 2):
        pool.publish(pages[index], bytes([index]))
    for index in (0, 1, 2, 3):
        pool.release([pages[index]])
    pool.release(take(pool, 0, (pages[0],)))  # a hit makes it the most recently used
    order = [take(pool, 1)[0] for _ in range(4)]
    assert order == [pages[3], pages[1], pages[2], pages[0]]
    assert pool.num_cached == 0
    assert all(pool.lookup(bytes([index])) is None for index in (0, 1, 2))


def test_a_prefix_outlives_its_extension() -> None:
    pool = PagePool(4)
    table = take(pool, 3)
    for index, page in enumerate(table):
        pool.publish(page, bytes([index]))
    pool.release(table)
    assert take(pool, 1) == [table[2]]
    assert pool.lookup(b"\0") == table[0]


def test_duplicates_coexist_and_take_over() -> None:
    pool = PagePool(4)
    a, b, c = take(pool, 3)
    for page in (a, b, c):
        pool.publish(page, b"same")
    assert pool.lookup(b"same") == a
    pool.release([a])
    assert take(pool, 1) == [a]  # evicted
    assert pool.lookup(b"same") in (b, c)
    pool.release([b, c])
    pool.audit([[a]])
    take(pool, 1)
    assert pool.lookup(b"same") in (b, c)
    take(pool, 1)
    assert pool.lookup(b"same") is None


def test_reset_forgets_referenced_pages_too() -> None:
    pool = PagePool(4)
    table = take(pool, 2)
    pool.publish(table[0], b"a")
    pool.publish(table[1], b"b")
    pool.release([table[1]])
    pool.reset_cache()
    assert pool.lookup(b"a") is None
    assert pool.lookup(b"b") is None
    assert pool.num_cached == 0
    pool.audit([[table[0]]])
    pool.publish(table[0], b"a2")
    assert pool.lookup(b"a2") == table[0]


def test_audit_finds_a_leak_a_double_release_and_a_lost_count() -> None:
    pool = PagePool(4)
    table = take(pool, 2)
    with pytest.raises(AuditError, match="otherwise than the tables say"):
        pool.audit([table[:1]])
    pool.release([table[0]])
    with pytest.raises(AuditError, match="more often"):
        pool.release([table[0]])
    pool.publish(table[1], b"a")
    with pytest.raises(AuditError, match="twice"):
        pool.publish(table[1], b"b")


def test_null_pages_of_a_table_are_skipped() -> None:
    pool = PagePool(4)
    table = [0, 0, *take(pool, 1)]
    pool.audit([table])
    pool.release(table)
    assert pool.num_free == 3


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (8, 0)])
def test_absurd_sizes_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError):
        PagePool(num_pages, page_size)


def test_layout_counts_pages_of_each_group() -> None:
    full = BlockSpec(layers=(0, 2), bytes_per_token=8)
    window = BlockSpec(layers=(1, 3, 5), bytes_per_token=8, scale_bytes_per_token=1, window=32)
    state = BlockSpec(layers=(4,), kind="state", bytes_per_sequence=1000)
    layout = CacheLayout((full, window, state), page_size=16)
    assert layout.page_bytes == 16 * 3 * 9
    assert layout.group_pages(33) == [3, 3, 3]
    assert layout.state_pages == 3
    assert layout.peak_pages(33, chunk=1) == 3 + 3 + 3
    assert layout.peak_pages(320, chunk=1) == 20 + 3 + 3
    assert layout.peak_pages(320, chunk=50) == 20 + 7 + 3
    assert layout.largest_sequence(10, chunk=1) == 64
    assert layout.largest_sequence(3, chunk=1) == layout.largest_sequence(2, chunk=1) == 0


def test_a_sequence_that_only_windows_see_needs_no_more_pages_as_it_grows() -> None:
    layout = CacheLayout((BlockSpec(window=32), BlockSpec(window=64)), page_size=16)
    assert layout.peak_pages(10**6, chunk=16) == 4 + 6
    assert layout.largest_sequence(10, chunk=16) == UNLIMITED
    assert layout.largest_sequence(9, chunk=16) == 5 * 16  # the larger window is not reached
    assert layout.largest_sequence(7, chunk=16) == 3 * 16


LAYOUTS = st.builds(
    CacheLayout,
    st.lists(
        st.one_of(
            st.builds(BlockSpec, window=st.just(0) | st.integers(1, 100)),
            st.just(BlockSpec(kind="state", bytes_per_sequence=1)),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda blocks: (BlockSpec(bytes_per_token=1), *blocks)),
    st.sampled_from([1, 16, 32]),
)


@given(LAYOUTS, st.integers(0, 200), st.integers(1, 300))
def test_the_largest_sequence_fits_and_one_more_page_of_tokens_does_not(
    layout: CacheLayout, num_pages: int, chunk: int
) -> None:
    tokens = layout.largest_sequence(num_pages, chunk)
    assert tokens == 0 or layout.peak_pages(tokens, chunk) <= num_pages
    assert layout.peak_pages(tokens + 1, chunk) > num_pages


@given(LAYOUTS, st.integers(1, 400), st.lists(st.integers(1, 60), min_size=1), st.randoms())
def test_no_sequence_holds_more_than_its_peak(
    layout: CacheLayout, length: int, sizes: list[int], random: Random
) -> None:
    """Counted page by page: those that the queries of each step see, in chunks of any size."""
    page_size, start, most = layout.page_size, 0, 0
    while start < length:
        end = min(length, start + random.choice(sizes))
        pages = layout.state_pages
        for block in layout.blocks:
            if block.kind == "paged":
                first = max(0, start - block.window + 1) if block.window else 0
                pages += (end - 1) // page_size - first // page_size + 1
        start, most = end, max(most, pages)
    assert most <= layout.peak_pages(length, max(sizes))


class PoolMachine(RuleBasedStateMachine):
    """Tables that share, publish and release pages at random; contents never change when seen."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9)
        self.tables: list[list[int]] = []
        self.keys: dict[int, bytes] = {}  # model: what each published page holds
        self.serial = 0

    @rule(count=st.integers(0, 6), keys=st.sets(st.integers(0, 5)))
    def reserve(self, count: int, keys: set[int]) -> None:
        found = [self.pool.lookup(bytes([key])) for key in sorted(keys)]
        hits = [page for page in found if page is not None]
        for key, page in zip(sorted(keys), found, strict=True):
            if page is not None:
                assert self.keys[page] == bytes([key])
        available = self.pool.num_available
        held = {page for table in self.tables for page in table}
        needed = count + sum(page not in held for page in hits)
        grant = self.pool.reserve(hits, count)
        assert (grant is None) == (needed > available)
        if grant is not None:
            assert grant.cached == hits
            assert not held & set(grant.fresh)
            assert 0 not in grant.fresh
            for page in grant.fresh:
                self.keys.pop(page, None)
            self.tables.append(grant.cached + grant.fresh)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.integers(0, 5))
    def publish(self, data: st.DataObject, key: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        unknown = [page for page in table if page not in self.keys]
        if unknown:
            self.pool.publish(unknown[0], bytes([key]))
            self.keys[unknown[0]] = bytes([key])

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.keys.clear()

    @invariant()
    def conserved(self) -> None:
        pool = self.pool
        pool.audit(self.tables)
        assert pool.num_free + pool.num_cached + pool.num_referenced == 8
        assert set(self.keys.values()) == {
            bytes([key]) for key in range(6) if pool.lookup(bytes([key])) is not None
        }


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
