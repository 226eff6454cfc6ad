"""What went wrong elsewhere when memory was short, in the words of those reports (O-02 to O-07)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import StartupError
from octavo.core.plan import StepPlan
from octavo.core.sequence import Sequence
from tests.fakes.tiny import make_tiny

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
Serve = Callable[..., Any]


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("long") / "tiny", max_position=32768)


# O-02


async def test_a_context_larger_than_the_pool_is_refused_with_what_fits(long_tiny: Path) -> None:
    for given in ({}, {"max_model_len": 32768}):
        with pytest.raises(StartupError, match="use --max-model-len 7344 "):
            LLM(str(long_tiny), kv_cache_tokens=459 * 16, cpu_threads=1, **given)


async def test_an_automatic_context_is_what_fits_and_clients_see_it(
    serve: Serve, long_tiny: Path
) -> None:
    served = await serve(
        long_tiny, kv_cache_tokens=459 * 16, max_model_len="auto", max_num_batched_tokens=512
    )
    (card,) = (await served.client.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == 7344


# O-03


async def test_prompt_logprobs_come_in_chunks_and_harm_no_neighbour(serve: Serve) -> None:
    body = {"model": "TINY", "prompt": list(range(5, 35)), "max_tokens": 1, "prompt_logprobs": 1}
    neighbour = {"model": "TINY", "prompt": [9, 8, 7], "max_tokens": 8, "temperature": 0}
    found, texts = [], []
    for chunk in (8, 256):
        served = await serve(prompt_logprobs_chunk=chunk)
        model, rows = served.loop.executor._worker._model, []
        logits = model.logits
        model.logits = lambda hidden, f=logits, rows=rows: rows.append(len(hidden)) or f(hidden)
        answers = await asyncio.gather(
            *(served.client.post(COMPLETIONS, each) for each in (neighbour, body, neighbour))
        )
        assert [answer.status for answer in answers] == [200] * 3
        assert max(rows) <= chunk
        found.append(answers[1].json()["choices"][0]["prompt_logprobs"])
        texts += [answers[i].json()["choices"][0]["text"] for i in (0, 2)]
    chunked, whole = found
    assert len(chunked) == 30
    assert chunked[0] is None
    assert len(set(texts)) == 1
    for ours, theirs in zip(chunked[1:], whole[1:], strict=True):
        assert ours.keys() == theirs.keys()
        for token in ours:
            assert ours[token]["logprob"] == pytest.approx(theirs[token]["logprob"], abs=1e-5)


# O-04


async def test_a_sequence_that_outgrows_the_pool_ends_there_and_the_next_one_works(
    tiny: Path,
) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    options = {"kv_cache_tokens": 2 * 16, "max_model_len": "auto", "cpu_threads": 1}
    with LLM(str(tiny), **options) as llm:
        for _ in range(2):
            (output,) = llm.generate([list(range(5, 35))], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 2
            assert output.outputs[0].finish_reason == "length"
        llm.audit()


async def test_over_http_what_does_not_fit_is_refused(serve: Serve) -> None:
    served = await serve(kv_cache_tokens=2 * 16, max_model_len="auto")
    body = {"model": "TINY", "prompt": list(range(5, 35)), "max_tokens": 64}
    reply = await served.client.post(COMPLETIONS, body)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert (await served.client.post(COMPLETIONS, {**body, "max_tokens": 2})).status == 200


# O-05 (a)


@pytest.mark.parametrize("swap_space", ["0", pytest.param("1MiB", marks=pytest.mark.slow)])
async def test_load_far_above_capacity_ends_request_by_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, swap_space: str
) -> None:
    body = {"prompt": "a b c", "max_tokens": 64}
    lives: Counter[str] = Counter()
    successor = Sequence.successor

    def counted(seq: Sequence) -> Sequence:
        lives[seq.id] += 1
        return successor(seq)

    monkeypatch.setattr(Sequence, "successor", counted)
    pages = 10 * -(-(6 + 64) // 16)  # for ten; BOS and 5 characters, each a token
    served = await serve(kv_cache_tokens=16 * pages, max_num_seqs=256, swap_space=swap_space)
    passed_over = plans_without_the_oldest(served.loop.scheduler, monkeypatch)
    replies = await asyncio.gather(
        *(served.client.post(COMPLETIONS, {**body, "seed": i}) for i in range(200))
    )
    assert Counter(reply.status for reply in replies) == {200: 200}
    assert max(lives.values(), default=0) <= 20
    assert passed_over == []
    audit = await served.audit()
    assert (audit["slots"]["running"], audit["waiting"], audit["swapped"]) == (0, 0, 0)
    assert audit["pages"]["referenced"] == 0
    assert audit["host_pages"]["free"] == audit["host_pages"]["total"]


def plans_without_the_oldest(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the oldest request's id with each plan that does nothing for it."""
    plan = scheduler.plan
    found: list[str] = []

    def watched(now: float) -> StepPlan:
        made: StepPlan = plan(now)
        oldest = min(scheduler._live.values(), key=lambda seq: seq.key)
        if oldest.slot not in made.slots:
            found.append(oldest.id)
        return made

    monkeypatch.setattr(scheduler, "plan", watched)
    return found


# O-06


async def test_a_hundred_clients_that_hang_up_leave_nothing_behind(serve: Serve) -> None:
    body = {"model": "TINY", "prompt": "x", "max_tokens": 480, "ignore_eos": True, "stream": True}
    served = await serve()
    before = (await served.audit())["pages"]
    first = await _steps_to_first_token(served)

    async def read_one_event_and_go() -> None:
        exchange = await served.client.open("POST", COMPLETIONS, body)
        assert (await exchange.body_part()).startswith(b"data: {")
        await exchange.hang_up()

    await asyncio.gather(*(read_one_event_and_go() for _ in range(100)))
    end = time.monotonic() + 1.0
    while (now := await served.audit())["slots"]["running"] or now["waiting"]:
        assert time.monotonic() < end, now
    assert now["pages"]["referenced"] == 0
    assert now["pages"]["free"] + now["pages"]["cached"] == before["free"] + before["cached"]
    num_plans = len(served.plans)
    await asyncio.sleep(0.05)
    assert len(served.plans) == num_plans, "something is still computed"
    assert await _steps_to_first_token(served) == first


async def _steps_to_first_token(served: Any) -> int:
    before = len(served.plans)
    await served.client.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 1})
    return len(served.plans) - before


# O-07


async def test_a_cache_hit_gives_the_answer_of_a_miss(serve: Serve) -> None:
    served = await serve()
    body = {"prompt": list(range(100, 164)), "temperature": 0, "max_tokens": 16}
    body |= {"return_token_ids": True}
    cached, answers = [], []
    for _ in range(4):
        done = (await served.client.post(COMPLETIONS, body)).json()
        cached.append(done["usage"]["prompt_tokens_details"]["cached_tokens"])
        answers.append(done["choices"][0]["token_ids"])
    assert cached == [0, 48, 48, 48]
    assert answers == [answers[0]] * 4
    salted = (await served.client.post(COMPLETIONS, {**body, "cache_salt": "another"})).json()
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"][0]["token_ids"] == answers[0]
