"""The KV cache as pages: what a page holds, who holds it, and what it is known by.

All layer groups share one pool of equal-sized pages. Page 0 is the null page: never
handed out, it fills table entries that nothing may read.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from octavo.core.errors import AuditError

NULL_PAGE = 0
UNLIMITED = sys.maxsize  # tokens of a sequence that needs no more pages as it grows


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """What one layer group keeps for a sequence.

    A paged group (full, sliding window, MLA latent) keeps ``bytes_per_token`` and
    ``scale_bytes_per_token`` for each token *and layer*; ``window`` > 0 says how many tokens a
    query sees, itself included. A state group keeps ``bytes_per_sequence``, whatever the length.
    """

    layers: tuple[int, ...] = (0,)
    bytes_per_token: int = 0
    scale_bytes_per_token: int = 0
    window: int = 0
    kind: Literal["paged", "state"] = "paged"
    bytes_per_sequence: int = 0

    def page_bytes(self, page_size: int) -> int:
        """Bytes of ``page_size`` tokens in all layers of the group."""
        per_token = self.bytes_per_token + self.scale_bytes_per_token
        return page_size * len(self.layers) * per_token


@dataclass(frozen=True)
class CacheLayout:
    """Layer groups over pages of ``page_size`` tokens: how many pages a sequence takes."""

    blocks: tuple[BlockSpec, ...]
    page_size: int

    def __post_init__(self) -> None:
        if not self.blocks or self.page_size < 1:
            raise ValueError("a cache layout needs a layer group and a page size of at least 1")

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: the largest group's (pages are equal, smaller groups pad)."""
        paged = [b.page_bytes(self.page_size) for b in self.blocks if b.kind == "paged"]
        return max(paged or [b.bytes_per_sequence for b in self.blocks])

    @cached_property
    def num_paged(self) -> int:
        """Groups whose tables grow with the sequence."""
        return sum(block.kind == "paged" for block in self.blocks)

    @cached_property
    def num_growing(self) -> int:
        """Groups that take another page for each page of tokens, however long the sequence is."""
        return sum(block.kind == "paged" and not block.window for block in self.blocks)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Tokens that a query of each group sees, itself included; 0: all."""
        return tuple(block.window for block in self.blocks)

    @cached_property
    def state_pages(self) -> int:
        """Pages a sequence takes whatever its length."""
        return sum(pages or 0 for pages in self._fixed_pages)

    @cached_property
    def _fixed_pages(self) -> tuple[int | None, ...]:
        """Table entries of each group for a sequence of any length; None where they grow."""
        page_bytes = max(self.page_bytes, 1)
        return tuple(
            None if block.kind == "paged" else -(-block.bytes_per_sequence // page_bytes)
            for block in self.blocks
        )

    def group_pages(self, num_tokens: int) -> list[int]:
        """Table entries of each group for a sequence of ``num_tokens``."""
        paged = -(-num_tokens // self.page_size)
        return [paged if pages is None else pages for pages in self._fixed_pages]

    def peak_pages(self, num_tokens: int, chunk: int) -> int:
        """Most pages, over all groups, that a sequence of ``num_tokens`` holds at once.

        Provided that a step computes at most ``chunk`` of its tokens, and that pages which left a
        window are freed before the next chunk gets its pages.
        """
        paged = -(-num_tokens // self.page_size)
        pages = self.state_pages + self.num_growing * paged
        for window in self.windows:
            if window:
                pages += min(paged, self._window_pages(window, chunk))
        return pages

    def largest_sequence(self, num_pages: int, chunk: int) -> int:
        """Tokens of the longest sequence whose :meth:`peak_pages` are at most ``num_pages``.

        A multiple of the page size; ``UNLIMITED`` where windows (or states) are all there is and
        they fit.
        """
        left = num_pages - self.state_pages
        windows = sorted(self._window_pages(window, chunk) for window in self.windows if window)
        growing = self.num_paged
        for most in windows:  # the groups that grow to ``most`` pages grow no further
            if left < growing * most:
                break
            left -= most
            growing -= 1
        if left < 0:
            return 0
        return left // growing * self.page_size if growing else UNLIMITED

    def _window_pages(self, window: int, chunk: int) -> int:
        """Most pages that the tokens seen by ``chunk`` queries lie on, themselves among them."""
        return -(-(window - 1 + chunk) // self.page_size) + 1


@dataclass(frozen=True, slots=True)
class Grant:
    """Pages that one reservation got, each referenced once more: cached ones, then fresh ones."""

    cached: list[int]
    fresh: list[int]


class PagePool:
    """Reference counts, a free queue that is also the LRU of cached pages, and a hash index.

    A page is *referenced* (in at least one table), *cached* (in none, but its contents are
    known by a hash) or *free*. The last two share one queue, an intrusive doubly linked
    list through page 0: free pages enter at the front, cached ones at the back, and a
    fresh page comes from the front. So nothing cached is evicted while a free page is left,
    then the least recently used goes first. All operations are O(1) a page.

    A page is published only when full, by the request that wrote it; from then on nobody writes
    it until it was evicted. Several pages may be published under one hash.
    """

    def __init__(
        self, num_pages: int, page_size: int = 16, blocks: tuple[BlockSpec, ...] = (BlockSpec(),)
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs a null page and at least one more, not {num_pages}")
        self.layout = CacheLayout(blocks, page_size)
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        self._hashes: list[bytes | None] = [None] * num_pages
        self._next = [*range(1, num_pages), 0]
        self._prev = [num_pages - 1, *range(num_pages - 1)]
        self._num_queued = num_pages - 1
        self._num_cached = 0
        self._index: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # further pages of an indexed hash

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that a reservation may take: free and cached ones."""
        return self._num_queued

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_free(self) -> int:
        return self._num_queued - self._num_cached

    @property
    def num_referenced(self) -> int:
        return self.num_usable - self._num_queued

    def reserve(self, cached: Collection[int], count: int) -> Grant | None:
        """Reference the distinct pages ``cached`` and ``count`` fresh ones, or change nothing.

        None if that many are not available.
        """
        refs = self._refs
        idle = [page for page in cached if not refs[page]]
        if len(idle) + count > self._num_queued:
            return None
        for page in idle:
            self._unlink(page)
        for page in cached:
            refs[page] += 1
        self._num_cached -= len(idle)
        self._num_queued -= len(idle)
        fresh = self.take(count)
        assert fresh is not None
        return Grant(list(cached), fresh)

    def take(self, count: int) -> list[int] | None:
        """Reference ``count`` fresh pages, or change nothing: None."""
        if count > self._num_queued:
            return None
        refs, hashes, after = self._refs, self._hashes, self._next
        fresh = []
        page = after[0]
        for _ in range(count):
            fresh.append(page)
            refs[page] = 1
            if hashes[page] is not None:
                self._forget(page)
                self._num_cached -= 1
            page = after[page]
        after[0] = page
        self._prev[page] = 0
        self._num_queued -= count
        return fresh

    def count_idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody references."""
        refs = self._refs
        return sum([not refs[page] for page in pages])

    def release(self, pages: list[int]) -> None:
        """Drop one reference of each page of a table (null pages are skipped).

        The table's last pages are evicted first: a prefix is worth more than its extension.
        """
        refs, hashes, after, before = self._refs, self._hashes, self._next, self._prev
        for page in reversed(pages):
            if page == NULL_PAGE:
                continue
            left = refs[page] - 1
            if left < 0:
                raise AuditError(f"page {page} was released more often than reserved")
            refs[page] = left
            if left:
                continue
            if hashes[page] is None:
                first = after[0]
                before[page], after[page] = 0, first
                after[0] = before[first] = page
            else:
                last = before[0]
                before[page], after[page] = last, 0
                before[0] = after[last] = page
                self._num_cached += 1
            self._num_queued += 1

    def publish(self, page: int, key: bytes) -> None:
        """Make a referenced, full page findable by the hash of all tokens up to its end."""
        if self._hashes[page] is not None:
            raise AuditError(f"page {page} was published twice")
        self._hashes[page] = key
        if self._index.setdefault(key, page) != page:
            self._twins.setdefault(key, []).append(page)

    def lookup(self, key: bytes) -> int | None:
        """A page with these contents, if there is one; not yet referenced."""
        return self._index.get(key)

    @property
    def num_findable(self) -> int:
        """Pages, referenced or not, that can be found by what they hold."""
        return sum(key is not None for key in self._hashes)

    def reset_cache(self) -> None:
        """Forget what every page holds. Referenced pages stay so, but cannot be found."""
        self._hashes = [None] * self.num_pages
        self._index.clear()
        self._twins.clear()
        self._num_cached = 0

    def audit(self, tables: Iterable[Iterable[int]]) -> None:
        """Recount everything from the tables in use. Raises :class:`AuditError` on a difference."""
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        counts[NULL_PAGE] = 0
        if counts != self._refs:
            bad = [p for p, n in enumerate(counts) if n != self._refs[p]]
            raise AuditError(f"pages {bad[:8]} are referenced otherwise than the tables say")
        queued = self._walk_queue()
        cached = sum(self._hashes[page] is not None for page in queued)
        referenced = sum(count > 0 for count in counts)
        if len(queued) != self._num_queued or cached != self._num_cached:
            raise AuditError(
                f"queue of {len(queued)} pages ({cached} cached) was counted as "
                f"{self._num_queued} ({self._num_cached})"
            )
        if len(queued) + referenced != self.num_usable:
            raise AuditError(
                f"{len(queued) - cached} free + {cached} cached + {referenced} referenced "
                f"pages are not {self.num_usable}"
            )
        self._audit_index()

    def _walk_queue(self) -> list[int]:
        queued: list[int] = []
        page = self._next[0]
        while page != NULL_PAGE:
            if self._refs[page] or self._prev[self._next[page]] != page:
                raise AuditError(f"page {page} is in the free queue but referenced or mislinked")
            queued.append(page)
            if len(queued) > self.num_usable:
                raise AuditError("the free queue is a loop")
            page = self._next[page]
        return queued

    def _audit_index(self) -> None:
        known = {page: key for key, page in self._index.items()}
        known.update((page, key) for key, pages in self._twins.items() for page in pages)
        hashed = {page: key for page, key in enumerate(self._hashes) if key is not None}
        if known != hashed or not self._twins.keys() <= self._index.keys():
            raise AuditError("the hash index and the pages' hashes differ")

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before] = after
        self._prev[after] = before

    def _forget(self, page: int) -> None:
        key = self._hashes[page]
        assert key is not None
        self._hashes[page] = None
        twins = self._twins.get(key)
        if self._index[key] != page:
            assert twins is not None
            twins.remove(page)
        elif twins:
            self._index[key] = twins.pop()
        else:
            del self._index[key]
        if twins is not None and not twins:
            del self._twins[key]
