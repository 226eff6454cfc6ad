"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct


class TokenizeRequest(Struct, kw_only=True):
    """Either ``prompt`` (a text) or ``messages`` (a chat, rendered first)."""

    model: str | None = None
    prompt: Annotated[str | None, Meta(examples=["Hello, world"])] = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Put BOS before a text prompt. Default: true.")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: Annotated[
        bool | None, Meta(description="Return each token's text as well.")
    ] = None


class DetokenizeRequest(Struct, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[int], Meta(examples=[[72, 101]])]
