"""Delta streams: what waits for a slow consumer is one delta, and nothing in it is lost."""

from __future__ import annotations

import asyncio

import pytest

from octavo.core.errors import EngineUnavailable
from octavo.core.plan import Delta, StepOutput, TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.engine.service import Service
from octavo.engine.streams import Streams

pytestmark = pytest.mark.anyio


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-0.5], 1)


async def test_waiting_deltas_become_one() -> None:
    streams = Streams()
    stream = streams.open("r")
    sent = [
        Delta("r", [i], logprobs=[entry(i)], cached_tokens=16 if i == 0 else None)
        for i in range(1000)
    ]
    sent[0].prompt_logprobs, sent[1].prompt_logprobs = [entry(7)], [entry(8)]
    sent.append(Delta("r", [2], finish="stop", stop_id=2, logprobs=[entry(2)]))
    for delta in sent:
        streams.put(delta)
    (whole,) = [delta async for delta in stream]
    assert whole.ids == [*range(1000), 2]
    assert [e.ids[0] for e in whole.logprobs] == whole.ids
    assert [e.ids[0] for e in whole.prompt_logprobs] == [7, 8]
    assert (whole.finish, whole.stop_id, whole.cached_tokens) == ("stop", 2, 16)
    assert sent[0].ids == [0]  # what was put is not changed
    assert len(streams) == 0


async def test_columns_and_deltas_of_a_stream_come_in_order() -> None:
    streams = Streams()
    stream, other = streams.open("r"), streams.open("s")
    streams.put_step(StepOutput(["r", "nobody"], [1, 2], [Delta("s", [9])]))
    streams.put_step(StepOutput(["s", "r"], [8, 3]))
    streams.put_step(StepOutput(["r"], [4], [Delta("s", [7], finish="stop")]))
    assert (await anext(stream)).ids == [1, 3, 4]
    assert [(delta.ids, delta.finish) async for delta in other] == [([9, 8, 7], "stop")]
    streams.put_step(StepOutput(["r", "s"], [5, 6]))
    assert (await anext(stream)).ids == [5]


async def test_a_consumer_that_keeps_up_gets_each() -> None:
    streams = Streams()
    stream = streams.open("r")
    for i in range(3):
        streams.put(Delta("r", [i]))
        assert (await anext(stream)).ids == [i]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    streams.put(Delta("r", [9], finish="length"))
    assert (await waiting).ids == [9]
    assert [delta async for delta in stream] == []


async def test_an_error_comes_after_what_waits() -> None:
    streams = Streams()
    stream = streams.open("r")
    for i in range(2):
        streams.put(Delta("r", [i]))
    streams.put(Delta("r", finish="error", error="broken", error_code="x"))
    first, last = [delta async for delta in stream]
    assert (first.ids, last.error, last.error_code) == ([0, 1], "broken", "x")
    stream = streams.open("s")
    streams.put(Delta("s", [5]))
    streams.fail_all(EngineUnavailable("gone"))
    assert (await anext(stream)).ids == [5]
    with pytest.raises(EngineUnavailable, match="gone"):
        await anext(stream)


async def test_choices_of_a_slow_client_wait_merged(service: Service) -> None:
    params = SamplingParams(n=2, max_tokens=100, ignore_eos=True)
    requests = await service.prepare("slow", [[5, 6, 7]], params)
    lengths: list[list[int]] = [[], []]
    async for index, chunk in service.stream(requests, params):
        lengths[index].append(len(chunk.ids))
        await asyncio.sleep(0.05)
    assert [sum(each) for each in lengths] == [100, 100]
    assert all(len(each) < 50 for each in lengths)
