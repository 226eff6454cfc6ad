"""From bytes to a checked request: which fields are taken, ignored, refused, or misspelt.

A field is ignored only where OpenAI's clients send it; a known one that is not supported is
refused by name unless its value asks for nothing; any other name is an error with a suggestion.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from octavo.core.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

# Sent by OpenAI's clients; they change nothing about the answer here.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Known from OpenAI or vLLM but not supported: name -> values that ask for nothing (null always
# does). "{}" and "[]" are accepted where a client sends an empty collection.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1.0,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"], []),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (),
    "request_id": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "stream_interval": (1,),
    "stream_options": (),
    "structured_outputs": ({},),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "truncation_side": ("left",),
    "typical_p": (1.0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

_TYPE_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`, got `")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_MAX_SHOWN = 60  # characters of a refused value that a message repeats


def parse(body: bytes, schema: type[T]) -> T:
    """The request in ``body``. Raises :class:`InvalidRequest` with one sentence."""
    data = _decode(body)
    known = schema.__struct_fields__
    for name in data:
        if name not in known and name not in IGNORED:
            refuse_unless_neutral(name, data[name], known)
    try:
        return msgspec.convert(data, schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data) from None


def _decode(body: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("The body's JSON is nested too deeply.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(data)}.")
    return data


def refuse_unless_neutral(name: str, value: Any, known: Collection[str]) -> None:
    """Raise for a field outside ``known``, unless it is a known one asking for nothing."""
    neutral = UNSUPPORTED.get(name)
    if neutral is None:
        near = difflib.get_close_matches(name, [*known, *IGNORED], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        raise InvalidRequest(f"Unknown field {shown(name)}{hint}", param=name[:_MAX_SHOWN])
    if value is None or any(value == other and type(value) is type(other) for other in neutral):
        return
    allowed = f" other than as {shown(neutral[0])}" if neutral else ""
    raise InvalidRequest(f"{name} is not supported{allowed}; given was {shown(value)}.", param=name)


def shown(value: Any) -> str:
    """A value as JSON, short enough for a sentence."""
    if isinstance(value, str | list | dict) and len(value) > _MAX_SHOWN:
        kind = {"str": "a string", "list": "a list", "dict": "an object"}[type(value).__name__]
        return f"{kind} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"


def _explain(message: str, data: dict[str, Any]) -> InvalidRequest:
    """msgspec's complaint as a sentence with the field's name and the value given."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    missing = _MISSING.match(what)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return InvalidRequest(f"{name} is required.", param=name)
    unknown = _UNKNOWN.match(what)
    if unknown:
        return InvalidRequest(f"{path} has an unknown field {shown(unknown['name'])}.", param=path)
    path = path.replace("[...]", "")
    expected = _EXPECTED.match(what)
    if expected is None:
        return InvalidRequest(f"{path}: {what}.", param=path)
    types = [_TYPE_NAMES.get(t, t) for t in expected["types"].split(" | ") if t != "null"]
    return InvalidRequest(
        f"{path} must be {' or '.join(types)}, not {shown(_value_at(data, path))}.", param=path
    )


def _value_at(data: Any, path: str) -> Any:
    for step in re.findall(r"[^.\[\]]+", path):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data
