"""Delta streams on an event loop: one per open request, fed by whoever hears the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from octavo.core.errors import InvalidRequest, ServerError
from octavo.core.plan import Delta


class DeltaStream(AsyncIterator[Delta]):
    """Yields deltas up to the last one. Closing forgets the request; later deltas are dropped."""

    def __init__(self, owner: Streams, request_id: str) -> None:
        self._owner = owner
        self._id = request_id
        self._queue: asyncio.Queue[Delta | ServerError] = asyncio.Queue()
        self._ended = False

    def put(self, item: Delta | ServerError) -> None:
        self._queue.put_nowait(item)

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, ServerError):
            self.close()
            raise item
        if item.finish is not None:
            self.close()
        return item

    def close(self) -> None:
        self._ended = True
        self._owner.forget(self._id)


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

    def put(self, delta: Delta) -> None:
        stream = self._open.get(delta.id)
        if stream is not None:
            stream.put(delta)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def fail_all(self, error: ServerError) -> None:
        for stream in list(self._open.values()):
            stream.put(error)
