"""Generation: one HTTP request's work, from checked prompts to chunks and token counts."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from starlette.requests import Request as HttpRequest

from octavo.core.errors import EngineUnavailable, InvalidRequest, ModelNotFound, RequestTimeout
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams, integer
from octavo.core.terms import Terms
from octavo.core.validation import check_sequences
from octavo.server.context import Context
from octavo.server.gate import Permit, permit_of
from octavo.server.limits import REQUEST_ID
from octavo.server.metrics import Metrics
from octavo.server.schemas.answers import PromptTokensDetails, Usage
from octavo.server.schemas.common import AnswerFields, SamplingFields
from octavo.text.stream import Chunk

log = logging.getLogger("octavo.server")
ChunkGenerator: TypeAlias = AsyncGenerator[tuple[int, Chunk], None]


@dataclass(frozen=True, slots=True)
class Label:
    """What every answer and event of a request repeats."""

    id: str
    model: str
    created: int  # seconds since 1970


def label(body: AnswerFields, context: Context, kind: str, header_id: str) -> Label:
    """``kind`` is the prefix of the id ("chatcmpl", "cmpl"). Raises for an unknown model."""
    name = serving_name(body.model, context)
    if body.request_id is not None and not REQUEST_ID.fullmatch(body.request_id):
        raise InvalidRequest(
            "request_id must have 1 to 128 letters, digits or any of . _ : -", param="request_id"
        )
    return Label(f"{kind}-{body.request_id or header_id}", name, int(time.time()))


def serving_name(model: str | None, context: Context) -> str:
    names = context.settings.model_names
    if not model:
        return names[0]
    if model not in names:
        raise ModelNotFound(
            f"The model '{model[:200]}' is not served here; there is {', '.join(names)}.",
            param="model",
            code="model_not_found",
        )
    return model


def check_counts(body: SamplingFields, num_prompts: int, context: Context) -> None:
    """Bounds that hold before anything is tokenized."""
    n = 1 if body.n is None else body.n
    integer("n", n, 1, None)
    check_sequences(num_prompts, n, context.service.limits)


def truncated(ids: list[int], body: SamplingFields, room: int) -> list[int]:
    """The last ``truncate_prompt_tokens`` ids; -1 keeps what leaves room for the answer."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    return ids[-max(1, room if keep == -1 else keep) :]


class Generation:
    """The prompts' n choices, side by side: choice index = prompt number times n + choice."""

    def __init__(
        self,
        context: Context,
        prompts: list[list[int]],
        params: SamplingParams,
        requests: list[Request],
        permit: Permit,
    ) -> None:
        self.prompts = prompts
        self.params = params
        self._service = context.service
        self._requests = requests
        self._permit = permit
        self._counts = [0] * len(requests)
        self._cached = [0] * len(requests)
        self._meter = Meter(context.metrics, len(requests), time.monotonic())

    @classmethod
    async def prepare(
        cls,
        context: Context,
        prompts: list[list[int]],
        params: SamplingParams,
        terms: Terms,
        asked_by: HttpRequest,
    ) -> Generation:
        """Validates everything, so that nothing is refused once a stream has begun."""
        work_id = uuid.uuid4().hex  # the caller's id may repeat, this one does not
        requests = await context.service.prepare(work_id, prompts, params, terms)
        generation = cls(context, prompts, params, requests, permit_of(asked_by))
        if context.settings.log_requests:
            generation._log(asked_by.state.request_id, terms)
        return generation

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ids) for ids in self.prompts)

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self.params.n]

    async def chunks(self) -> ChunkGenerator:
        """(choice index, chunk) as they come, counted. Closing it aborts what still runs."""
        stream = self._service.stream(self._requests, self.params)
        try:
            async with aclosing(stream):
                async for index, chunk in stream:
                    if chunk.finish in ("abort", "error"):
                        raise EngineUnavailable(
                            "The request was aborted before its end.", code="aborted"
                        )
                    self._count(index, chunk)
                    yield index, chunk
        except RequestTimeout:
            self._meter.fail("timeout")
            raise
        except Exception:
            self._meter.fail("error")
            raise
        finally:
            self._meter.fail("abort")

    async def collect(self) -> list[Chunk]:
        """One chunk per choice, everything joined."""
        parts: list[list[Chunk]] = [[] for _ in self._requests]
        async for index, chunk in self.chunks():
            parts[index].append(chunk)
        return [_joined(chunks) for chunks in parts]

    def usage(self, *, output: bool = True) -> Usage:
        """Token counts so far: each prompt once, all choices' tokens (none if not ``output``)."""
        completion = sum(self._counts) if output else 0
        prompt = self.prompt_tokens
        cached = sum(self._cached[:: self.params.n])
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))

    def _log(self, request_id: str, terms: Terms) -> None:
        """``request_id`` is the one of the answer's header. The timeout is the one in force."""
        log.info(
            "Received request %s: prompt_tokens=%d, priority=%d, timeout=%s, cache_salt=%s, %r",
            request_id,
            self.prompt_tokens,
            terms.priority,
            self._requests[0].timeout,
            "none" if terms.cache_salt is None else "given",
            self.params,
        )

    def _count(self, index: int, chunk: Chunk) -> None:
        if chunk.ids:
            self._permit.speaks()
        self._counts[index] += len(chunk.ids)
        if chunk.cached_tokens is not None:
            self._cached[index] = chunk.cached_tokens
        if chunk.ids and not self._counts[index] - len(chunk.ids) and index % self.params.n == 0:
            self._meter.prompt(len(self.prompt_of(index)))
        self._meter.chunk(index, len(chunk.ids), chunk.finish)


def _joined(chunks: list[Chunk]) -> Chunk:
    last = chunks[-1]
    return Chunk(
        text="".join(chunk.text for chunk in chunks),
        ids=list(chain.from_iterable(chunk.ids for chunk in chunks)),
        logprobs=list(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        prompt_logprobs=list(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
        finish=last.finish,
        stop_reason=last.stop_reason,
    )


class Meter:
    """Tells the metrics what happens to each choice of one request."""

    def __init__(self, metrics: Metrics, num_choices: int, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._last = [arrival] * num_choices
        self._tokens = [0] * num_choices
        self._open = set(range(num_choices))

    def prompt(self, num_tokens: int) -> None:
        self._metrics.count_prompt(num_tokens)

    def chunk(self, index: int, num_tokens: int, finish: str | None) -> None:
        now = time.monotonic()
        if num_tokens:
            first = self._tokens[index] == 0
            self._metrics.count_tokens(num_tokens, now - self._last[index], first)
            self._tokens[index] += num_tokens
            self._last[index] = now
        if finish is not None:
            self._open.discard(index)
            self._metrics.count_end(finish, self._tokens[index], now - self._arrival)

    def fail(self, reason: str) -> None:
        """The choices that have not ended will not end by themselves."""
        for index in sorted(self._open):
            self._metrics.count_end(reason, self._tokens[index], time.monotonic() - self._arrival)
        self._open.clear()
