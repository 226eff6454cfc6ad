"""The bodies of /v1/completions and /generate."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import integer
from octavo.server.schemas.common import AnswerFields, SamplingFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions

Prompt: TypeAlias = str | list[str | int | list[int]]


class CompletionRequest(AnswerFields, kw_only=True):
    """Text, or token ids, to continue."""

    prompt: Annotated[
        Prompt,
        Meta(
            description="One text, a list of texts, a list of token ids, or a list of such lists.",
            examples=["The capital of France is"],
        ),
    ]
    echo: Annotated[bool | None, Meta(description="Return the prompt before the answer.")] = None
    logprobs: Annotated[
        int | None,
        Meta(description="Report each token's log-probability, and the k best (0 to 20)."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Put the tokenizer's BOS before a text prompt. Default: true."),
    ] = None


class GenerateRequest(SamplingFields, kw_only=True):
    """The demonstration route of early vLLM: one prompt, all answers at once."""

    prompt: Annotated[str, Meta(examples=["The capital of France is"])]


def completion_max_tokens(body: CompletionRequest) -> int:
    """The answer's limit. 0 is taken with ``echo`` only: score the prompt, generate nothing."""
    if body.max_tokens is None:
        return DEFAULT_MAX_TOKENS
    integer("max_tokens", body.max_tokens, 0 if body.echo else 1, None)
    return body.max_tokens


def split_prompts(prompt: Prompt) -> list[tuple[str, str | list[int]]]:
    """The prompts of a body, each with its place in it, texts and ids alike."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list.", param="prompt")
    kinds = {type(member) for member in prompt}
    if len(kinds) > 1:
        raise InvalidRequest(
            "prompt must be a list of one kind: texts, token ids, or lists of token ids.",
            param="prompt",
        )
    if kinds == {int}:
        return [("prompt", [i for i in prompt if isinstance(i, int)])]
    return [
        (f"prompt[{i}]", member) for i, member in enumerate(prompt) if not isinstance(member, int)
    ]
