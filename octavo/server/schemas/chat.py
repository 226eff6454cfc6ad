"""The body of /v1/chat/completions, and the rules for its messages."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import MAX_LOGPROBS, integer
from octavo.server.schemas.common import AnswerFields
from octavo.server.schemas.fields import refuse_unless_neutral, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# What a message may hold. Clients replay answers of other servers, so the list is generous.
MESSAGE_FIELDS = frozenset(
    {
        "annotations",
        "audio",
        "content",
        "function_call",
        "name",
        "reasoning",
        "reasoning_content",
        "refusal",
        "role",
        "tool_call_id",
        "tool_calls",
    }
)
MAY_BE_EMPTY = ("assistant", "function")  # a turn may be tool calls only

_MESSAGE_SCHEMA = {
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {
                "description": "Text, or a list of parts {type: 'text', text: …}.",
                "type": ["string", "array", "null"],
            },
            "name": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
        },
    },
    "examples": [[{"role": "user", "content": "What is the capital of France?"}]],
}


class ChatRequest(AnswerFields, kw_only=True):
    """A conversation to continue."""

    messages: Annotated[list[dict[str, Any]], Meta(extra_json_schema=_MESSAGE_SCHEMA)]
    max_completion_tokens: Annotated[
        int | None,
        Meta(description="OpenAI's newer name of max_tokens. Default: all that is left."),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Report each token's log-probability.")] = (
        None
    )
    top_logprobs: Annotated[
        int | None, Meta(description="And those of the k best tokens at its place (0 to 20).")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Meta(description="Rendered into the prompt. Only with tool_choice 'none' for now."),
    ] = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Meta(description="Go on with the last message instead of answering it.")
    ] = None
    chat_template_kwargs: dict[str, Any] | None = None


def check_chat(body: ChatRequest) -> None:
    """Rules between the fields of a chat request."""
    check_messages(body.messages)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise InvalidRequest(
                "top_logprobs is only allowed with logprobs: true.", param="top_logprobs"
            )
        integer("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other.",
            param="continue_final_message",
        )
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest(
            "tools is supported only with tool_choice 'none': the model sees the tools, but its "
            "calls are not parsed yet.",
            param="tools",
        )
    refuse_unless_neutral("tool_choice", body.tool_choice, ())


def chat_max_tokens(body: ChatRequest) -> int | None:
    """None: all that is left of the context."""
    old, new = body.max_tokens, body.max_completion_tokens
    if new is None:
        return old
    integer("max_completion_tokens", new, 1, None)
    if old is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ; give one of them.",
            param="max_completion_tokens",
        )
    return new


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Roles and fields; what content and tool calls may hold is the template's side to check."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            given = shown(role) if "role" in message else "missing"
            raise InvalidRequest(
                f"{at}.role must be one of {', '.join(ROLES)}, not {given}.", param=f"{at}.role"
            )
        for name in message:
            if name not in MESSAGE_FIELDS:
                raise InvalidRequest(
                    f"{at} has an unknown field {shown(name)}.", param=f"{at}.{name}"[:80]
                )
        if message.get("content") is None and role not in MAY_BE_EMPTY:
            raise InvalidRequest(
                f"{at}.content is required for the role {role}.", param=f"{at}.content"
            )
