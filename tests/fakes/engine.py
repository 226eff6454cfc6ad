"""FakeEngine: an EngineClient without torch, processes or sockets; it says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.core.errors import EngineUnavailable, ServerError
from octavo.core.histogram import LATENCY_BOUNDS
from octavo.core.plan import AbortReason, Delta, TokenLogprobs
from octavo.core.request import Request
from octavo.engine.client import EngineInfo, Health
from tests.fakes.bytetok import BYTE_OFFSET, EOS_ID


@dataclass(frozen=True)
class Script:
    """What a request gets: ``ids`` then EOS (None: letters drawn from its seed, without end).

    ``fault_at`` 1-based: that token is an error instead. ``timeout_at``: its time is over before.
    ``stall_at``: it never comes.
    """

    ids: Sequence[int] | None = None
    delay_s: float = 0.0
    fault_at: int | None = None
    fault_code: str | None = None
    timeout_at: int | None = None
    timeout_code: str = "request_timeout"
    stall_at: int | None = None
    cached_tokens: int = 0


class FakeEngine:
    """``script`` is one for all requests, or a function of the request.

    ``submitted``, ``aborted`` and ``open`` record what happened, by request id. Every request is
    sent through msgpack, as to a real engine.
    """

    def __init__(
        self,
        script: Script | Callable[[Request], Script] | None = None,
        *,
        max_model_len: int = 512,
        ready: bool = True,
    ) -> None:
        self._script = script or Script()
        self.info = EngineInfo(
            max_model_len=max_model_len,
            num_pages=1 + 4096 // 16,
            page_size=16,
            max_num_seqs=64,
            device="fake",
            dtype="float32",
            kv_tokens=4096,
        )
        self.submitted: dict[str, Request] = {}
        self.aborted: list[str] = []
        self.open: dict[str, FakeStream] = {}
        self.controls: list[str] = []
        self.broken: dict[str, str] = {}  # verbs that fail, and what they say
        self.stats: dict[str, Any] = {
            "waiting": 0,
            "swapped": 0,
            "pages_total": 256,
            "pages_free": 250,
            "pages_cached": 2,
            "pages_referenced": 4,
            "prefix_query_tokens": 100,
            "prefix_hit_tokens": 48,
            "host_pages_total": 40,
            "host_pages_free": 30,
            "preemptions": 1,
            "preemptions_recompute": 1,
            "preemptions_swap": 0,
            "preemption_reasons": {"decode": 1},
            "computed_tokens": 0,
            "recomputed_tokens": 0,
            "prompt_tokens": 0,
            "generation_tokens": 0,
            "finished": {},
            "timeouts": {},
            "queue_times": [0] * (len(LATENCY_BOUNDS) + 1),
            "queue_time_sum": 0.0,
            "audit_failures": 0,
        }
        self._health = Health(False, "starting")
        self._warm = asyncio.Event()
        if ready:
            self.become_ready()

    def become_ready(self) -> None:
        self._health = Health(True, "ready")
        self._warm.set()

    def die(self, detail: str = "killed by the test") -> None:
        """All open streams raise; health says dead."""
        self._health = Health(False, "dead", detail)
        for stream in list(self.open.values()):
            stream.end(EngineUnavailable(f"The engine died: {detail}."))

    async def ready(self) -> EngineInfo:
        await self._warm.wait()
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Delta]:
        if not self._health.serving:
            raise EngineUnavailable("No engine is serving; try again shortly.")
        request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request)
        assert request.id not in self.submitted, f"id {request.id} is used twice"
        self.submitted[request.id] = request
        script = self._script(request) if callable(self._script) else self._script
        stream = self.open[request.id] = FakeStream(self, request, script)
        return stream

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        self.aborted.append(request_id)
        stream = self.open.pop(request_id, None)
        if stream is not None:
            stream.end(Delta(request_id, finish=reason))

    def health(self) -> Health:
        return self._health

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        if not self._health.serving:
            raise EngineUnavailable("No engine is serving; try again shortly.")
        self.controls.append(name)
        if name in self.broken:
            raise ServerError(self.broken[name])
        if name == "reset_prefix_cache":
            return self.stats["pages_cached"]
        return {**self.stats, "running": len(self.open)}


class FakeStream:
    """One request's deltas, a token each."""

    def __init__(self, engine: FakeEngine, request: Request, script: Script) -> None:
        self._engine = engine
        self._request = request
        self._script = script
        self._count = 0
        self._ended = asyncio.Event()
        self._last: Delta | Exception | None = None
        self._over = False

    def end(self, last: Delta | Exception) -> None:
        self._last = last
        self._ended.set()

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        stalled = self._script.stall_at == self._count + 1
        await self._pause(None if stalled else self._script.delay_s)
        if isinstance(self._last, Exception):
            self._forget()
            raise self._last
        delta = self._last or self._next()
        if delta.finish is not None:
            self._forget()
        return delta

    async def _pause(self, seconds: float | None) -> None:
        if seconds == 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), seconds)

    def close(self) -> None:
        """Forget the deltas; the request runs on until it is aborted."""
        self._over = True

    def _forget(self) -> None:
        self._over = True
        self._engine.open.pop(self._request.id, None)

    def _next(self) -> Delta:
        request, script = self._request, self._script
        self._count += 1
        if script.fault_at == self._count:
            message = f"The fake engine failed at token {self._count}."
            return Delta(request.id, finish="error", error_code=script.fault_code, error=message)
        if script.timeout_at == self._count:
            code, message = script.timeout_code, "The time was over."
            return Delta(request.id, finish="timeout", error_code=code, error=message)
        token = self._token(self._count - 1)
        delta = Delta(request.id, [token])
        if self._count == 1:
            delta.cached_tokens = script.cached_tokens
            delta.prompt_logprobs = self._prompt_logprobs()
        if request.sampling.logprobs is not None:
            delta.logprobs = [self._entry(token, request.sampling.logprobs)]
        if token in request.stop_ids and self._count > request.sampling.min_tokens:
            delta.finish, delta.stop_id = "stop", token
        elif self._count == request.max_tokens:
            delta.finish = "length"
        return delta

    def _token(self, position: int) -> int:
        ids = self._script.ids
        if ids is not None and position < len(ids):
            return ids[position]
        if ids is not None and EOS_ID in self._request.stop_ids:
            return EOS_ID
        sampling = self._request.sampling
        seed = sampling.seed if sampling.temperature else 0
        drawn = zlib.crc32(repr((seed, position, self._request.prompt)).encode())
        return BYTE_OFFSET + ord("a") + drawn % 26

    def _entry(self, token: int, top: int) -> TokenLogprobs:
        """The token has rank 1; with top_k, what is beyond it is impossible."""
        best = [token + k for k in range(top)]
        allowed = self._request.sampling.top_k or top
        values = [-0.25 * (k + 1) if k < allowed else float("-inf") for k in range(top)]
        return TokenLogprobs([token, *best], [-0.25, *values], rank=1)

    def _prompt_logprobs(self) -> list[TokenLogprobs]:
        top = self._request.sampling.prompt_logprobs
        if top is None:
            return []
        return [self._entry(token, top) for token in self._request.prompt[1:]]
