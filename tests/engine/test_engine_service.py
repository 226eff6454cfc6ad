"""Service over both clients: streams end once, nothing is left behind, faults have words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from octavo.core.errors import EngineFault, EngineUnavailable, InvalidRequest
from octavo.core.sampling import SamplingParams
from octavo.engine.remote import SocketClient
from octavo.engine.service import Service
from octavo.text.front import TextFront
from tests.engine.conftest import LIMITS, SocketEngine
from tests.fakes.runner import FakeWorker

pytestmark = pytest.mark.anyio
PROMPT = [5, 6, 7]


async def ids_of(service: Service, name: str, params: SamplingParams) -> list[list[int]]:
    requests = await service.prepare(name, [PROMPT], params)
    found: list[list[int]] = [[] for _ in requests]
    async for index, chunk in service.stream(requests, params):
        found[index] += chunk.ids
    return found


async def idle(service: Service) -> None:
    """Nothing runs, waits or holds a page: by the audit, within a second."""
    for _ in range(100):
        stats = await service.control("audit")
        if not (stats["running"] or stats["waiting"] or stats["pages_referenced"]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {stats}")


async def test_a_request_streams_to_its_end(service: Service) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert [len(ids) for ids in await ids_of(service, "a", params)] == [20]
    await idle(service)


async def test_many_at_once_get_what_each_gets_alone(service: Service) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    alone = await ids_of(service, "alone", params)
    together = await asyncio.gather(*[ids_of(service, f"r{i}", params) for i in range(30)])
    assert together == [alone] * 30
    await idle(service)


async def test_choices_come_with_their_index(service: Service) -> None:
    params = SamplingParams(n=3, max_tokens=5, ignore_eos=True)
    assert [len(ids) for ids in await ids_of(service, "n", params)] == [5, 5, 5]
    await idle(service)


@pytest.mark.parametrize("length", [3, 40, 200])
async def test_choices_share_the_log_probabilities_of_their_prompt(
    service: Service, worker: FakeWorker, length: int
) -> None:
    prompts = [[5 + i, *range(9, 9 + length)] for i in range(2)]
    params = SamplingParams(n=3, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    requests = await service.prepare(f"p{length}", prompts, params)
    entries: list[list[int]] = [[] for _ in requests]
    started: set[int] = set()
    async for index, chunk in service.stream(requests, params):
        assert not (chunk.prompt_logprobs and index in started), "they come before the first token"
        entries[index] += [entry.ids[0] for entry in chunk.prompt_logprobs]
        if chunk.ids:
            started.add(index)
    assert entries == [prompt[1:] for prompt in prompts for _ in range(3)]
    pages = length // 16 * 16
    assert worker.tokens_computed <= 2 * (3 * (length + 1 + 4) - 2 * pages)
    await idle(service)


async def test_leaving_a_stream_ends_its_requests(service: Service) -> None:
    for n in (1, 3):
        params = SamplingParams(n=n, max_tokens=400, ignore_eos=True)
        stream = service.stream(await service.prepare(f"left{n}", [PROMPT], params), params)
        async for _ in stream:
            break
        await stream.aclose()
    await idle(service)


async def test_a_cancelled_consumer_ends_its_requests(service: Service) -> None:
    params = SamplingParams(n=2, max_tokens=400, ignore_eos=True)
    task = asyncio.create_task(ids_of(service, "cancelled", params))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(service)


async def test_a_stop_string_ends_the_request_in_the_engine(
    service: Service, worker: FakeWorker
) -> None:
    worker.script = lambda tokens, prompt_len: 3 + ord("abc"[(len(tokens) - prompt_len) % 3])
    worker.delay_at = dict.fromkeys(range(10, 400), 0.01)  # time for the abort to arrive
    params = SamplingParams(max_tokens=400, stop="ca")
    chunks = [
        c async for _, c in service.stream(await service.prepare("s", [PROMPT], params), params)
    ]
    assert "".join(chunk.text for chunk in chunks) == "ab"
    assert (chunks[-1].finish, chunks[-1].stop_reason) == ("stop", "ca")
    await idle(service)
    assert (await service.control("stats"))["finished"] == {"stop": 1}


async def test_a_running_id_may_not_be_used_twice(service: Service, worker: FakeWorker) -> None:
    worker.delay_at = {5: 0.3}
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    requests = await service.prepare("twice", [PROMPT], params)
    first = service.stream(requests, params)
    await anext(first)
    second = service.stream(requests, params)
    with pytest.raises(InvalidRequest, match="twice"):
        await anext(second)
    await first.aclose()
    await idle(service)


async def test_one_bad_row_fails_one_request(service: Service, worker: FakeWorker) -> None:
    worker.nan_at = {(2, 0)}
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    results = await asyncio.gather(
        *[ids_of(service, f"r{i}", params) for i in range(3)], return_exceptions=True
    )
    faults = [r for r in results if isinstance(r, BaseException)]
    assert [type(f) for f in faults] == [EngineFault]
    assert getattr(faults[0], "code", None) == "non_finite_logits"
    assert [len(r[0]) for r in results if isinstance(r, list)] == [30, 30]
    await idle(service)


async def test_an_unknown_control_verb_is_refused_and_harms_nobody(service: Service) -> None:
    with pytest.raises(Exception, match="no_such_verb"):
        await service.control("no_such_verb")
    assert (await service.control("stats"))["running"] == 0


async def test_a_dead_engine_ends_every_stream(
    tmp_path: Path, worker: FakeWorker, text: TextFront
) -> None:
    engine = SocketEngine(tmp_path / "e.sock", worker)
    client = SocketClient(str(engine.path), "front-0")
    service = Service(client, text, LIMITS)
    await service.start()
    worker.delay_at = {5: 0.3}
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    tasks = [asyncio.create_task(ids_of(service, f"r{i}", params)) for i in range(4)]
    await asyncio.sleep(0.05)
    engine.die()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineUnavailable)
    assert not service.health().serving
    with pytest.raises(EngineUnavailable):
        await ids_of(service, "later", params)
    await client.close()
    engine.stop()


async def test_a_front_that_goes_takes_its_requests_along(
    socket_engine: SocketEngine, text: TextFront
) -> None:
    clients = [SocketClient(str(socket_engine.path), f"front-{i}") for i in range(2)]
    leaving, staying = (Service(client, text, LIMITS) for client in clients)
    await leaving.start()
    await staying.start()
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    task = asyncio.create_task(ids_of(leaving, "gone", params))
    await asyncio.sleep(0.02)
    await clients[0].close()
    await idle(staying)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clients[1].close()
