"""Service: a front's engine. Prompts and parameters in, text out, many at once.

Between the routes (or ``AsyncLLM``) and an :class:`EngineClient`: validates, registers streams
before anything is sent, turns deltas into text, and aborts what nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Mapping
from typing import Any

from octavo.core.errors import EngineFault
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.validation import Limits, make_requests
from octavo.engine.client import EngineClient, EngineInfo, Health
from octavo.text.front import TextFront
from octavo.text.stream import Chunk, TextStream


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

    async def start(self) -> None:
        """Wait until the engine is warm, then take its real limits."""
        self.info = await self.client.ready()
        self.limits = dataclasses.replace(
            self.limits,
            max_model_len=self.info.max_model_len,
            page_size=self.info.page_size,
            kv_tokens=self.info.kv_tokens,
            prefix_caching=self.info.prefix_caching,
        )
        self.text.max_model_len = self.info.max_model_len
        await self.text.warm_up()

    def prepare(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """The n requests of one prompt. Raises :class:`CallerError` if one cannot be served."""
        return make_requests(
            request_id,
            prompt,
            params,
            self.limits,
            bad_words=self.text.bad_word_ids(params.bad_words or ()),
            priority=priority,
            cache_salt=cache_salt,
            draw_seed=draw_seed,
        )

    async def stream(
        self, requests: list[Request], params: SamplingParams
    ) -> AsyncIterator[tuple[int, Chunk]]:
        """Chunks of all choices as they come: (choice index, chunk).

        The last chunk of a choice has ``finish``. An engine fault raises, and leaving the iterator
        early (or being cancelled) aborts what is still running.
        """
        merged: asyncio.Queue[tuple[int, Chunk] | Exception] = asyncio.Queue()
        choices = [
            _Choice(i, request, self.text.open_stream(params), self.client, merged)
            for i, request in enumerate(requests)
        ]
        if len(choices) == 1:  # the common case needs neither tasks nor a queue
            async for item in choices[0].chunks():
                yield item
            return
        tasks = [asyncio.create_task(choice.pump()) for choice in choices]
        try:
            open_choices = len(choices)
            while open_choices:
                news = await merged.get()
                if isinstance(news, Exception):
                    raise news
                open_choices -= news[1].finish is not None
                yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def health(self) -> Health:
        return self.client.health()

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        return await self.client.control(name, args)


class _Choice:
    """One request on its way: deltas in, chunks out, aborted unless it ended by itself."""

    def __init__(
        self,
        index: int,
        request: Request,
        text: TextStream,
        client: EngineClient,
        merged: asyncio.Queue[tuple[int, Chunk] | Exception],
    ) -> None:
        self._index = index
        self._request = request
        self._text = text
        self._client = client
        self._merged = merged
        self._deltas = client.submit(request)  # registered before anyone awaits

    async def chunks(self) -> AsyncIterator[tuple[int, Chunk]]:
        ended = False
        try:
            async for delta in self._deltas:
                ended = delta.finish is not None
                if delta.finish == "error":
                    raise EngineFault(
                        delta.error or "The engine failed on this request.", code=delta.error_code
                    )
                chunk = self._text.push(delta)
                yield self._index, chunk
                if chunk.finish is not None:  # a stop string may end it before the engine does
                    return
        finally:
            if not ended:
                self._client.abort(self._request.id)
                close = getattr(self._deltas, "close", None)
                if close is not None:
                    close()

    async def pump(self) -> None:
        try:
            async for item in self.chunks():
                self._merged.put_nowait(item)
        except Exception as error:  # handed to the consumer, who raises it
            self._merged.put_nowait(error)
