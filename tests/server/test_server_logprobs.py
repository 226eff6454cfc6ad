"""Log-probabilities in both schemas, streamed and not."""

from __future__ import annotations

import pytest

from tests.fakes.bytetok import byte_ids
from tests.fakes.engine import Script
from tests.server.conftest import chat, chat_text, prompt

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def test_impossible_tokens_are_finite_json(serve):
    served = await serve()
    body = prompt("a b c", max_tokens=2, echo=True, logprobs=5, temperature=1, top_k=1, seed=1)
    reply = await served.client.post(COMPLETIONS, body)
    assert reply.status == 200
    lists = reply.json()["choices"][0]["logprobs"]  # parsed strictly
    values = [v for top in lists["top_logprobs"] if top for v in top.values()]
    assert min(values) == -9999.0


async def test_chat_schema(serve):
    served = await serve(Script(byte_ids("hé")))
    answer = (await served.client.post(CHAT, chat(logprobs=True))).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in content)
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode() == answer["choices"][0]["message"]["content"] == "hé"


async def test_chat_top_logprobs_are_sorted_and_the_sampled_one_has_its_own_entry(serve):
    served = await serve(Script(byte_ids("x")))
    body = chat(logprobs=True, top_logprobs=2, max_tokens=1)
    entry = (await served.client.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "x"
    values = [top["logprob"] for top in entry["top_logprobs"]]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
async def test_chat_refusals(serve, more, param):
    served = await serve()
    reply = await served.client.post(CHAT, chat(**more))
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_chat_stream_equals_the_whole(serve):
    served = await serve(Script(byte_ids("h😀i")))
    body = chat(logprobs=True, top_logprobs=1)
    whole = (await served.client.post(CHAT, body)).json()["choices"][0]
    events = await served.client.stream(CHAT, body)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole["logprobs"]["content"]
    assert chat_text(events) == whole["message"]["content"]


async def test_completion_lists_are_in_step_with_the_text(serve):
    served = await serve(Script(byte_ids("né!")))
    choice = (await served.client.post(COMPLETIONS, prompt("ab", logprobs=2, echo=True))).json()[
        "choices"
    ][0]
    lists = choice["logprobs"]
    assert choice["text"] == "abné!"
    assert lists["tokens"] == ["<s>", "a", "b", "n", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    assert lists["text_offset"] == [0, 0, 1, 2, 3, 3, 4]
    for token, value, top in zip(
        lists["tokens"][1:], lists["token_logprobs"][1:], lists["top_logprobs"][1:], strict=True
    ):
        assert top[token] == value


async def test_completion_stream_equals_the_whole(serve):
    served = await serve(Script(byte_ids("né!")))
    body = prompt("ab", logprobs=1, echo=True, n=2)
    whole = (await served.client.post(COMPLETIONS, body)).json()
    events = await served.client.stream(COMPLETIONS, body)
    for index, choice in enumerate(whole["choices"]):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            streamed = [v for p in parts if p["logprobs"] for v in p["logprobs"][name]]
            assert streamed == values


async def test_scoring_a_prompt_generates_nothing(serve):
    served = await serve()
    body = prompt("abc", max_tokens=0, echo=True, logprobs=0)
    answer = (await served.client.post(COMPLETIONS, body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["<s>", "a", "b", "c"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    events = await served.client.stream(COMPLETIONS, body)
    assert "".join(c["text"] for e in events for c in e["choices"]) == "abc"


async def test_prompt_logprobs_have_an_entry_for_each_prompt_token(serve):
    served = await serve()
    ids = list(range(5, 35))
    body = prompt(ids, max_tokens=1, prompt_logprobs=1)
    entries = (await served.client.post(COMPLETIONS, body)).json()["choices"][0]["prompt_logprobs"]
    assert len(entries) == len(ids)
    assert entries[0] is None
    for token, entry in zip(ids[1:], entries[1:], strict=True):
        assert entry[str(token)]["rank"] == 1
        assert entry[str(token)]["logprob"] <= 0
    of_chat = (await served.client.post(CHAT, chat(prompt_logprobs=0, max_tokens=1))).json()
    assert len(of_chat["prompt_logprobs"]) == of_chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("top", "prompt_top"), [(1, 5), (4, 2)])
async def test_echo_and_prompt_logprobs_each_get_their_number(serve, top, prompt_top):
    served = await serve()
    body = prompt("abc", max_tokens=1, echo=True, logprobs=top, prompt_logprobs=prompt_top)
    choice = (await served.client.post(COMPLETIONS, body)).json()["choices"][0]
    assert served.requests[0].sampling.prompt_logprobs == max(top, prompt_top)
    # The token itself is the best one in the script, so that it adds none.
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} == {prompt_top}
    assert {len(shown) for shown in choice["logprobs"]["top_logprobs"][1:]} == {top}
