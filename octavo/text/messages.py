"""Chat messages as clients send them, brought into the one form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequest

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool, wrap_strings: bool
) -> list[dict[str, Any]]:
    """Checked copies: content is a string, or a list of text parts if ``as_parts``.

    Null, missing and empty content are all "". Fields that are null, and empty tool_calls,
    are as if missing. ``arguments`` of tool calls become objects. ``wrap_strings`` makes
    one part of a string. Raises :class:`InvalidRequest` naming the place.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list of at least one message.", param="messages")
    return [
        _message(message, f"messages[{i}]", as_parts, wrap_strings)
        for i, message in enumerate(messages)
    ]


def _message(message: object, at: str, as_parts: bool, wrap_strings: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(at, "must be an object with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{at}.role", "must be a non-empty string", role)
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _content(message.get("content"), f"{at}.content", as_parts, wrap_strings)
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _tool_calls(calls, f"{at}.tool_calls")
    return result


def _content(content: object, at: str, as_parts: bool, wrap_strings: bool) -> Any:
    if content is None:
        content = ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wrap_strings and content else content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _invalid(at, "must be a string or a list of parts", content)
    texts = [_text(part, f"{at}[{i}]") for i, part in enumerate(content)]
    if as_parts and texts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _text(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise _invalid(at, "must be an object with a type", part)
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(
            f"{at} is of type {kind!r}, but this model takes text parts only.", param=at
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _invalid(f"{at}.{_TEXT_PARTS[kind]}", "must be a string", text)
    return text


def _tool_calls(calls: object, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _invalid(at, "must be a list", calls)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _invalid(at, "must be an object with a function", call)
    if not isinstance(function.get("name"), str):
        raise _invalid(f"{at}.function.name", "must be a string", function.get("name"))
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, at: str) -> dict[str, Any]:
    """Clients send a JSON text, templates want the object; none means no arguments."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise _invalid(at, "must be the JSON text of an object", arguments) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise _invalid(at, "must be the JSON text of an object", arguments)
    return arguments


def _invalid(at: str, rule: str, value: object) -> InvalidRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidRequest(f"{at} {rule}, not {shown}.", param=at)
