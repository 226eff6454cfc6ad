"""Service: a front's engine. Prompts and parameters in, text out, many at once.

Between the routes (or ``AsyncLLM``) and an :class:`EngineClient`: validates, registers streams
before anything is sent, turns deltas into text, and aborts what nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

from octavo.core.errors import EngineFault, InvalidRequest, QueueTimeout, RequestTimeout
from octavo.core.plan import Delta, TokenLogprobs
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.terms import NO_TERMS, Terms
from octavo.core.validation import Limits, check_sequences, make_requests
from octavo.engine.client import EngineClient, EngineInfo, Health
from octavo.text.front import TextFront
from octavo.text.stream import Chunk, TextStream

MAX_BANS = 2**16  # each choice carries its own copy of the banned id sequences


def draw_seed() -> int:
    """A fresh 64-bit seed for a request that brought none."""
    return secrets.randbits(64)


class Service:
    """``info`` and the final ``limits`` exist once :meth:`start` has returned."""

    limits: Limits
    info: EngineInfo

    def __init__(self, client: EngineClient, text: TextFront, limits: Limits) -> None:
        self.client = client
        self.text = text
        self.limits = limits
        self._warm = False

    async def start(self) -> None:
        """Wait until the engine is warm, then take its real limits."""
        self.info = await self.client.ready()
        self.limits = dataclasses.replace(
            self.limits,
            max_model_len=self.info.max_model_len,
            page_size=self.info.page_size,
            prefix_caching=self.info.prefix_caching,
        )
        self.text.max_model_len = self.info.max_model_len
        await self.text.warm_up()
        self._warm = True

    async def prepare(
        self,
        request_id: str,
        prompts: list[list[int]],
        params: SamplingParams,
        terms: Terms = NO_TERMS,
    ) -> list[Request]:
        """The n requests of each prompt, made off the event loop.

        Raises :class:`CallerError` if one cannot be served, or not be turned into text.
        """

        def work() -> list[Request]:
            self.text.open_stream(params)  # refuses stop strings that it could not watch for
            check_sequences(len(prompts), params.n, self.limits)
            bad_words = self.text.bad_word_ids(params.bad_words or ())
            _check_bans(len(bad_words), len(prompts) * params.n)
            requests: list[Request] = []
            for i, prompt in enumerate(prompts):
                requests += make_requests(
                    request_id if len(prompts) == 1 else f"{request_id}-{i}",
                    prompt,
                    params,
                    self.limits,
                    terms,
                    bad_words=bad_words,
                    draw_seed=draw_seed,
                )
            return requests

        return await self.text.run(work)

    async def stream(
        self, requests: list[Request], params: SamplingParams
    ) -> AsyncGenerator[tuple[int, Chunk]]:
        """Chunks of all choices as they come: (choice index, chunk).

        The last chunk of a choice has ``finish``. An engine fault raises, as does the end of a time
        limit before any choice had a token. Leaving the iterator early (or being cancelled) aborts
        what is still running. The choices of a prompt all get its log-probabilities, with or
        before their first token.
        """
        choices: list[_Choice] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for index, request in enumerate(requests):
                text = self.text.open_stream(params, request.prompt)
                choices.append(_Choice(index, request, text, self.client))
            if len(choices) == 1:  # the common case needs neither tasks nor a queue
                async with aclosing(choices[0].chunks()) as chunks:
                    async for item in chunks:
                        yield item
                return
            merged: _News = asyncio.Queue(len(choices))
            tasks += [asyncio.create_task(choice.pump(merged)) for choice in choices]
            open_choices = len(choices)
            shared = _SharedPrompts(requests) if params.prompt_logprobs is not None else None
            num_late = 0
            while open_choices:
                index, news = await merged.get()
                if isinstance(news, RequestTimeout) and num_late + 1 < len(choices):
                    num_late += 1
                    news = Chunk(finish="timeout")
                if isinstance(news, Exception):
                    raise news
                open_choices -= news.finish is not None
                for item in ((index, news),) if shared is None else shared.add(index, news):
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            for choice in choices:
                choice.close()

    def health(self) -> Health:
        """The engine's, but not serving before the text side is warm too."""
        health = self.client.health()
        if health.serving and not self._warm:
            return Health(False, "starting", "warming up the tokenizer")
        return health

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        return await self.client.control(name, args)


def _check_bans(num_words: int, num_choices: int) -> None:
    if num_words * num_choices > MAX_BANS:
        raise InvalidRequest(
            f"bad_words (with and without a space before them) times prompts times n must be at "
            f"most {MAX_BANS}, not {num_words} × {num_choices}.",
            param="bad_words",
        )


class _SharedPrompts:
    """Prompt log-probabilities are computed for the first of n choices: the others wait until it
    has them all, and get a copy."""

    def __init__(self, requests: list[Request]) -> None:
        places = {request.id: index for index, request in enumerate(requests)}
        self._first = [places.get(r.parent or r.id, index) for index, r in enumerate(requests)]
        self._entries: list[list[TokenLogprobs]] = [[] for _ in requests]
        self._held: dict[int, list[tuple[int, Chunk]]] = {first: [] for first in self._first}
        self._due = [first != index for index, first in enumerate(self._first)]

    def add(self, index: int, chunk: Chunk) -> list[tuple[int, Chunk]]:
        """What may go out now that this chunk has come."""
        first = self._first[index]
        if index == first:
            self._entries[index] += chunk.prompt_logprobs
            held = self._held.pop(first, []) if chunk.ids or chunk.finish else []
            return [(index, chunk), *(self._with_entries(*item) for item in held)]
        if first in self._held:
            self._held[first].append((index, chunk))
            return []
        return [self._with_entries(index, chunk)]

    def _with_entries(self, index: int, chunk: Chunk) -> tuple[int, Chunk]:
        if self._due[index]:
            self._due[index] = False
            chunk.prompt_logprobs = list(self._entries[self._first[index]])
        return index, chunk


_News: TypeAlias = "asyncio.Queue[tuple[int, Chunk | Exception]]"


class _Choice:
    """One request on its way: deltas in, chunks out. Its stream is open before anyone awaits."""

    def __init__(
        self, index: int, request: Request, text: TextStream, client: EngineClient
    ) -> None:
        self._index = index
        self._id = request.id
        self._text = text
        self._client = client
        self._ended = False
        self._spoke = False
        self._stopped = False  # by a stop string, which the engine cannot see
        self._deltas = client.submit(request)

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        async for delta in self._deltas:
            self._ended = delta.finish is not None
            self._spoke = self._spoke or bool(delta.ids)
            if (
                delta.error_code == "no_token_allowed"
            ):  # the request's own masks, met in the sampler
                raise InvalidRequest(delta.error or "No token may be generated.")
            if delta.finish == "error":
                raise EngineFault(
                    delta.error or "The engine failed on this request.", code=delta.error_code
                )
            if delta.finish == "timeout" and not self._spoke:
                raise _timed_out(delta)
            chunk = self._text.push(delta)
            self._stopped = chunk.finish is not None and delta.finish is None
            yield self._index, chunk
            if chunk.finish is not None:
                return

    async def pump(self, merged: _News) -> None:
        try:
            async for item in self.chunks():
                await merged.put(item)
        except Exception as error:  # handed to the consumer, who raises it
            await merged.put((self._index, error))

    def close(self) -> None:
        """Forget the stream; abort the request unless it has ended by itself."""
        self._deltas.close()
        if not self._ended:
            self._ended = True
            self._client.abort(self._id, "stop" if self._stopped else "abort")


def _timed_out(delta: Delta) -> RequestTimeout:
    kind = QueueTimeout if delta.error_code == "queue_timeout" else RequestTimeout
    return kind(delta.error or "The request's time was over.", code=delta.error_code)
