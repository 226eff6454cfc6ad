"""Messages survive the wire, however the byte stream is cut; garbage is refused."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.plan import Delta, StepOutput, TokenLogprobs
from octavo.core.request import Request, Sampling
from octavo.engine import wire
from octavo.engine.client import EngineInfo

REQUEST = Request(
    id="r-1",
    prompt=[1, 2, 3],
    max_tokens=7,
    sampling=Sampling(
        temperature=0.5,
        seed=2**64 - 1,
        logit_bias={3: -100.0},
        allowed_ids=(1, 2),
        bad_words=((4, 5),),
        logprobs=2,
    ),
    stop_ids=frozenset({2, 9}),
    block_hashes=(b"\x00" * 32,),
    hash_seed=b"salt",
    parent="r-0",
    generated=[4],
)
TO_ENGINE = [
    wire.Hello("front-0"),
    wire.Submit(REQUEST),
    wire.Abort("r-1"),
    wire.Control(3, "stats", {"deep": [1, "x"]}),
]
TO_FRONT = [
    wire.Progress("loading", 0.5),
    wire.Ready(EngineInfo(512, 100, 16, 8, "cpu", "float32", 1584)),
    wire.News(
        StepOutput(
            ["r-3", "r-4"],
            [7, 2**31],
            [
                Delta("r-1", [5], cached_tokens=0, logprobs=[TokenLogprobs([5], [-0.1], 1)]),
                Delta("r-2", [], finish="error", error_code="x", error="y"),
            ],
        )
    ),
    wire.Reply(3, {"running": 1}),
]


@given(st.lists(st.integers(1, 40), min_size=1), st.booleans())
def test_messages_survive_any_cut_of_the_stream(cuts: list[int], to_engine: bool) -> None:
    messages = TO_ENGINE if to_engine else TO_FRONT
    frames = wire.Frames(wire.ToEngine if to_engine else wire.ToFront)
    data = b"".join(wire.encode(message) for message in messages)
    got, at, turn = [], 0, 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        got += frames.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert got == messages


def test_a_front_may_not_speak_as_an_engine() -> None:
    frames = wire.Frames(wire.ToEngine)
    with pytest.raises(msgspec.ValidationError):
        list(frames.feed(wire.encode(wire.News(StepOutput()))))


def test_a_wrongly_typed_request_is_refused() -> None:
    body = msgspec.msgpack.encode({"type": "submit", "request": {"id": "r", "prompt": ["a"]}})
    with pytest.raises(msgspec.ValidationError):
        list(wire.Frames(wire.ToEngine).feed(struct.pack("<I", len(body)) + body))


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        list(wire.Frames(wire.ToEngine).feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1)))
