"""KVCache: the pages of sequences. What each one gets, shares, publishes, drops, parks, gives back.

The pool counts pages; this knows why. A sequence's tables grow chunk by chunk, as it is
computed. Pages known by a hash are shared, pages that left a window are dropped, and the pages of
a preempted sequence may be parked on the host until it resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from octavo.core.errors import AuditError
from octavo.core.pages import NULL_PAGE, PagePool
from octavo.core.plan import StepPlan
from octavo.core.prefix import group_key, longest_hit
from octavo.core.sequence import Sequence

NO_HOST_PAGE = 0


class HostPool:
    """Pages of host memory that hold parked sequences. They are numbered from 1, as the pool's."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None and nothing has changed."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(page for page in pages if page != NO_HOST_PAGE)

    def audit(self, tables: Iterable[Iterable[int]]) -> None:
        """Raises :class:`AuditError` unless each page is either free or in one table."""
        used = [page for table in tables for page in table if page != NO_HOST_PAGE]
        if sorted([*used, *self._free]) != list(range(1, self.num_pages + 1)):
            raise AuditError(
                f"{len(used)} parked + {len(self._free)} free host pages are not {self.num_pages}"
            )


@dataclass(slots=True)
class Quote:
    """What it takes to let a sequence join: see :meth:`KVCache.quote`."""

    hits: list[list[int]]  # table entries of each group that are cached, equally many …
    cached: list[int]  # … and the pages among them
    start: int  # first token to compute
    end: int  # end of the first slice
    wants: list[int]  # table entries of each group for the first slice
    fresh: int  # pages, over all groups, to be taken for them
    claims: int  # pages, over all groups, that would be referenced now and are not yet
    promised: int  # pages that the known tokens after ``end`` will take


class KVCache:
    """Pages of sequences over one pool, and a host pool of ``host_pages`` for parked ones.

    Swaps are collected here until a plan takes them: copies to the host, then those back,
    before anything else of that plan runs.
    """

    def __init__(self, pool: PagePool, *, prefix_caching: bool = True, host_pages: int = 0) -> None:
        layout = pool.layout
        self.pool = pool
        self.host = HostPool(host_pages)
        self.page_size = layout.page_size
        self.prefix_caching = prefix_caching and layout.num_paged == len(layout.blocks)
        self.windows = [(g, b.window) for g, b in enumerate(layout.blocks) if b.window]
        self.promised = 0  # pages still to be reserved for known tokens of running sequences
        self._is_paged = [block.kind == "paged" for block in layout.blocks]
        self._num_paged = layout.num_paged
        self._is_single = self._is_paged == [True]
        self._first_paged = self._is_paged.index(True) if self._num_paged else 0
        self._outs: dict[int, int] = {}  # host page -> page
        self._ins: list[tuple[int, int]] = []  # (host page, page)
        # Host pages of sequences that joined. They are read in the plan under way, after its copies
        # to the host, so they must not be free before the next one.
        self._emptied: list[int] = []

    def reset(self) -> None:
        """Nobody holds anything and nothing is cached, whatever state a torn step has left."""
        layout = self.pool.layout
        self.pool = PagePool(self.pool.num_pages, layout.page_size, layout.blocks)
        self.host = HostPool(self.host.num_pages)
        self._outs, self._ins, self._emptied, self.promised = {}, [], [], 0

    @property
    def num_held(self) -> int:
        """Pages that running sequences hold or were promised."""
        return self.pool.num_referenced + self.promised

    # ---- a sequence joins

    def quote(self, seq: Sequence, budget: int) -> Quote:
        """What ``seq`` needs for a first slice of at most ``budget`` tokens. Changes nothing."""
        layout, pool = self.pool.layout, self.pool
        hits = self._hits(seq)
        num_hit = len(hits[0])
        start = max(num_hit * self.page_size, seq.parked_tokens)
        end = min(seq.total, start + budget)
        wants = layout.group_pages(end)
        fresh = sum(wants) - num_hit * len(hits)
        for table in seq.parked:
            fresh -= table[num_hit:].count(NO_HOST_PAGE)
        cached = [page for hit in hits for page in hit if page != NULL_PAGE]
        held = len(cached) + fresh
        promised = max(0, layout.peak_pages(seq.total, budget) - held)
        claims = pool.count_idle(cached) + fresh
        return Quote(hits, cached, start, end, wants, fresh, claims, promised)

    def begin(self, seq: Sequence, quote: Quote) -> bool:
        """Give ``seq`` its pages; False, and nothing has changed, if there are not enough."""
        grant = self.pool.reserve(quote.cached, quote.fresh)
        if grant is None:
            return False
        num_hit = len(quote.hits[0])
        seq.tables = self._fill(quote, seq.parked, iter(grant.fresh))
        stale = bool(seq.parked) and seq.published is None
        self._emptied += [page for table in seq.parked for page in table if page != NO_HOST_PAGE]
        seq.parked, seq.parked_tokens = [], 0
        seq.scheduled = quote.start
        seq.promised = quote.promised
        self.promised += seq.promised
        seq.published = num_hit if self.prefix_caching and not stale else None
        self.set_room(seq)
        return True

    def _fill(self, quote: Quote, parked: list[list[int]], fresh: Iterator[int]) -> list[list[int]]:
        """Tables: what is cached, what comes back from the host, then ``fresh`` pages."""
        tables = []
        for group, want in enumerate(quote.wants):
            table = quote.hits[group].copy()
            if parked:
                table += self._unpark(parked[group][len(table) :], fresh)
            table += islice(fresh, want - len(table))
            tables.append(table)
        return tables

    def _hits(self, seq: Sequence) -> list[list[int]]:
        if not (self.prefix_caching and seq.reads_cache):
            return [[] for _ in self.pool.layout.blocks]
        shareable = (len(seq.tokens) - 1) // self.page_size  # the last token is always computed
        hashes = seq.extend_hashes(shareable, self.page_size)
        return longest_hit(self.pool, hashes[:shareable])

    def _unpark(self, parked: list[int], fresh: Iterator[int]) -> Iterator[int]:
        for host_page in parked:
            if host_page == NO_HOST_PAGE:
                yield NULL_PAGE
                continue
            page = next(fresh)
            self._ins.append((host_page, page))
            yield page

    # ---- it goes on

    def grow(self, seq: Sequence, end: int) -> list[list[int]] | None:
        """Let its tables reach ``end`` tokens: the new pages of each group, or None."""
        need = max(0, -(-end // self.page_size) - self._num_pages(seq))
        fresh = self.pool.take(need * self._num_paged)
        if fresh is None:
            return None
        pages = [fresh] if self._is_single else self._deal(fresh, need)
        for table, new in zip(seq.tables, pages, strict=True):
            table += new
        if seq.promised:
            kept = min(seq.promised, len(fresh))
            seq.promised -= kept
            self.promised -= kept
        self.set_room(seq)
        return pages

    def _deal(self, fresh: list[int], need: int) -> list[list[int]]:
        """``need`` of the ``fresh`` pages for each group that grows."""
        rest = iter(fresh)
        return [list(islice(rest, need)) if is_paged else [] for is_paged in self._is_paged]

    def set_room(self, seq: Sequence) -> None:
        """Let it go on to the end of its pages, or to its last token but one."""
        room = seq.limit - 1
        if self._num_paged:
            room = min(room, self._num_pages(seq) * self.page_size)
        seq.room = room

    def _num_pages(self, seq: Sequence) -> int:
        """Pages' worth of tokens that its tables reach: groups grow together."""
        return len(seq.tables[self._first_paged]) if self._num_paged else 0

    def settle(self, seq: Sequence, computed: int) -> bool:
        """Publish the pages that ``computed`` accepted tokens fill; drop those no window shows.

        True if others may profit: pages of its prompt were published, or pages are free again.
        """
        helped = False
        full = computed // self.page_size
        if seq.published is not None and full > seq.published:
            first, seq.published = seq.published, full
            self._publish(seq, first, full)
            helped = first < seq.shareable_pages(self.page_size) <= full
        for group, window in self.windows:
            helped |= self._drop(seq.tables[group], (computed + 1 - window) // self.page_size)
        return helped

    def _publish(self, seq: Sequence, first: int, full: int) -> None:
        hashes = seq.extend_hashes(full, self.page_size)
        for group, table in enumerate(seq.tables):
            for index in range(first, full):
                if (page := table[index]) != NULL_PAGE:
                    self.pool.publish(page, group_key(hashes[index], group))

    def _drop(self, table: list[int], unseen: int) -> bool:
        """Release the entries before ``unseen``, from the last one back to the first null page."""
        index = unseen - 1
        while index >= 0 and table[index] != NULL_PAGE:
            self.pool.release([table[index]])
            table[index] = NULL_PAGE
            index -= 1
        return index < unseen - 1

    # ---- it leaves

    def release(self, seq: Sequence) -> None:
        """Give its pages back. Later plans may use them at once: plans run in order."""
        for table in seq.tables:
            self.pool.release(table)
        self.promised -= seq.promised
        seq.promised = 0

    def park(self, seq: Sequence, heir: Sequence) -> bool:
        """Copy what ``seq`` has computed to the host, for ``heir``; call before :meth:`release`.

        False, and nothing has changed, if the host pool has no room.
        """
        tokens = min(seq.scheduled, len(seq.tokens) - 1)  # what is known of it; one token to run
        tables = [table[: -(-tokens // self.page_size)] for table in seq.tables]
        pages = [page for table in tables for page in table if page != NULL_PAGE]
        taken = self.host.take(len(pages))
        if taken is None:
            return False
        self._outs.update(zip(taken, pages, strict=True))
        host = iter(taken)
        heir.parked = [
            [next(host) if page != NULL_PAGE else NO_HOST_PAGE for page in table]
            for table in tables
        ]
        heir.parked_tokens = tokens
        heir.published = seq.published
        return True

    def discard(self, seq: Sequence) -> None:
        """Give the host pages of a parked sequence back."""
        for table in seq.parked:
            self.host.give(table)
        seq.parked = []
        seq.parked_tokens = 0

    def take_swaps(self, plan: StepPlan) -> None:
        """Hand the copies that were asked for to the plan that makes them."""
        if self._outs:
            plan.swap_out_hosts, plan.swap_out_pages = list(self._outs), list(self._outs.values())
            self._outs = {}
        if self._ins:
            plan.swap_in_hosts, plan.swap_in_pages = map(list, zip(*self._ins, strict=True))
            self._ins = []
        self.host.give(self._emptied)
        self._emptied = []

    # ---- audit

    def audit(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Recount pages and host pages. Raises :class:`AuditError`."""
        running = list(running)
        self.pool.audit(table for seq in running for table in seq.tables)
        self.host.audit([self._emptied, *(table for seq in waiting for table in seq.parked)])
        for seq in running:
            for group, window in self.windows:
                seen = max(0, seq.scheduled + 1 - window) // self.page_size
                if NULL_PAGE in seq.tables[group][seen:]:
                    raise AuditError(f"a page that {seq.id!r} still sees was dropped")
