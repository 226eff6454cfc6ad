"""Request: a piece of work that cannot be wrong for the model that will run it.

Only :func:`octavo.core.validation.make_requests` builds one. It holds ids, never text, and
crosses the process boundary as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters as the runner needs them: numbers and ids only.

    Order of application (the field's convention): allowed ids, bias, bad words and
    minimum length mask the logits; repetition, then frequency and presence penalties;
    temperature; top_k, top_p, min_p; one draw. Neutral values are the defaults.
    """

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # 64 bits; the front draws one if the caller gave none
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    min_tokens_ids: tuple[int, ...] = ()  # ids that may not come before min_tokens
    logprobs: int | None = None  # top-k to report with each new id; 0 = its own only
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request.

    ``max_tokens`` ≥ 1 and ``len(prompt) + max_tokens`` ≤ the context, unless
    the offline API asked for "until the context is full".
    ``block_hashes`` chain over the prompt's full pages (see :mod:`octavo.core.prefix`).
    ``parent`` is the id of the sibling that computes the shared prompt (n > 1).
    ``generated`` are ids a dead engine already delivered: they are re-prefilled, counted
    as output, and not sent again.
    ``tenant`` is whom fair scheduling charges. ``timeout`` and ``queue_timeout`` are seconds from
    the moment the scheduler gets the request: to its end, and to its first admission.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()  # EOS included, unless ignored
    block_hashes: tuple[bytes, ...] = ()
    hash_seed: bytes = b""  # parent hash of the first page: salt, adapter
    parent: str | None = None
    priority: int = 0  # lower runs first
    tenant: str = ""
    timeout: float | None = None
    queue_timeout: float | None = None
    generated: list[int] = field(default_factory=list)
