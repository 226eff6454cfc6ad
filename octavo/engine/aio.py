"""AsyncLLM: the same engine for asyncio programs, stepping on a thread of its own."""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from octavo.core.sampling import SamplingParams
from octavo.core.terms import Terms
from octavo.engine.build import build_engine
from octavo.engine.local import LocalClient
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.prompts import Prompt, salt_of, split
from octavo.engine.service import Service
from octavo.engine.startup import (
    build_text,
    load_config,
    request_limits,
    sampling_defaults,
)
from octavo.engine.status import StatusLog


class AsyncLLM:
    """``async for output in AsyncLLM("org/name").generate(prompt, params)``.

    The model loads when the first request (or :meth:`start`) is awaited. Leaving an iterator early
    aborts its request.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config = load_config(model, options)
        text = build_text(self.config)
        status = StatusLog(self.config.device) if self.config.log_stats else None
        client = LocalClient(functools.partial(build_engine, self.config), status)
        self.service = Service(client, text, request_limits(self.config, text))
        self._client = client
        self._defaults = sampling_defaults(self.config)
        self._started = False

    async def start(self) -> None:
        if not self._started:
            await self.service.start()
            self._started = True

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, each time it has grown; the last one has ``finished``.

        See :meth:`octavo.LLM.generate` for ``priority``, ``tenant`` and ``timeout`` (seconds).
        Raises :class:`QueueTimeout` or :class:`RequestTimeout` if time ran out before a token.
        """
        await self.start()
        params = sampling_params or SamplingParams(**self._defaults)
        text, ids = split(prompt)
        if ids is None:
            ids = await self.service.text.encode(text or "")
        work_id = uuid.uuid4().hex  # the caller may use an id again; the engine never sees it twice
        request_id = request_id or work_id
        terms = Terms(priority, tenant, timeout, salt_of(prompt))
        requests = await self.service.prepare(work_id, [ids], params, terms)
        output = RequestOutput(
            request_id, text, ids, [CompletionOutput(i) for i in range(len(requests))]
        )
        token_text = self.service.text.tokenizer.token_text
        async for index, chunk in self.service.stream(requests, params):
            output.add(index, chunk, token_text)
            yield output.snapshot()

    async def chat(
        self,
        messages: list[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        await self.start()
        prompt = await self.service.text.render(messages)
        params = sampling_params or SamplingParams(**{"max_tokens": None, **self._defaults})
        async for output in self.generate(
            prompt, params, request_id, priority=priority, tenant=tenant, timeout=timeout
        ):
            yield output

    async def close(self) -> None:
        await self._client.close()
