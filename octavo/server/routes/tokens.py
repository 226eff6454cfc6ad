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
        for token in body.tokens:
            integer("tokens", token, 0, service.limits.vocab_size - 1)
        return answer(
            DetokenizeAnswer(service.text.tokenizer.decode(body.tokens, skip_special=False))
        )


async def _ids(body: TokenizeRequest, context: Context) -> list[int]:
    text = context.service.text
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
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
