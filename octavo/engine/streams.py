"""Delta streams on an event loop: one per open request, fed by whoever hears the engine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from octavo.core.errors import InvalidRequest, ServerError
from octavo.core.plan import Delta, StepOutput


class DeltaStream(AsyncIterator[Delta]):
    """Yields deltas up to the last one. Closing forgets the request; later deltas are dropped.

    What comes while nobody takes it becomes one delta, so that a slow client costs its tokens'
    numbers and no more.
    """

    def __init__(self, owner: Streams, request_id: str) -> None:
        self._owner = owner
        self._id = request_id
        self._waiting: deque[Delta | ServerError] = deque()
        self._news = asyncio.Event()
        self._ended = False

    def put(self, item: Delta | ServerError) -> None:
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, Delta) and isinstance(item, Delta) and item.finish != "error":
            self._waiting[-1] = _merged(last, item)
        else:
            self._waiting.append(item)
        self._news.set()

    def put_token(self, token: int) -> None:
        """A delta of one id, made only if none waits."""
        waiting = self._waiting
        if not waiting:
            waiting.append(_Merged(self._id, [token], None, None, None, None, None, [], []))
            self._news.set()
        elif isinstance(waiting[-1], _Merged):
            waiting[-1].ids.append(token)
        else:
            self.put(Delta(self._id, [token]))

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        item = self._waiting.popleft()
        if isinstance(item, ServerError):
            self.close()
            raise item
        if item.finish is not None:
            self.close()
        return item

    def close(self) -> None:
        self._ended = True
        self._owner.forget(self._id)


class _Merged(Delta):
    """Its lists are its own, so that they may grow."""

    __slots__ = ()


def _merged(first: Delta, then: Delta) -> _Merged:
    """Two deltas in a row as one."""
    if not isinstance(first, _Merged):
        first = _Merged(
            first.id,
            list(first.ids),
            cached_tokens=first.cached_tokens,
            logprobs=list(first.logprobs),
            prompt_logprobs=list(first.prompt_logprobs),
        )
    first.ids += then.ids
    first.logprobs += then.logprobs
    first.prompt_logprobs += then.prompt_logprobs
    first.finish, first.stop_id = then.finish, then.stop_id
    first.error_code, first.error = then.error_code, then.error
    if first.cached_tokens is None:
        first.cached_tokens = then.cached_tokens
    return first


class Streams:
    """All open streams of one front, by request id. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._open: dict[str, DeltaStream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str) -> DeltaStream:
        if request_id in self._open:
            raise InvalidRequest(
                f"request_id {request_id!r} is already running.", param="request_id"
            )
        stream = self._open[request_id] = DeltaStream(self, request_id)
        return stream

    def put_step(self, output: StepOutput) -> None:
        """Give each open stream its news of a step."""
        streams = self._open
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            stream = streams.get(request_id)
            if stream is not None:
                stream.put_token(token)
        for delta in output.deltas:
            self.put(delta)

    def put(self, delta: Delta) -> None:
        stream = self._open.get(delta.id)
        if stream is not None:
            stream.put(delta)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def fail_all(self, error: ServerError) -> None:
        for stream in list(self._open.values()):
            stream.put(error)
