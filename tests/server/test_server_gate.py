"""Permits and draining."""

from __future__ import annotations

import asyncio

import pytest

from octavo.config.load import load_options
from octavo.core.errors import EngineUnavailable
from octavo.engine.startup import prepare
from octavo.server.gate import Gate
from octavo.server.process import server_settings, warn_of_policy
from tests.fakes.engine import Script
from tests.fakes.tiny import make_tiny
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def test_over_the_limit_is_429_before_the_body_is_read(serve):
    served = await serve(Script(stall_at=2), max_concurrent_requests=1)
    first = await served.client.open("POST", CHAT, chat(stream=True))
    assert served.gate.active == 1
    reply = await served.client.post(COMPLETIONS, parts=[b"no json at all"])
    assert reply.status == 429
    assert reply.error["type"] == "overloaded_error"
    assert reply.headers["retry-after"] == "1"
    assert (await served.client.post("/tokenize", prompt())).status == 200  # needs no permit
    await first.hang_up()
    assert served.gate.active == 0
    assert (await served.client.open("POST", CHAT, chat(stream=True))).status == 200


async def test_only_requests_without_a_token_wait(serve):
    served = await serve(
        lambda request: Script(stall_at=2 if request.max_tokens == 9 else 1),
        max_waiting_requests=1,
        max_concurrent_requests=4,
    )

    async def wait_until(active: int, waiting: int) -> None:
        async with asyncio.timeout(5):
            while (served.gate.active, served.gate.waiting) != (active, waiting):
                await asyncio.sleep(0.001)

    talking = [served.client.begin("POST", CHAT, chat(max_tokens=9, n=2))]
    await wait_until(1, 0)
    talking.append(served.client.begin("POST", COMPLETIONS, prompt(max_tokens=9)))
    await wait_until(2, 0)
    silent = served.client.begin("POST", COMPLETIONS, prompt(max_tokens=8))
    await wait_until(3, 1)
    reply = await served.client.post(COMPLETIONS, prompt())
    assert reply.status == 429
    assert "wait for their first token as may (1);" in reply.error["message"]
    await silent.hang_up()
    await wait_until(2, 0)
    for active in (3, 4):
        talking.append(served.client.begin("POST", CHAT, chat(max_tokens=9)))
        await wait_until(active, 0)
    reply = await served.client.post(COMPLETIONS, prompt())
    assert reply.status == 429
    assert "under way as may be (4);" in reply.error["message"]
    for request in talking:
        await request.hang_up()
    await wait_until(0, 0)


async def test_permits_come_back_after_errors(serve):
    served = await serve(max_waiting_requests=1, max_concurrent_requests=1)
    for body in ({}, {"prompt": 5}, prompt(n=0), prompt(max_tokens=1)):
        await served.client.post(COMPLETIONS, body)
        assert served.gate.active == served.gate.waiting == 0


async def test_draining_refuses_new_work_and_lets_old_work_end(serve):
    served = await serve(Script([107] * 20, delay_s=0.002))
    stream = await served.client.open("POST", CHAT, chat(stream=True))
    served.gate.draining = True
    reply = await served.client.post(CHAT, chat())
    assert reply.status == 503
    assert "shutting down" in reply.error["message"]
    assert not await served.gate.wait_idle(0.001)
    blocks = [block async for block in stream.blocks()]
    assert '"finish_reason":"stop"' in blocks[-2]
    assert blocks[-1] == "data: [DONE]"
    assert await served.gate.wait_idle(1)


async def test_cut_off_tells_a_stream_and_a_plain_request(serve):
    served = await serve(Script(stall_at=2))
    stream = await served.client.open("POST", CHAT, chat(stream=True))
    plain = served.client.begin("POST", COMPLETIONS, prompt())
    while len(served.engine.open) < 2:
        await asyncio.sleep(0)
    served.gate.draining = True
    served.gate.cut_off()
    blocks = [block async for block in stream.blocks()]
    assert "shut down" in blocks[-2]
    assert blocks[-1] == "data: [DONE]"
    assert '"finish_reason":"' not in "".join(blocks)
    await plain.start()
    assert plain.status == 503
    assert await served.gate.wait_idle(1)
    assert len(served.engine.aborted) == 2


async def test_run_hands_on_what_the_work_raises():
    async def never():
        await asyncio.Event().wait()
        return {}

    async def work():
        raise EngineUnavailable("gone")

    with pytest.raises(EngineUnavailable, match="gone"):
        await Gate().run(work(), never)


async def test_run_is_cancelled_with_its_work():
    cleaned = []

    async def never():
        await asyncio.Event().wait()
        return {}

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    task = asyncio.create_task(Gate().run(work(), never))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True]


@pytest.mark.parametrize(("given", "most"), [({}, 1024), ({"max_num_queued_reqs": "3"}, 3)])
def test_the_limits_are_what_may_wait_and_what_may_run_beside(tmp_path, given, most):
    tiny = make_tiny(tmp_path)
    config = prepare(load_options({"model": str(tiny), "max_num_seqs": "4", **given}, {}))
    settings = server_settings(config)
    assert (settings.max_waiting_requests, settings.max_concurrent_requests) == (most, most + 4)


@pytest.mark.parametrize(
    ("policy", "keys", "told"),
    [
        ("fair", (), "there are none"),
        ("fair", ("a",), "there is one"),
        ("fair", ("a", "a"), "there is one"),
        ("fair", ("a", "b"), None),
        ("fcfs", (), None),
    ],
)
def test_fair_shares_without_two_keys_are_warned_of(tmp_path, caplog, policy, keys, told):
    given = {"model": str(make_tiny(tmp_path)), "scheduling_policy": policy, "api_key": keys}
    warn_of_policy(prepare(load_options(given, {})))
    assert [told in message for message in caplog.messages] == ([True] if told else [])
