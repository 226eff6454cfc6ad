"""How a call is scheduled, through the Python API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.core.errors import InvalidRequest, QueueTimeout, RequestTimeout
from tests.fakes.tiny import make_tiny

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("terms") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), kv_cache_tokens=4096, max_num_seqs=8, cpu_threads=1) as llm:
        yield llm
        llm.audit()


def cached(llm: LLM, salt: str | None) -> int | None:
    prompt = {"prompt_token_ids": PROMPT} | ({} if salt is None else {"cache_salt": salt})
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return output.num_cached_tokens


def test_a_prompt_is_found_again_only_under_its_salt(llm: LLM) -> None:
    salts = (None, None, "a", "b", "a", "b", None)
    assert [cached(llm, salt) for salt in salts] == [0, 32, 0, 0, 32, 32, 32]


def test_terms_are_for_all_prompts_or_one_each(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="priority holds 1 entries for 2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, priority=[0])
    with pytest.raises(InvalidRequest, match="tenant holds 3 entries for 2 prompts"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, tenant=["a", "b", "c"])
    outputs = llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, tenant=["a", "b"], timeout=60)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]


def test_what_would_have_no_effect_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="--scheduling-policy"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, priority=1)
    with pytest.raises(InvalidRequest, match=r"A prompt may have .* not 'multi_modal_data'"):
        llm.generate({"prompt": "x", "multi_modal_data": {}}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="timeout must be above 0"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, timeout=0)


def test_time_limits_end_an_output_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    options = {"kv_cache_tokens": 4096, "max_num_seqs": 1, "cpu_threads": 1, "queue_timeout": 0.02}
    with LLM(str(folder), **options) as llm:
        step = llm._loop.step
        monkeypatch.setattr(llm._loop, "step", lambda now: time.sleep(0.005) or step(now))
        outputs = llm.generate([PROMPT, PROMPT], long, use_tqdm=False, timeout=0.5)
        llm.audit()
    first, second = (output.outputs[0] for output in outputs)
    assert (first.finish_reason, second.finish_reason) == ("timeout", "timeout")
    assert 0 < len(first.token_ids) < 400
    assert second.token_ids == []


@pytest.mark.anyio
async def test_async_calls_raise_if_time_runs_out_before_a_token(folder: Path) -> None:
    engine = AsyncLLM(
        str(folder), kv_cache_tokens=4096, max_num_seqs=1, cpu_threads=1, queue_timeout=0.02
    )
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    running = engine.generate(PROMPT, long)
    await anext(running)
    with pytest.raises(QueueTimeout, match=r"for 0\.02 s"):
        await anext(engine.generate(PROMPT, long))
    with pytest.raises(RequestTimeout, match=r"within 0\.001 s"):
        await anext(engine.generate(PROMPT, long, timeout=0.001))
    await running.aclose()
    await engine.close()
