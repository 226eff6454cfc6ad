"""Policies and deadlines as a client sees them, on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 480, "ignore_eos": True}
SHORT = {"prompt": "y", "max_tokens": 4, "ignore_eos": True}
Serve = Callable[..., Any]


def with_key(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")] if key else []


async def order_of_ends(served: Any, calls: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    """Names in the order in which their answers came: (name, fields, key), one behind the other
    while the only slot is taken by another request of the first key."""
    ended: list[str] = []

    async def call(name: str, fields: dict[str, Any], key: str) -> None:
        body = {**SHORT, **fields}
        reply = await served.client.post(COMPLETIONS, body, headers=with_key(key))
        assert reply.status == 200, reply.body
        ended.append(name)

    body = {**LONG, "stream": True}
    first = await served.client.open("POST", COMPLETIONS, body, headers=with_key(calls[0][2]))
    await first.body_part()
    tasks = []
    for number, each in enumerate(calls):
        tasks.append(asyncio.create_task(call(*each)))
        while (await served.audit(with_key(each[2])))["waiting"] <= number:
            await asyncio.sleep(0.001)
    await first.hang_up()
    await asyncio.gather(*tasks)
    return ended


@pytest.mark.parametrize(("policy", "place"), [("fcfs", 8), ("fair", 0)])
async def test_a_tenant_with_one_request_does_not_wait_for_another_ones_eight(
    serve: Serve, policy: str, place: int
) -> None:
    served = await serve(
        scheduling_policy=policy, max_num_seqs=1, api_key=["greedy", "modest"], pause=0.01
    )
    calls = [(f"greedy {i}", {}, "greedy") for i in range(8)] + [("modest", {}, "modest")]
    assert (await order_of_ends(served, calls)).index("modest") == place


async def test_a_lower_priority_number_runs_first(serve: Serve) -> None:
    served = await serve(scheduling_policy="priority", max_num_seqs=1, pause=0.01)
    calls = [(f"{level}", {"priority": level}, "") for level in (3, 1, 2, 0)]
    assert await order_of_ends(served, calls) == ["0", "1", "2", "3"]


async def test_a_priority_under_fcfs_is_refused_in_words(serve: Serve) -> None:
    served = await serve()
    reply = await served.client.post(COMPLETIONS, {**SHORT, "priority": 5})
    assert (reply.status, reply.error["param"]) == (400, "priority")
    assert "--scheduling-policy" in reply.error["message"]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"timeout": 0.5}),
        ({"request_timeout": 0.5}, {}),
        ({"request_timeout": 0.5}, {"timeout": 60}),
        ({"request_timeout": 60}, {"timeout": 0.5}),
    ],
)
async def test_what_was_generated_in_time_is_the_answer(
    serve: Serve, options: dict[str, float], fields: dict[str, float]
) -> None:
    served = await serve(pause=0.01, **options)
    done = (await served.client.post(COMPLETIONS, {**LONG, **fields})).json()
    assert done["choices"][0]["finish_reason"] == "timeout"
    assert 0 < done["usage"]["completion_tokens"] < 480
    assert (await served.audit())["pages"]["referenced"] == 0


async def test_who_waits_too_long_for_a_start_is_told_and_to_come_again(serve: Serve) -> None:
    served = await serve(max_num_seqs=1, queue_timeout=0.2, pause=0.01)
    running = await served.client.open("POST", COMPLETIONS, {**LONG, "stream": True})
    await running.body_part()
    reply = await served.client.post(COMPLETIONS, SHORT)
    assert (reply.status, reply.error["code"]) == (503, "queue_timeout")
    assert "0.2 s" in reply.error["message"]
    assert int(reply.headers["retry-after"]) > 0
    metrics = (await served.client.get("/metrics")).body.decode()
    assert 'vllm:request_timeouts_total{engine="0",limit="queue_timeout"' in metrics
    await running.hang_up()


async def test_without_a_token_in_time_it_is_an_error(serve: Serve) -> None:
    served = await serve(max_num_seqs=1, pause=0.01)
    running = await served.client.open("POST", COMPLETIONS, {**LONG, "stream": True})
    await running.body_part()
    reply = await served.client.post(COMPLETIONS, {**SHORT, "timeout": 0.2})
    assert (reply.status, reply.error["code"]) == (504, "request_timeout")
    await running.hang_up()


async def test_a_reset_forgets_the_pages_of_earlier_prompts(serve: Serve) -> None:
    served = await serve()
    body = {**SHORT, "prompt": list(range(20, 60))}
    for forgotten in (2, 2):
        usage = (await served.client.post(COMPLETIONS, body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        reply = await served.client.post("/reset_prefix_cache")
        assert reply.json() == {"pages_forgotten": forgotten}
