"""Fields that every generating route shares, and their way into SamplingParams."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import SamplingParams, integer
from octavo.core.terms import Terms

_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")

# Taken over from the body as they are, or from the served model's generation_config.
SAMPLING_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
)

Ids: TypeAlias = list[int]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """``include_obfuscation`` is OpenAI's padding of events: ignored."""

    include_usage: Annotated[
        bool | None, Meta(description="Send one last event with the token counts.")
    ] = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """Null means absent, everywhere."""

    model: Annotated[
        str | None, Meta(description="A served model's name; the first one if absent.")
    ] = None
    n: Annotated[int | None, Meta(description="How many answers to each prompt.")] = None
    max_tokens: Annotated[
        int | None, Meta(description="At most this many new tokens.", examples=[64])
    ] = None
    min_tokens: Annotated[
        int | None, Meta(description="No end of text before this many tokens.")
    ] = None
    temperature: Annotated[
        float | None, Meta(description="0 is greedy; up to 2 is usual.", examples=[0.7])
    ] = None
    top_p: Annotated[
        float | None, Meta(description="Smallest set of tokens with this much probability.")
    ] = None
    top_k: Annotated[int | None, Meta(description="Only the k best tokens; 0 or -1 is off.")] = None
    min_p: Annotated[
        float | None,
        Meta(description="Drop tokens below this share of the best one's probability."),
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[
        dict[str, float] | None,
        Meta(description="Added to logits: token id (as a string) to a number in [-100, 100]."),
    ] = None
    seed: Annotated[
        int | None,
        Meta(description="Fixes the random draws; the logits may still round differently."),
    ] = None
    stop: Annotated[
        str | list[str] | None, Meta(description="Strings that end the answer; not part of it.")
    ] = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Ids | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Meta(description="Keep only the last k prompt tokens; -1 keeps as many as fit."),
    ] = None
    priority: Annotated[
        int | None,
        Meta(description="Lower runs first. Not 0 only with --scheduling-policy priority or fair."),
    ] = None
    timeout: Annotated[
        float | None,
        Meta(
            description="Seconds after which the answer ends as it is, with finish_reason "
            "'timeout'; without a token it is an error, 504. The server may have a shorter limit."
        ),
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Share cached prefixes only with requests of the same salt.")
    ] = None


class AnswerFields(SamplingFields, kw_only=True):
    """And how the answer is to come, on the routes of OpenAI's schemas."""

    stream: Annotated[
        bool | None, Meta(description="Send server-sent events as tokens are generated.")
    ] = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[
        int | None, Meta(description="Log-probabilities of the prompt's tokens, and the k best.")
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Return token ids beside text.")] = (
        None
    )
    request_id: Annotated[str | None, Meta(description="Becomes part of the answer's id.")] = None


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters of a request. What it leaves out comes from ``defaults``, else from the class."""
    values: dict[str, Any] = {}
    for name in SAMPLING_NAMES:
        value = getattr(body, name, None)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    if prompt_logprobs is not None:
        values["prompt_logprobs"] = prompt_logprobs
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        **values,
    )


def terms(body: SamplingFields, tenant: str) -> Terms:
    """How the request is to be scheduled."""
    return Terms(body.priority or 0, tenant, body.timeout, body.cache_salt)


def check_answer(body: AnswerFields) -> None:
    """Rules between the fields that say how the answer is to come, and those of all routes."""
    check_common(body)
    if body.stream_options is not None:
        if not body.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream: true.", param="stream_options"
            )
        if body.stream_options.continuous_usage_stats:
            raise InvalidRequest(
                "stream_options.continuous_usage_stats is not supported; use include_usage.",
                param="stream_options.continuous_usage_stats",
            )
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "prompt_logprobs is not available with stream: true.", param="prompt_logprobs"
        )


def check_common(body: SamplingFields) -> None:
    """Fields that are no sampling parameters."""
    if body.truncate_prompt_tokens not in (None, -1):
        integer("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, None)


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias must be keyed by token ids, not {key[:40]!r}.", param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
