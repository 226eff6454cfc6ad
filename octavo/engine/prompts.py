"""The forms a prompt may take in the Python API, and the one form the engine takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Prompts: TypeAlias = Prompt | Sequence[Prompt]

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def as_list(prompts: Prompts) -> list[Prompt]:
    """One prompt or many. A list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise _wrong(prompts)
    items: list[Any] = list(prompts)
    if items and all(_is_id(item) for item in items):
        return [items]
    return items


def split(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """(text, ids) of a prompt: exactly one is given."""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _KEYS]
        if len(prompt) > len(unknown) > 0:
            raise InvalidRequest(
                f"A prompt may have {', '.join(_KEYS)}, not {unknown[0]!r:.40}.", param="prompt"
            )
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and set(map(type, prompt)) == {int}:  # at the speed of C
        return None, prompt[:]
    if not isinstance(prompt, Iterable) or not all(_is_id(item) for item in prompt):
        raise _wrong(prompt)
    return None, [int(item) for item in prompt]


def salt_of(prompt: Prompt) -> str | None:
    return prompt.get("cache_salt") if isinstance(prompt, Mapping) else None


def each(name: str, value: Any, count: int) -> list[Any]:
    """``value`` for all prompts, or one each."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} holds {len(value)} entries for {count} prompts.", param=name)
    return list(value)


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
    count: int,
) -> list[SamplingParams]:
    """One set of parameters for all prompts, one each, or the model's own."""
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams or a list of them, not {params!r:.80}.",
            param="sampling_params",
        )
    if len(params) != count:
        raise InvalidRequest(
            f"sampling_params holds {len(params)} entries for {count} prompts.",
            param="sampling_params",
        )
    return list(params)


def _is_id(item: object) -> bool:
    """Any integer type, numpy's too; a bool is no id."""
    return hasattr(item, "__index__") and not isinstance(item, bool)


def _wrong(prompt: object) -> InvalidRequest:
    return InvalidRequest(
        "A prompt must be a text, a list of token ids, or a mapping with 'prompt' or "
        f"'prompt_token_ids', not {prompt!r:.80}.",
        param="prompt",
    )
