"""Keys of the prefix cache, and the longest hit over layer groups."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.pages import BlockSpec, PagePool
from octavo.core.prefix import chain, group_key, longest_hit, prompt_hashes, root_hash


def test_no_two_roots_collide() -> None:
    values = [None, "", "a", "at", "ta", "-", "a\0"]
    pairs = list(itertools.product(values, values))
    roots = {root_hash(salt, adapter) for salt, adapter in pairs}
    assert len(roots) == len(pairs)
    assert root_hash() == root_hash(None, None)


def test_chain_is_typed_and_length_delimited() -> None:
    root = root_hash()
    keys = {
        root,
        chain(root, []),
        chain(root, [0]),
        chain(root, [0, 0]),
        chain(root + bytes(4), [0]),
        chain(b"", [0, 0]),
        chain(chain(root, [0]), [0]),
    }
    assert len(keys) == 7


ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(a=ids, b=ids, page_size=st.sampled_from([1, 4, 16]))
@settings(max_examples=60)
def test_keys_are_equal_exactly_as_far_as_the_prefixes_are(
    a: list[int], b: list[int], page_size: int
) -> None:
    first, second = (prompt_hashes(x, page_size, root_hash()) for x in (a, b))
    assert len(first) == len(a) // page_size
    for index, (x, y) in enumerate(zip(first, second, strict=False)):
        end = (index + 1) * page_size
        assert (x == y) == (a[:end] == b[:end])
    assert not set(first) & set(prompt_hashes(a, page_size, root_hash("salt")))


def cached(pool: PagePool, hashes: list[bytes], group: int, missing: set[int]) -> list[int]:
    grant = pool.reserve((), len(hashes))
    assert grant is not None
    for index, (page, key) in enumerate(zip(grant.fresh, hashes, strict=True)):
        if index not in missing:
            pool.publish(page, group_key(key, group))
    return grant.fresh


KEYS = [bytes([index]) for index in range(6)]


def test_hit_ends_at_the_first_page_missing() -> None:
    pool = PagePool(20, page_size=4)
    pages = cached(pool, KEYS, 0, missing={3})
    assert longest_hit(pool, KEYS) == [pages[:3]]
    assert longest_hit(pool, KEYS[:2]) == [pages[:2]]
    assert longest_hit(pool, []) == [[]]


def test_window_group_needs_only_what_the_next_token_sees() -> None:
    window = BlockSpec(window=9)  # the next token sees 8 tokens before it: 2 pages of 4
    pool = PagePool(40, page_size=4, blocks=(BlockSpec(), window))
    full = cached(pool, KEYS, 0, missing={5})
    seen = cached(pool, KEYS, 1, missing={0, 1, 4})
    assert longest_hit(pool, KEYS) == [full[:4], [0, 0, *seen[2:4]]]


def test_groups_shorten_each_other() -> None:
    a, b = BlockSpec(window=5), BlockSpec(window=9)
    pool = PagePool(40, page_size=4, blocks=(a, b))
    first = cached(pool, KEYS, 0, missing={1, 2, 3, 5})
    cached(pool, KEYS, 1, missing={3})
    assert longest_hit(pool, KEYS) == [first[:1], [pool.lookup(group_key(KEYS[0], 1))]]


@given(
    windows=st.lists(st.just(0) | st.integers(2, 20), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_hit_is_the_longest_that_every_group_can_go_on_from(
    windows: list[int], data: st.DataObject
) -> None:
    """Against the definition: after n pages, a full group needs them all, a window those of the
    window - 1 tokens before the next one."""
    blocks = tuple(BlockSpec(window=window) for window in windows)
    pool = PagePool(100, page_size=4, blocks=blocks)
    missing = [data.draw(st.sets(st.integers(0, len(KEYS) - 1))) for _ in windows]
    pages = [cached(pool, KEYS, group, gone) for group, gone in enumerate(missing)]

    def needed(window: int, length: int) -> range:
        return range(max(0, length * 4 - (window - 1)) // 4 if window else 0, length)

    length = max(
        n
        for n in range(len(KEYS) + 1)
        if all(not gone & set(needed(w, n)) for w, gone in zip(windows, missing, strict=True))
    )
    assert longest_hit(pool, KEYS) == [
        [table[i] if i in needed(window, length) else 0 for i in range(length)]
        for window, table in zip(windows, pages, strict=True)
    ]
