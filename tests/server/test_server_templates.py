"""Chat templates as they are reached over HTTP."""

from __future__ import annotations

import pytest

from tests.fakes.bytetok import write_byte_tokenizer
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


async def rendered(served, body) -> str:
    """The prompt that the engine got, as text."""
    reply = await served.client.post(CHAT, {**body, "max_tokens": 1})
    assert reply.status == 200, reply.body
    return served.service.text.tokenizer.decode(served.requests[-1].prompt)


async def test_one_bos_in_chat_and_tokenize(serve):
    served = await serve()
    await rendered(served, chat())
    ids = served.requests[0].prompt
    assert ids[0] == 1
    assert ids.count(1) == 1
    told = (await served.client.post("/tokenize", chat())).json()
    assert told["tokens"] == ids
    assert told["count"] == len(ids)
    raw = (await served.client.post("/tokenize", prompt("<s>hi"))).json()
    assert raw["tokens"].count(1) == 1


async def test_no_template(serve, tmp_path):
    folder = write_byte_tokenizer(tmp_path / "base", chat_template=False)
    served = await serve(folder=folder)
    reply = await served.client.post(CHAT, chat())
    assert reply.status == 400
    assert "--chat-template" in reply.error["message"]
    assert (await served.client.post("/v1/completions", prompt(max_tokens=1))).status == 200


async def test_text_parts_are_joined_for_a_template_that_wants_strings(serve):
    served = await serve()
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert "A\nB" in await rendered(served, chat(parts))


@pytest.mark.parametrize("empty", [{"content": None}, {}, {"content": ""}])
async def test_an_assistant_turn_of_tool_calls_only(serve, empty):
    served = await serve()
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "sqrt", "arguments": '{"x": 101}'},
    }
    history = [
        {"role": "user", "content": "sqrt 101"},
        {"role": "assistant", **empty, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "10.05"},
    ]
    text = await rendered(served, {"messages": history})
    assert '[assistant]<call>{"name": "sqrt", "arguments": {"x": 101}}</call>' in text
    assert "[tool]10.05" in text


async def test_tools_reach_the_template_when_no_call_may_follow(serve):
    served = await serve()
    tool = {"type": "function", "function": {"name": "now", "strict": False}}
    text = await rendered(served, chat(tools=[tool], tool_choice="none"))
    assert '[tools][{"type": "function"' in text


async def test_going_on_with_the_last_message(serve):
    served = await serve()
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The capital"}]
    text = await rendered(served, {"messages": history, "continue_final_message": True})
    assert text.endswith("[assistant]The capital")
    text = await rendered(served, {"messages": history})
    assert text.endswith("[assistant]")


async def test_a_template_that_never_ends_is_the_clients_error(serve, tmp_path):
    loop = "{% for i in range(10**9) %}x{% endfor %}"
    served = await serve(folder=write_byte_tokenizer(tmp_path / "loop", chat_template=loop))
    reply = await served.client.post(CHAT, chat())
    assert reply.status == 400
