"""Timeouts over HTTP: what was generated, or an error that says which limit it was."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.bytetok import byte_ids
from tests.fakes.engine import Script
from tests.server.conftest import chat, chat_text, completion_text, finishes, prompt
from tests.server.test_server_metrics import scrape

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
CASES = [("request_timeout", 504, None), ("queue_timeout", 503, "1")]


def late_choices(*late: int, timeout_at: int = 1):
    """A script whose choices of these numbers run out of time, while the others say "abc"."""

    def script(request):
        index = int(request.id.rpartition("-")[2]) if "-" in request.id else 0
        return Script(byte_ids("abc"), timeout_at=timeout_at if index in late else None)

    return script


async def test_what_was_generated_is_the_answer(serve):
    served = await serve(Script(byte_ids("hello"), timeout_at=4))
    done = (await served.client.post(CHAT, chat())).json()
    (choice,) = done["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hel", "timeout")
    assert done["usage"]["completion_tokens"] == 3
    events = await served.client.stream(CHAT, chat())
    assert (chat_text(events), finishes(events)) == ("hel", [(0, "timeout")])
    done = (await served.client.post(COMPLETIONS, prompt())).json()
    assert (done["choices"][0]["text"], done["choices"][0]["finish_reason"]) == ("hel", "timeout")
    events = await served.client.stream(COMPLETIONS, prompt())
    assert (completion_text(events), finishes(events)) == ("hel", [(0, "timeout")])
    assert (await served.client.post(GENERATE, prompt())).json() == {"text": ["hihel"]}
    assert served.engine.aborted == []
    assert (await scrape(served))["vllm:request_success_total|timeout"] == 5


@pytest.mark.parametrize(("code", "status", "retry_after"), CASES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_without_a_token_it_is_an_error(serve, path, code, status, retry_after):
    served = await serve(Script(timeout_at=1, timeout_code=code))
    reply = await served.client.post(path, chat() if path == CHAT else prompt())
    assert reply.status == status
    assert (reply.error["code"], reply.error["message"]) == (code, "The time was over.")
    assert reply.headers.get("retry-after") == retry_after
    assert (await scrape(served))["vllm:request_success_total|timeout"] == 1
    assert (await scrape(served))["vllm:request_success_total|error"] == 0


@pytest.mark.parametrize(("code", "status", "retry_after"), CASES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_never_began_is_the_same_error(serve, path, code, status, retry_after):
    served = await serve(Script(timeout_at=1, timeout_code=code))
    body = chat(stream=True) if path == CHAT else prompt(stream=True)
    reply = await served.client.post(path, body)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers.get("retry-after") == retry_after


async def test_after_a_sign_of_life_the_error_is_an_event(serve):
    served = await serve(Script(timeout_at=1, delay_s=0.1), keep_alive_s=0.01)
    exchange = await served.client.open("POST", CHAT, chat(stream=True))
    assert exchange.status == 200
    comment, *_, error, done = [block async for block in exchange.blocks()]
    assert (comment, done) == (": keep-alive", "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("late", [(0,), (1,), (0, 2), (1, 2)])
async def test_each_choice_has_its_own_time(serve, late):
    served = await serve(late_choices(*late))
    reasons = ["timeout" if i in late else "stop" for i in range(3)]
    texts = ["" if i in late else "abc" for i in range(3)]
    done = (await served.client.post(CHAT, chat(n=3))).json()
    assert [choice["finish_reason"] for choice in done["choices"]] == reasons
    assert [choice["message"]["content"] for choice in done["choices"]] == texts
    events = await served.client.stream(CHAT, chat(n=3))
    assert sorted(finishes(events)) == list(enumerate(reasons))
    assert [chat_text(events, i) for i in range(3)] == texts


async def test_if_all_choices_are_late_it_is_an_error(serve):
    served = await serve(late_choices(0, 1, 2))
    reply = await served.client.post(CHAT, chat(n=3))
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")


async def test_a_late_first_choice_does_not_hold_back_prompt_logprobs(serve):
    served = await serve(late_choices(0))
    reply = await served.client.post(COMPLETIONS, prompt(n=2, prompt_logprobs=1))
    assert [c["finish_reason"] for c in reply.json()["choices"]] == ["timeout", "stop"]


async def test_the_tenant_is_the_place_of_the_key(serve):
    served = await serve(Script(byte_ids("a")), api_keys=("one", "two"))
    for key in ("two", "one"):
        headers = [("authorization", f"Bearer {key}")]
        for path, body in ((CHAT, chat(user="eve")), (COMPLETIONS, prompt()), (GENERATE, prompt())):
            assert (await served.client.post(path, body, headers=headers)).status == 200
    assert [r.tenant for r in served.requests] == ["key-1"] * 3 + ["key-0"] * 3


async def test_a_client_that_leaves_before_the_first_token_aborts_its_request(serve):
    served = await serve(Script(stall_at=1))
    exchange = served.client.begin("POST", CHAT, chat(stream=True))
    while not served.engine.open:
        await asyncio.sleep(0)
    await exchange.hang_up()
    assert served.engine.aborted == [request.id for request in served.requests]
    assert served.gate.active == 0
