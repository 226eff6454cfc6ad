"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import integer
from octavo.server.context import Context
from octavo.server.generation import serving_name
from octavo.server.openapi import describe
from octavo.server.routes.body import answer, read
from octavo.server.schemas.answers import DetokenizeAnswer, TokenizeAnswer
from octavo.server.schemas.chat import check_messages
from octavo.server.schemas.tokens import DetokenizeRequest, TokenizeRequest

MIN_DETOKENIZE_LIMIT = 2**17  # ids; more than most contexts


def token_routes(app: FastAPI, context: Context) -> None:
    service = context.service

    @app.post(
        "/tokenize",
        summary="Text or a chat as token ids",
        openapi_extra=describe(
            "Tokens", TokenizeRequest, TokenizeAnswer, {"prompt": "Hello, world"}
        ),
    )
    async def tokenize(request: Request) -> Response:
        """The ids that the same prompt or messages would have in a generating request."""
        context.gate.check(service.health())
        body = await read(request, TokenizeRequest, context)
        serving_name(body.model, context)
        ids = await _ids(body, context)
        strings = None
        if body.return_token_strs:
            strings = [service.text.tokenizer.token_text(i) for i in ids]
        return answer(TokenizeAnswer(len(ids), service.limits.max_model_len, ids, strings))

    @app.post(
        "/detokenize",
        summary="Token ids as text",
        openapi_extra=describe(
            "Tokens", DetokenizeRequest, DetokenizeAnswer, {"tokens": [1, 2, 3]}
        ),
    )
    async def detokenize(request: Request) -> Response:
        context.gate.check(service.health())
        body = await read(request, DetokenizeRequest, context)
        serving_name(body.model, context)
        limit = max(service.limits.max_model_len, MIN_DETOKENIZE_LIMIT)
        if len(body.tokens) > limit:
            raise InvalidRequest(
                f"tokens may hold at most {limit} ids, not {len(body.tokens)}.", param="tokens"
            )
        return answer(DetokenizeAnswer(await service.text.run(lambda: _text(body.tokens, context))))


def _text(ids: list[int], context: Context) -> str:
    for token in ids:
        integer("tokens", token, 0, context.service.limits.vocab_size - 1)
    return context.service.text.tokenizer.decode(ids, skip_special=False)


def _check_fields(body: TokenizeRequest) -> None:
    """A field of the other form would have no effect."""
    chat = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    names = ("add_special_tokens",) if body.prompt is None else chat
    for name in names:
        if getattr(body, name) is not None:
            other = "messages" if body.prompt is None else "a prompt"
            raise InvalidRequest(f"{name} has no meaning with {other}.", param=name)


async def _ids(body: TokenizeRequest, context: Context) -> list[int]:
    text = context.service.text
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    _check_fields(body)
    if body.prompt is not None:
        return await text.encode(body.prompt, add_special=body.add_special_tokens is not False)
    assert body.messages is not None
    check_messages(body.messages)
    going_on = bool(body.continue_final_message)
    asked = body.add_generation_prompt
    return await text.render(
        body.messages,
        tools=body.tools or None,
        add_generation_prompt=not going_on if asked is None else asked,
        continue_final_message=going_on,
        kwargs=body.chat_template_kwargs,
    )
