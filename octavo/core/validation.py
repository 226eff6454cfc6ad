"""From what a caller asks for to Requests that cannot be wrong for the served model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from octavo.core.errors import ContextLengthExceeded, InvalidRequest
from octavo.core.prefix import prompt_hashes, root_hash
from octavo.core.request import Request, Sampling
from octavo.core.sampling import SamplingParams
from octavo.core.terms import NO_TERMS, Terms

_MASK64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model and the server allow.

    ``max_sequences`` bounds prompts times n of one call. The KV pool keeps a whole context: the
    configuration refuses, or with "auto" lowers, a ``max_model_len`` for which it is too small.
    ``request_timeout`` and ``queue_timeout`` are seconds. ``has_priorities``: the scheduling
    policy heeds them.
    """

    vocab_size: int
    max_model_len: int
    page_size: int
    eos_ids: tuple[int, ...] = ()
    max_n: int = 128
    max_logprobs: int = 20
    max_sequences: int = 1024
    clamp_max_tokens: bool = False
    prefix_caching: bool = True
    has_priorities: bool = True
    request_timeout: float | None = None
    queue_timeout: float | None = None


def make_requests(
    request_id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    terms: Terms = NO_TERMS,
    *,
    bad_words: Sequence[Sequence[int]] = (),
    draw_seed: Callable[[], int],
    until_full: bool = False,
) -> list[Request]:
    """``params.n`` requests over one prompt; the later ones have the first as their parent, and
    leave the prompt's log-probabilities to it.

    ``bad_words`` are the ids of ``params.bad_words``. ``draw_seed`` is asked only if the
    caller gave no seed. ``until_full`` (the offline API) accepts what may not fit, and lets it end
    with "length" when the context is full. Raises :class:`InvalidRequest`.
    """
    check_sequences(1, params.n, limits)
    _check_terms(terms, limits)
    ids = list(prompt)
    _check_prompt(ids, limits)
    max_tokens = _max_tokens(len(ids), params.max_tokens, limits, until_full)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must be at most {max_tokens}, what is left for the answer, "
            f"not {params.min_tokens}.",
            param="min_tokens",
        )
    stop_ids = stop_id_set(params, limits)
    seed = draw_seed() if params.seed is None else params.seed
    root = root_hash(terms.cache_salt)
    first = Request(
        id=request_id if params.n == 1 else f"{request_id}-0",
        prompt=ids,
        max_tokens=max_tokens,
        sampling=_sampling(params, limits, bad_words, stop_ids, choice_seed(seed, 0)),
        stop_ids=stop_ids,
        block_hashes=prompt_hashes(ids, limits.page_size, root) if limits.prefix_caching else (),
        hash_seed=root,
        priority=terms.priority,
        tenant=terms.tenant,
        timeout=_sooner(terms.timeout, limits.request_timeout),
        queue_timeout=limits.queue_timeout,
    )
    return [
        first,
        *(
            _sibling(first, f"{request_id}-{index}", choice_seed(seed, index))
            for index in range(1, params.n)
        ),
    ]


def _sibling(first: Request, request_id: str, seed: int) -> Request:
    sampling = replace(first.sampling, seed=seed, prompt_logprobs=None)
    return replace(first, id=request_id, parent=first.id, sampling=sampling)


def check_sequences(num_prompts: int, n: int, limits: Limits) -> None:
    """Refuse a call for too many answers, before anything is built for it."""
    if n > limits.max_n:
        raise InvalidRequest(f"n must be at most {limits.max_n}, not {n}.", param="n")
    if num_prompts * n > limits.max_sequences:
        raise InvalidRequest(
            f"The number of prompts times n must be at most {limits.max_sequences}, "
            f"not {num_prompts} × {n} = {num_prompts * n}.",
            param="n",
        )


def _check_terms(terms: Terms, limits: Limits) -> None:
    if terms.priority and not limits.has_priorities:
        raise InvalidRequest(
            f"priority must be 0, not {terms.priority}: requests run in the order of their "
            "arrival, unless --scheduling-policy is priority or fair.",
            param="priority",
        )


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((t for t in (one, other) if t is not None), default=None)


def choice_seed(seed: int, index: int) -> int:
    """64-bit seed of choice ``index``: the splitmix64 stream of ``seed`` (Steele et al. 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def stop_id_set(params: SamplingParams, limits: Limits) -> frozenset[int]:
    """Ids that end a generation: the caller's, and the model's EOS ids unless ignored."""
    eos = () if params.ignore_eos else limits.eos_ids
    return frozenset((*eos, *(params.stop_token_ids or ())))


def _check_prompt(ids: Sequence[int], limits: Limits) -> None:
    if not ids:
        raise InvalidRequest("prompt must hold at least one token, not 0.", param="prompt")
    if len(ids) >= limits.max_model_len:
        raise ContextLengthExceeded(
            f"prompt has {len(ids)} tokens, but the context is limited to {limits.max_model_len} "
            "tokens, of which at least one must be left for the answer.",
            param="prompt",
        )
    _check_ids("prompt", ids, limits.vocab_size)


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    plain = set(map(type, ids)) == {int}  # at the speed of C, for prompts are long
    if plain and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token in ids:
        if type(token) is not int:
            raise InvalidRequest(f"{name} must hold token ids, not {token!r}.", param=name)
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name} must hold token ids between 0 and {vocab_size - 1}, not {token}.",
                param=name,
            )


def _max_tokens(num_prompt: int, asked: int | None, limits: Limits, until_full: bool) -> int:
    """Tokens to generate. ``asked`` None means all that is left."""
    left = limits.max_model_len - num_prompt
    if until_full:
        return left if asked is None else min(asked, left)
    if asked is None or (limits.clamp_max_tokens and asked > left):
        return left
    if asked > left:
        raise ContextLengthExceeded(
            f"max_tokens must be at most {left}, not {asked}: prompt has {num_prompt} tokens, "
            f"and the context is limited to {limits.max_model_len} tokens.",
            param="max_tokens",
        )
    return asked


def _sampling(
    params: SamplingParams,
    limits: Limits,
    bad_words: Sequence[Sequence[int]],
    stop_ids: frozenset[int],
    seed: int,
) -> Sampling:
    """The runner's parameters."""
    vocab_size = limits.vocab_size
    bias = dict(params.logit_bias or {})
    words = tuple(tuple(word) for word in bad_words)
    _check_ids("logit_bias", bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for word in words:
        _check_ids("bad_words", word, vocab_size)
    for name, asked in (
        ("logprobs", params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if asked is not None and asked > limits.max_logprobs:
            raise InvalidRequest(
                f"{name} must be at most {limits.max_logprobs}, not {asked}.", param=name
            )
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = tuple(sorted(set(params.allowed_token_ids)))
        _check_something_left(allowed, words, stop_ids if params.min_tokens else frozenset())
    return Sampling(
        temperature=float(params.temperature),
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=seed,
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias={token: float(value) for token, value in bias.items()},
        allowed_ids=allowed,
        bad_words=words,
        min_tokens=params.min_tokens,
        min_tokens_ids=tuple(sorted(stop_ids)) if params.min_tokens else (),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def _check_something_left(
    allowed: Sequence[int], bad_words: Sequence[Sequence[int]], forbidden: frozenset[int]
) -> None:
    """Refuse masks that together leave no token to sample."""
    banned = {word[0] for word in bad_words if len(word) == 1} | forbidden
    if banned.issuperset(allowed):
        raise InvalidRequest(
            f"allowed_token_ids {list(allowed)[:8]} are all forbidden by bad_words or, before "
            "min_tokens, as stop ids: no token is left to sample.",
            param="allowed_token_ids",
        )
