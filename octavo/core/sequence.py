"""Sequence: a request's progress, as counts."""

from __future__ import annotations

from octavo.core.plan import Delta, FinishReason, Join
from octavo.core.prefix import chain, root_hash
from octavo.core.request import Request

WAITING = -1  # values of ``slot`` for a sequence that holds none
GONE = -2
NOT_SHORT = -1


class Sequence:
    """One life of a request in the scheduler: it gets a slot at most once.

    ``tokens`` are the ids known here, ``news`` the latest ones, not yet moved there: so what a step
    touches stays small, and in the processor's cache, however long the context is. ``total`` counts
    both and the sampled ones still under way, ``scheduled`` those computed or being computed. A
    step lets ``scheduled`` catch up with ``total``; nothing else tells a prompt from an answer.
    ``room`` is how far ``total`` may go without further ado: to the end of the pages or of the
    request, and nowhere while a slice that samples nothing is under way. ``due`` news call for a
    closer look (page full, request complete, first words). ``tables`` hold the pages of each
    layer group.

    When preempted, a sequence is gone, and its successor waits; so what is still
    under way for it can be told from what its successor does. A successor may hold ``parked`` host
    pages of each group, in place of its first ``parked_tokens`` tokens' pages.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "charged",
        "children",
        "due",
        "hashes",
        "id",
        "key",
        "limit",
        "lives",
        "news",
        "next_prompt_logprob",
        "parked",
        "parked_tokens",
        "promised",
        "prompt_len",
        "published",
        "reached",
        "request",
        "room",
        "scheduled",
        "short_since",
        "slot",
        "stop_ids",
        "tables",
        "tokens",
        "total",
    )

    def __init__(
        self, request: Request, key: tuple[float, int], limit: int, arrival: float = 0.0
    ) -> None:
        self.request = request
        self.id = request.id
        self.prompt_len = len(request.prompt)
        self.key = key  # lower runs first and is preempted last; constant, for its place in a heap
        self.arrival = arrival
        self.limit = limit  # tokens at which the request is complete
        self.stop_ids = request.stop_ids
        self.tokens = [*request.prompt, *request.generated]
        self.news: list[int] = []
        self.hashes = list(request.block_hashes)
        self.children: list[Sequence] = []  # siblings that wait for this one's prompt
        self.cached_tokens: int | None = 0  # to be told with the first delta
        self.next_prompt_logprob = len(request.prompt) if request.generated else 1
        self.lives = 1
        self.slot = WAITING
        self.total = len(self.tokens)
        self.scheduled = 0
        self.room = 0
        self.due = 0
        self.published: int | None = 0  # pages findable; None: this one publishes nothing
        self.promised = 0  # pages, over all groups, still to be reserved for known tokens
        self.short_since = NOT_SHORT  # step in which it first lacked the page that it lacks
        self.reached = 0  # tokens that earlier lives had computed
        self.charged = 0  # tokens its tenant was charged for
        self.tables: list[list[int]] = []
        self.parked: list[list[int]] = []
        self.parked_tokens = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def reads_cache(self) -> bool:
        """A cache hit yields no logits, so prompt log-probabilities need the whole prompt."""
        return self.request.sampling.prompt_logprobs is None

    def shareable_pages(self, page_size: int) -> int:
        """Pages of the prompt that a sibling could hit: its last token is always computed."""
        return (self.prompt_len - 1) // page_size

    def extend_hashes(self, num_pages: int, page_size: int) -> list[bytes]:
        """Keys of full pages, at least ``num_pages``: those of generated ids are added here."""
        hashes = self.hashes
        while len(hashes) < num_pages:
            start = len(hashes) * page_size
            parent = hashes[-1] if hashes else (self.request.hash_seed or root_hash())
            hashes.append(chain(parent, self.tokens[start : start + page_size]))
        return hashes

    def take_news(self) -> int:
        """Move the news to the tokens, and count them all."""
        self.tokens += self.news
        self.news.clear()
        return len(self.tokens)

    def join(self) -> Join:
        return Join(self.slot, self.tokens[:], self.prompt_len, self.request.sampling)

    def delta(
        self, ids: list[int], finish: FinishReason | None = None, stop_id: int | None = None
    ) -> Delta:
        cached, self.cached_tokens = self.cached_tokens, None
        return Delta(self.id, ids, finish, stop_id, cached_tokens=cached)

    def successor(self) -> Sequence:
        """The same request with all ids known so far, without slot, pages or anything computed."""
        heir = Sequence(self.request, self.key, self.limit, self.arrival)
        heir.tokens = self.tokens
        heir.total = len(self.tokens)
        heir.hashes = self.hashes
        heir.children, self.children = self.children, []
        heir.cached_tokens = self.cached_tokens
        heir.next_prompt_logprob = self.next_prompt_logprob
        heir.lives = self.lives + 1
        heir.reached = max(self.reached, min(self.scheduled, len(self.tokens)))
        heir.charged = self.charged
        return heir
