"""The words that scheduler and runner exchange: StepPlan, StepResult, StepOutput.

All are plain data (ints, strings, bytes, lists): serialisable without pickle, and
columnar where there is an entry per request and step. None knows torch or text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.core.request import Sampling

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
AbortReason = Literal["abort", "stop"]  # nobody waits any more; the front found a stop string


@dataclass(slots=True)
class Join:
    """A request's payload for the runner, sent once when it gets its slot.

    ``tokens`` are all known ids: the prompt and, when the request resumes after a
    preemption or a restart, what it generated before. ``prompt_len`` tells the two
    apart. A join always precedes the first slice of its slot.
    """

    slot: int
    tokens: list[int]
    prompt_len: int
    sampling: Sampling


@dataclass(slots=True)
class StepPlan:
    """What one step computes: for each slice, ``count`` tokens from ``start``.

    Row i says: run tokens ``[starts[i], starts[i] + counts[i])`` of the request in
    slot ``slots[i]``, after appending to its page tables the new pages of this plan.
    ``samples[i]`` is true when the slice reaches the end of the known tokens, so its
    last position yields a new id; the runner keeps that id in the slot, and a later
    plan may refer to it by position before anyone has told the host (a decode chain).

    ``page_counts[g][i]`` new pages of row i in layer group g lie, in order, in
    ``pages[g]``. ``leaves`` are slots whose requests are gone: they are processed
    before ``joins``, and joins before slices. The empty plan is legal.

    Swaps come before all that, in this order: page ``swap_out_pages[i]`` (all layer groups see
    the same pages) is copied to host page ``swap_out_hosts[i]``, then host page
    ``swap_in_hosts[i]`` to page ``swap_in_pages[i]``. Host pages are numbered from 1.
    """

    step: int
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    page_counts: list[list[int]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    swap_out_pages: list[int] = field(default_factory=list)
    swap_out_hosts: list[int] = field(default_factory=list)
    swap_in_hosts: list[int] = field(default_factory=list)
    swap_in_pages: list[int] = field(default_factory=list)
    bucket: int = 0  # tokens to pad to; an executor may raise it so that ranks agree

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute (leaves may still be waiting to be told)."""
        return not self.slots

    def size(self) -> tuple[int, int, int]:
        """Prefill tokens, rows of one token, and tokens whose keys and values are read: what a
        :class:`~octavo.core.steptime.StepTime` prices. A prompt's slice of one token is a row."""
        counts = self.counts
        num_tokens = sum(counts)
        rows = len(counts) if num_tokens == len(counts) else counts.count(1)
        return num_tokens - rows, rows, sum(self.starts) + num_tokens


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself first, then the top ones.

    ``ids[0]`` is the sampled (or prompt) token and ``rank`` its 1-based rank;
    ``ids[1:]`` are the most probable, best first, lowest id first on ties (the token
    itself is repeated there if it is among them). ``values`` are natural logs; -inf never
    leaves the runner (it becomes -9999.0).
    """

    ids: list[int]
    values: list[float]
    rank: int


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt positions ``start, start + 1, …`` of one slot.

    The entry of position p is that of token p given the tokens before it; position
    0 has none, so ``start`` is at least 1.
    """

    slot: int
    start: int
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class Fault:
    """One request failed in a step; its neighbours did not."""

    slot: int
    code: str  # "non_finite_logits", "out_of_memory", …
    message: str


@dataclass(slots=True)
class StepResult:
    """What a step produced. Row order is that of the plan's sampling slices.

    ``num_ids[j]`` new ids of the request in ``slots[j]`` lie, in order, in ``ids``.
    A slot in ``faults`` has no row. ``logprobs`` has an entry for each new id of the slots
    that asked, in order.
    """

    step: int
    slots: list[int] = field(default_factory=list)
    num_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


@dataclass(slots=True)
class Delta:
    """News of one request for its front: new ids, and for the last one a reason.

    Every accepted request gets exactly one delta with ``finish`` set, and none after
    it. ``ids`` include the stop token, if one ended the request (``stop_id``).
    ``prompt_logprobs`` start at position 1 and come in order, possibly in parts.
    """

    id: str
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_id: int | None = None
    error_code: str | None = None
    error: str | None = None
    cached_tokens: int | None = None  # set once, on the first delta
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """News of a step for those who wait: columns for the common row, deltas for the rest.

    ``tokens[i]`` is the one new id, and all the news, of the request ``request_ids[i]``. Whoever
    has more to tell (an end, a first delta, log-probabilities) has a :class:`Delta` instead: a
    request appears at most once.
    """

    request_ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.deltas)
