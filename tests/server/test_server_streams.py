"""Streams: what is sent, in what order, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.bytetok import EOS_ID, byte_ids
from tests.fakes.engine import Script
from tests.server.conftest import chat, chat_text, completion_text, finishes, prompt

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def both_texts(served: Any, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """(streamed text, whole text, whole answer) of one chat request."""
    events = await served.client.stream(CHAT, body)
    whole = (await served.client.post(CHAT, body)).json()
    return chat_text(events), whole["choices"][0]["message"]["content"], whole


@pytest.mark.parametrize(
    ("parts", "limit", "expected"),
    [
        ((b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd"), 8, "你好"),
        ((b"A", b"\xe4\xbd"), 2, "A\ufffd"),
        ((b"\xf0\x9f", b"\x98\x80", b"!"), 8, "😀!"),
    ],
)
async def test_character_split_over_tokens(serve, pieces, parts, limit, expected):
    folder, ids = pieces(*parts)
    served = await serve(Script(ids), folder=folder)
    streamed, whole, _ = await both_texts(served, chat(max_tokens=limit))
    assert streamed == whole == expected


async def test_no_delta_holds_half_a_character(serve, pieces):
    folder, ids = pieces(b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd")
    served = await serve(Script(ids), folder=folder)
    for event in await served.client.stream(CHAT, chat()):
        assert "\ufffd" not in str(event)


@pytest.mark.parametrize(
    ("parts", "expected", "reason", "tokens"),
    [
        ((b"Hel", b"lo\nUs", b"er", b": bye"), "Hello", "stop", 4),
        ((b"Hel", b"lo\nUs", b"ed"), "Hello\nUsed", "stop", 4),
    ],
)
async def test_stop_string_over_token_boundaries(serve, pieces, parts, expected, reason, tokens):
    folder, ids = pieces(*parts)
    served = await serve(Script(ids), folder=folder)
    body = chat(stop=["\nUser:"], max_tokens=20)
    streamed, whole, answer = await both_texts(served, body)
    assert streamed == whole == expected
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == tokens


async def test_a_stop_string_aborts_the_engine_side(serve, pieces):
    folder, ids = pieces(b"a", b"STOP", b"b", b"c")
    served = await serve(Script(ids), folder=folder)
    answer = (await served.client.post(CHAT, chat(stop="STOP"))).json()
    assert answer["choices"][0]["stop_reason"] == "STOP"
    assert served.engine.aborted == list(served.engine.submitted)
    assert not served.engine.open


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_usage_event_unless_asked_for(serve, path, options):
    served = await serve()
    body = chat() if path == CHAT else prompt()
    events = await served.client.stream(path, {**body, "max_tokens": 3, "stream_options": options})
    assert all(event["choices"] for event in events)
    assert all("usage" not in event for event in events)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_event_when_asked_for(serve, path):
    served = await serve(Script(cached_tokens=0))
    body = {**(chat() if path == CHAT else prompt()), "max_tokens": 3, "seed": 5}
    events = await served.client.stream(path, {**body, "stream_options": {"include_usage": True}})
    *others, last = events
    assert all(event["usage"] is None and event["choices"] for event in others)
    assert last["choices"] == []
    whole = (await served.client.post(path, body)).json()
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == 3


async def test_stream_options_need_a_stream(serve):
    served = await serve()
    reply = await served.client.post(CHAT, chat(stream_options={"include_usage": True}))
    assert reply.status == 400
    assert reply.error["param"] == "stream_options"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_failure_after_the_headers(serve, path):
    served = await serve(Script(byte_ids("abcdefgh"), fault_at=5))
    body = chat() if path == CHAT else prompt()
    events = await served.client.stream(path, {**body, "max_tokens": 20})
    text = chat_text(events[:-1]) if path == CHAT else completion_text(events[:-1])
    assert text == "abcd"
    assert events[-1]["error"]["code"] == 500
    assert "token 5" in events[-1]["error"]["message"]
    assert finishes(events[:-1]) == []


async def test_failure_without_a_stream_is_a_500_with_its_code(serve):
    served = await serve(Script(fault_at=2, fault_code="non_finite_logits"))
    reply = await served.client.post(CHAT, chat())
    assert reply.status == 500
    assert reply.error["code"] == "non_finite_logits"


async def test_engine_death_in_mid_stream(serve):
    served = await serve(Script(byte_ids("ab"), stall_at=3))
    exchange = await served.client.open("POST", CHAT, chat(stream=True))
    blocks = exchange.blocks()
    seen = [await anext(blocks) for _ in range(3)]
    assert '"content":"b"' in seen[-1]
    served.engine.die()
    rest = [block async for block in blocks]
    assert "The engine died" in rest[0]
    assert '"code":503' in rest[0]
    assert rest[1:] == ["data: [DONE]"]
    await exchange.finish()
    assert (await served.client.get("/health")).status == 503


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_n_choices_stream_side_by_side(serve, path):
    served = await serve()
    body = {**(chat() if path == CHAT else prompt()), "n": 4, "seed": 7, "max_tokens": 8}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    *events, usage = await served.client.stream(path, body)
    texts = [(chat_text if path == CHAT else completion_text)(events, i) for i in range(4)]
    assert sorted(finishes(events)) == [(i, "length") for i in range(4)]
    assert len(set(texts)) == 4
    assert all(len(text) == 8 for text in texts)
    if path == CHAT:
        roles = [c["index"] for e in events for c in e["choices"] if "role" in c["delta"]]
        assert roles == [0, 1, 2, 3]
    assert usage["usage"]["completion_tokens"] == 32
    whole = (await served.client.post(path, {**body, "stream_options": None})).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    again = [
        c["text"] if path == COMPLETIONS else c["message"]["content"] for c in whole["choices"]
    ]
    assert again == texts
    assert whole["usage"] == usage["usage"]


async def test_several_prompts_times_n(serve):
    served = await serve()
    body = prompt(["ab", "cde"], n=2, max_tokens=2, echo=True, seed=1)
    whole = (await served.client.post(COMPLETIONS, body)).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    assert [c["text"][:-2] for c in whole["choices"]] == ["ab", "ab", "cde", "cde"]
    assert whole["usage"]["prompt_tokens"] == 3 + 4
    events = await served.client.stream(COMPLETIONS, body)
    assert [completion_text(events, i) for i in range(4)] == [c["text"] for c in whole["choices"]]


async def test_the_first_event_names_the_role_and_the_last_the_reason(serve):
    served = await serve(Script(byte_ids("yo")))
    events = await served.client.stream(CHAT, chat())
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "y"}, {"content": "o"}, {}]
    assert finishes(events) == [(0, "stop")]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


async def test_headers_of_a_stream(serve):
    served = await serve()
    exchange = await served.client.open("POST", CHAT, chat(stream=True, max_tokens=1))
    assert exchange.headers["content-type"].startswith("text/event-stream")
    assert exchange.headers["cache-control"] == "no-cache"
    assert exchange.headers["x-accel-buffering"] == "no"
    assert "x-request-id" in exchange.headers
    await exchange.hang_up()


async def test_an_idle_stream_is_kept_alive_by_comments(serve):
    served = await serve(Script(stall_at=1), keep_alive_s=0.01)
    exchange = await served.client.open("POST", CHAT, chat(stream=True))
    blocks = exchange.blocks()
    seen = [await anext(blocks) for _ in range(4)]
    assert seen[1:] == [": keep-alive"] * 3
    await exchange.hang_up()


async def test_keep_alive_can_be_switched_off(serve):
    served = await serve(Script(delay_s=0.005), keep_alive_s=0)
    exchange = await served.client.open("POST", CHAT, chat(stream=True, max_tokens=3))
    assert not [block async for block in exchange.blocks() if block.startswith(":")]
    await exchange.finish()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_hanging_up_aborts_what_runs(serve, path, n):
    served = await serve(Script(delay_s=0.001))
    body = {**(chat() if path == CHAT else prompt()), "n": n, "max_tokens": 400}
    exchange = await served.client.open("POST", path, {**body, "stream": True, "ignore_eos": True})
    async for block in exchange.blocks():
        if '"content":"' in block or '"text":"' in block:
            break
    while len(served.engine.submitted) < n:
        await asyncio.sleep(0)
    await exchange.hang_up()
    assert sorted(served.engine.aborted) == sorted(served.engine.submitted)
    assert len(served.engine.aborted) == n
    assert not served.engine.open
    assert served.gate.active == 0


async def test_hanging_up_without_a_stream_aborts_too(serve):
    served = await serve(Script(stall_at=2))
    exchange = served.client.begin("POST", CHAT, chat())
    while not served.engine.open:
        await asyncio.sleep(0)
    await exchange.hang_up()
    assert served.engine.aborted == list(served.engine.submitted)
    assert served.gate.active == 0


async def test_eos_is_counted_but_not_written(serve):
    served = await serve(Script([*byte_ids("z"), EOS_ID, *byte_ids("more")]))
    streamed, whole, answer = await both_texts(served, chat())
    assert streamed == whole == "z"
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["choices"][0]["finish_reason"] == "stop"
    ignoring = (await served.client.post(CHAT, chat(ignore_eos=True, max_tokens=4))).json()
    assert ignoring["choices"][0]["finish_reason"] == "length"


async def test_token_ids_on_request(serve):
    served = await serve(Script(byte_ids("ok")))
    whole = (await served.client.post(CHAT, chat(return_token_ids=True))).json()
    assert whole["choices"][0]["token_ids"] == [*byte_ids("ok"), EOS_ID]
    assert whole["prompt_token_ids"] == served.requests[0].prompt
    events = await served.client.stream(CHAT, chat(return_token_ids=True))
    streamed = [i for e in events for i in e["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    plain = (await served.client.post(CHAT, chat())).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_cached_tokens_are_reported_per_prompt(serve):
    served = await serve(Script(cached_tokens=16))
    body = prompt(["a" * 40, "b" * 40], n=2, max_tokens=1)
    usage = (await served.client.post(COMPLETIONS, body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32
