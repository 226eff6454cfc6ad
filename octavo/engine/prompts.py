"""The forms a prompt may take in the Python API, and the one form the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def split(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """(text, ids) of a prompt: exactly one is given."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return None, list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], None
        raise InvalidRequest(
            "A prompt must have 'prompt' (text) or 'prompt_token_ids'.", param="prompt"
        )
    return None, list(prompt)


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of parameters for all prompts, or one each."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"sampling_params holds {len(params)} entries for {count} prompts.",
            param="sampling_params",
        )
    return list(params)
