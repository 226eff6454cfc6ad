"""What fronts and engines say to each other: msgpack frames on a Unix socket.

A frame is a 4-byte little-endian length and that many bytes of msgpack. The vocabulary is this
page: four sentences from a front, four from an engine. Ids and numbers only, never text;
typed on arrival; no pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from octavo.core.plan import AbortReason, StepOutput
from octavo.core.request import Request
from octavo.engine.client import EngineInfo

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
T = TypeVar("T")


class Hello(msgspec.Struct, tag="hello"):
    """First frame of a front: who it is. Its requests and their deltas stay with it."""

    front: str


class Submit(msgspec.Struct, tag="submit"):
    request: Request


class Abort(msgspec.Struct, tag="abort"):
    id: str
    reason: AbortReason = "abort"


class Control(msgspec.Struct, tag="control"):
    """One path for every administrative verb; ``call`` pairs it with its Reply."""

    call: int
    name: str
    args: dict[str, Any]


class Progress(msgspec.Struct, tag="progress"):
    """The engine is starting: what it does now, and how far it is (0 to 1)."""

    stage: str
    share: float


class Ready(msgspec.Struct, tag="ready"):
    info: EngineInfo


class News(msgspec.Struct, tag="news"):
    """What a step has brought the requests of this front."""

    output: StepOutput


class Reply(msgspec.Struct, tag="reply"):
    call: int
    value: Any = None
    error: str | None = None


ToEngine = Hello | Submit | Abort | Control
ToFront = Progress | Ready | News | Reply


def encode(message: ToEngine | ToFront) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into messages of one union; refuses frames over the limit."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, at)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
            end = at + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                message = self._decoder.decode(view[at + _LENGTH.size : end])
            at = end
            yield message
        del self._buffer[:at]
