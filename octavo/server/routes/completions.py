"""/v1/completions, and /generate, which is the same without the wrapping."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequest
from octavo.core.plan import TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.server import logprobs
from octavo.server.auth import tenant_of
from octavo.server.context import Context
from octavo.server.generation import (
    Generation,
    Label,
    check_counts,
    label,
    serving_name,
    truncated,
)
from octavo.server.openapi import describe
from octavo.server.routes.body import answer, read
from octavo.server.schemas.answers import (
    Completion,
    CompletionChoice,
    GenerateAnswer,
    Usage,
)
from octavo.server.schemas.common import (
    SamplingFields,
    check_answer,
    check_common,
    sampling_params,
    terms,
)
from octavo.server.schemas.completion import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    GenerateRequest,
    completion_max_tokens,
    split_prompts,
)
from octavo.server.sse import EventStream
from octavo.text.stream import Chunk

EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def completion_routes(app: FastAPI, context: Context) -> None:

    @app.post(
        "/v1/completions",
        summary="Continue a text",
        openapi_extra=describe(
            "Generate", CompletionRequest, Completion, EXAMPLE, stream=Completion
        ),
    )
    async def completions(request: Request) -> Response:
        """OpenAI's completions schema with vLLM's sampling parameters beside it."""
        body = await read(request, CompletionRequest, context)
        check_answer(body)
        tag = label(body, context, "cmpl", request.state.request_id)
        writer = await _writer(body, tag, request, context)
        if body.stream:
            return EventStream(writer.events(), context.gate, context.settings.keep_alive_s)
        return answer(await context.gate.run(writer.whole(), request.receive))

    @app.post(
        "/generate",
        summary="Continue a text, bare",
        openapi_extra=describe("Generate", GenerateRequest, GenerateAnswer, EXAMPLE),
    )
    async def generate(request: Request) -> Response:
        """The route of vLLM's first demonstration server: each text repeats the prompt."""
        body = await read(request, GenerateRequest, context)
        check_common(body)
        serving_name(body.model, context)
        check_counts(body, 1, context)
        asked = terms(body, tenant_of(request))
        limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(
            body, context.settings.default_sampling, max_tokens=limit, logprobs=None
        )
        ids = await context.service.text.encode(body.prompt)
        fitted = _fitted(ids, body, params, context)
        generation = await Generation.prepare(context, [fitted], params, asked, request)
        chunks = await context.gate.run(generation.collect(), request.receive)
        return answer(GenerateAnswer([body.prompt + chunk.text for chunk in chunks]))


async def _writer(
    body: CompletionRequest, tag: Label, request: Request, context: Context
) -> CompletionWriter:
    text = context.service.text
    asked = terms(body, tenant_of(request))
    members = split_prompts(body.prompt)
    check_counts(body, len(members), context)
    limit = completion_max_tokens(body)
    params = sampling_params(
        body,
        context.settings.default_sampling,
        max_tokens=max(1, limit),  # nothing is asked for: one is made, and dropped
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
    )
    special = body.add_special_tokens is not False
    prompts, echoes = [], []
    for place, member in members:
        ids = member if isinstance(member, list) else await text.encode(member, add_special=special)
        if not ids:
            raise InvalidRequest(f"{place} must not be empty.", param=place)
        ids = _fitted(ids, body, params, context)
        prompts.append(ids)
        cut = body.truncate_prompt_tokens is not None
        echoes.append(member if isinstance(member, str) and not cut else None)
    # Checks the ids before any is decoded.
    generation = await Generation.prepare(context, prompts, params, asked, request)

    def decode_echoes() -> list[str]:
        return [
            echo if echo is not None else text.tokenizer.decode(ids)
            for echo, ids in zip(echoes, prompts, strict=True)
        ]

    shown = await text.run(decode_echoes) if body.echo else []
    return CompletionWriter(context, body, tag, generation, shown)


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many alternatives a position: what the echo shows and what was asked for beside it."""
    asked = [body.logprobs if body.echo else None, body.prompt_logprobs]
    return max((k for k in asked if k is not None), default=None)


def _fitted(
    ids: list[int], body: SamplingFields, params: SamplingParams, context: Context
) -> list[int]:
    room = context.service.limits.max_model_len - (params.max_tokens or 1)
    return truncated(ids, body, room)


class CompletionWriter:
    """A generation as one answer, or as the events of a stream.

    ``echoes``: the text of each prompt if the answer repeats it, else nothing.
    """

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        tag: Label,
        generation: Generation,
        echoes: list[str],
    ) -> None:
        text = context.service.text
        tokenizer = text.tokenizer
        params = generation.params
        self._tokenizer = tokenizer
        self._tag = tag
        self._generation = generation
        self._echoes = echoes
        self._include_stop = params.include_stop_str_in_output
        self._with_output = body.max_tokens != 0
        self._num_top = body.logprobs
        self._num_prompt_top = body.prompt_logprobs
        self._with_ids = bool(body.return_token_ids)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._no_usage: UnsetType | None = None if self._with_usage else UNSET
        self._lists = [
            logprobs.CompletionLogprobWriter(
                tokenizer,
                skip_special=params.skip_special_tokens,
                continues=not echoes and text.continues(generation.prompt_of(i)),
            )
            for i in range(generation.num_choices)
        ]
        self._encode = msgspec.json.Encoder().encode

    async def whole(self) -> Completion:
        chunks = await self._generation.collect()
        choices = [self._whole_choice(i, chunk) for i, chunk in enumerate(chunks)]
        return self._completion(choices, self._usage())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """One finish event for each choice, after its text."""
        echoing = range(self._generation.num_choices if self._echoes else 0)
        prompt_entries: dict[int, list[TokenLogprobs]] = {i: [] for i in echoing}
        if self._num_top is None:
            for i in prompt_entries:
                yield self._event(self._echo(i, []))
            prompt_entries.clear()
        async with aclosing(self._generation.chunks()) as chunks:
            async for i, chunk in chunks:
                events = b""
                if i in prompt_entries:
                    prompt_entries[i] += chunk.prompt_logprobs
                    if not chunk.ids:
                        continue
                    events += self._event(self._echo(i, prompt_entries.pop(i)))
                events += self._text_event(i, chunk)
                if chunk.finish is not None:
                    events += self._event(self._end(i, chunk))
                if events:
                    yield events
        if self._with_usage:
            yield self._encoded(self._completion([], self._usage()))

    def _whole_choice(self, index: int, chunk: Chunk) -> CompletionChoice:
        parts = [self._echo(index, chunk.prompt_logprobs)] if self._echoes else []
        if self._with_output:
            parts.append(self._output(index, chunk))
        choice = self._end(index, chunk)
        choice.text = "".join(part.text for part in parts)
        if self._num_top is not None:
            choice.logprobs = logprobs.join(part.logprobs for part in parts if part.logprobs)
        if self._with_ids:
            choice.token_ids = chunk.ids if self._with_output else []
            choice.prompt_token_ids = self._generation.prompt_of(index)
        if self._num_prompt_top is not None:
            choice.prompt_logprobs = logprobs.prompt_logprobs(
                logprobs.best(chunk.prompt_logprobs, self._num_prompt_top), self._tokenizer
            )
        return choice

    def _echo(self, index: int, entries: list[TokenLogprobs]) -> CompletionChoice:
        text = self._echoes[index // self._generation.params.n]
        choice = CompletionChoice(index, text)
        if self._num_top is not None:
            ids = self._generation.prompt_of(index)
            choice.logprobs = self._lists[index].write_prompt(
                ids, logprobs.best(entries, self._num_top)
            )
        return choice

    def _output(self, index: int, chunk: Chunk) -> CompletionChoice:
        choice = CompletionChoice(index, chunk.text)
        if self._num_top is not None:
            entries = logprobs.visible(chunk, include_stop=self._include_stop)
            choice.logprobs = self._lists[index].write(entries)
        if self._with_ids:
            choice.token_ids = chunk.ids
        return choice

    def _end(self, index: int, chunk: Chunk) -> CompletionChoice:
        if not self._with_output:
            return CompletionChoice(index, "", finish_reason="length", stop_reason=None)
        return CompletionChoice(
            index, "", finish_reason=chunk.finish, stop_reason=chunk.stop_reason
        )

    def _text_event(self, index: int, chunk: Chunk) -> bytes:
        """Nothing if the chunk's tokens wait for the rest of a character or of a stop string."""
        if not self._with_output:
            return b""
        if not chunk.text and not (chunk.ids and (self._num_top is not None or self._with_ids)):
            return b""
        return self._event(self._output(index, chunk))

    def _event(self, choice: CompletionChoice) -> bytes:
        return self._encoded(self._completion([choice], self._no_usage))

    def _encoded(self, completion: Completion) -> bytes:
        return b"data: " + self._encode(completion) + b"\n\n"

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        tag = self._tag
        return Completion(tag.id, tag.created, tag.model, choices, usage=usage)

    def _usage(self) -> Usage:
        return self._generation.usage(output=self._with_output)
