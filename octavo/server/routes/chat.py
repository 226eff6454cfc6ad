"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.server import logprobs
from octavo.server.auth import tenant_of
from octavo.server.context import Context
from octavo.server.generation import Generation, Label, check_counts, label, truncated
from octavo.server.openapi import describe
from octavo.server.routes.body import answer, read
from octavo.server.schemas.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from octavo.server.schemas.chat import ChatRequest, chat_max_tokens, check_chat
from octavo.server.schemas.common import check_answer, sampling_params, terms
from octavo.server.sse import EventStream
from octavo.text.stream import Chunk

EXAMPLE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 32,
    "temperature": 0,
}


def chat_routes(app: FastAPI, context: Context) -> None:

    @app.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        openapi_extra=describe("Generate", ChatRequest, ChatCompletion, EXAMPLE, stream=ChatChunk),
    )
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat schema with vLLM's sampling parameters beside it."""
        body = await read(request, ChatRequest, context)
        check_answer(body)
        check_chat(body)
        tag = label(body, context, "chatcmpl", request.state.request_id)
        generation = await _generation(body, request, context)
        writer = ChatWriter(context, body, tag, generation)
        if body.stream:
            return EventStream(writer.events(), context.gate, context.settings.keep_alive_s)
        return answer(await context.gate.run(writer.whole(), request.receive))


async def _generation(body: ChatRequest, request: Request, context: Context) -> Generation:
    service = context.service
    asked = terms(body, tenant_of(request))
    check_counts(body, 1, context)
    params = sampling_params(
        body,
        context.settings.default_sampling,
        max_tokens=chat_max_tokens(body),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    going_on = bool(body.continue_final_message)
    opens = body.add_generation_prompt
    ids = await service.text.render(
        body.messages,
        tools=body.tools or None,
        add_generation_prompt=not going_on if opens is None else opens,
        continue_final_message=going_on,
        kwargs=body.chat_template_kwargs,
    )
    ids = truncated(ids, body, service.limits.max_model_len - (params.max_tokens or 1))
    return await Generation.prepare(context, [ids], params, asked, request)


class ChatWriter:
    """A generation as one answer, or as the events of a stream."""

    def __init__(
        self, context: Context, body: ChatRequest, tag: Label, generation: Generation
    ) -> None:
        self._tokenizer = context.service.text.tokenizer
        self._tag = tag
        self._generation = generation
        self._include_stop = generation.params.include_stop_str_in_output
        self._with_logprobs = bool(body.logprobs)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._with_ids = bool(body.return_token_ids)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._no_usage: UnsetType | None = None if self._with_usage else UNSET
        self._encode = msgspec.json.Encoder().encode

    async def whole(self) -> ChatCompletion:
        chunks = await self._generation.collect()
        done = ChatCompletion(
            self._tag.id,
            self._tag.created,
            self._tag.model,
            [self._choice(i, chunk) for i, chunk in enumerate(chunks)],
            self._generation.usage(),
        )
        if self._with_prompt_logprobs:
            done.prompt_logprobs = logprobs.prompt_logprobs(
                chunks[0].prompt_logprobs, self._tokenizer
            )
        if self._with_ids:
            done.prompt_token_ids = self._generation.prompts[0]
        return done

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One role event and one finish event for each choice, its text in between."""
        opening = b"".join(self._first_event(i) for i in range(self._generation.num_choices))
        async with aclosing(self._generation.chunks()) as chunks:
            async for i, chunk in chunks:
                event, opening = opening + self._text_event(i, chunk), b""
                if chunk.finish is not None:
                    event += self._finish_event(i, chunk)
                if event:
                    yield event
        if self._with_usage:
            yield self._event([], self._generation.usage())

    def _choice(self, index: int, chunk: Chunk) -> ChatChoice:
        return ChatChoice(
            index,
            ChatMessage("assistant", chunk.text),
            self._logprobs(chunk),
            chunk.finish,
            chunk.stop_reason,
            chunk.ids if self._with_ids else UNSET,
        )

    def _logprobs(self, chunk: Chunk) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        entries = logprobs.visible(chunk, include_stop=self._include_stop)
        return logprobs.chat_logprobs(entries, self._tokenizer)

    def _first_event(self, index: int) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        ids = self._generation.prompts[0] if self._with_ids else UNSET
        return self._event([ChatChunkChoice(index, delta)], self._no_usage, ids)

    def _text_event(self, index: int, chunk: Chunk) -> bytes:
        """Nothing if the chunk's tokens wait for the rest of a character or of a stop string."""
        if not chunk.text and not (chunk.ids and (self._with_logprobs or self._with_ids)):
            return b""
        choice = ChatChunkChoice(
            index,
            ChatDelta(content=chunk.text),
            self._logprobs(chunk),
            token_ids=chunk.ids if self._with_ids else UNSET,
        )
        return self._event([choice], self._no_usage)

    def _finish_event(self, index: int, chunk: Chunk) -> bytes:
        choice = ChatChunkChoice(
            index, ChatDelta(), finish_reason=chunk.finish, stop_reason=chunk.stop_reason
        )
        return self._event([choice], self._no_usage)

    def _event(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        tag = self._tag
        chunk = ChatChunk(
            tag.id, tag.created, tag.model, choices, usage=usage, prompt_token_ids=prompt_ids
        )
        return b"data: " + self._encode(chunk) + b"\n\n"
