"""The Python API on a tiny random model: what the engine promises, end to end in one process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, AsyncLLM, SamplingParams
from octavo.core.errors import ContextLengthExceeded, InvalidRequest, StartupError
from octavo.engine.outputs import RequestOutput
from octavo.engine.record import Ended, Start, Step, read_recording
from tests.fakes.bytetok import byte_ids
from tests.fakes.loop import AdmitAll
from tests.fakes.tiny import make_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("llm") / "tiny")


def open_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"kv_cache_tokens": 4096, "max_num_seqs": 32, "cpu_threads": 1}
    return LLM(str(folder), **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm
        llm.audit()


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.audit()
    assert llm._loop.stats().pages_referenced == 0
    return outputs


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def random_prompts(count: int, seed: int = 1) -> list[list[int]]:
    value, prompts = seed, []
    for index in range(count):
        prompt = []
        for _ in range(3 + 7 * index % 90):
            value = (value * 1103515245 + 12345) % 2**31
            prompt.append(3 + value % 500)
        prompts.append(prompt)
    return prompts


def test_ids_do_not_depend_on_company_chunks_pages_or_cache(folder: Path, llm: LLM) -> None:
    prompts = random_prompts(10)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    params = [seeded if index % 3 else greedy for index in range(10)]
    alone = [ids(run(llm, [p], s)[0]) for p, s in zip(prompts, params, strict=True)]
    assert [ids(o) for o in run(llm, prompts, params)] == alone
    for options in (
        {"max_num_batched_tokens": 32},
        {"kv_cache_tokens": 128, "max_model_len": 128},
        {"enable_prefix_caching": False, "block_size": 32},
        {"ops_backend": "reference", "max_num_seqs": 5},
    ):
        with open_llm(folder, **options) as other:
            assert [ids(o) for o in run(other, prompts, params)] == alone, options


def test_a_repeated_prompt_hits_whole_pages_and_answers_the_same(folder: Path) -> None:
    with open_llm(folder) as llm:
        prompt = random_prompts(12)[-1][:64]
        outputs = [run(llm, [prompt])[0] for _ in range(4)]
    assert len(prompt) == 64
    assert [output.num_cached_tokens for output in outputs] == [0, 48, 48, 48]
    assert all(ids(output) == ids(outputs[0]) for output in outputs)


def test_prompt_logprobs_in_bounded_chunks(folder: Path, llm: LLM) -> None:
    prompt, params = list(range(5, 35)), SamplingParams(max_tokens=1, prompt_logprobs=1)
    whole = run(llm, [prompt], params)[0].prompt_logprobs
    with open_llm(folder, prompt_logprobs_chunk=8) as chunked:
        rows = []
        model = chunked._loop.executor._worker._model  # type: ignore[attr-defined]
        plain = model.logits
        model.logits = lambda hidden: rows.append(len(hidden)) or plain(hidden)
        output = run(chunked, [prompt, *random_prompts(3)], [params, GREEDY, GREEDY, GREEDY])
    parts = output[0].prompt_logprobs
    assert max(rows) <= 8
    assert whole is not None
    assert parts is not None
    assert len(parts) == len(whole) == 30
    assert parts[0] is None
    for token, ours, theirs in zip(prompt[1:], parts[1:], whole[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert token in ours
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert math.isclose(ours[key].logprob, theirs[key].logprob, abs_tol=1e-5)


def test_prompt_logprobs_survive_a_preemption(folder: Path) -> None:
    params = SamplingParams(max_tokens=40, prompt_logprobs=0, temperature=0, ignore_eos=True)
    prompts = random_prompts(8)[2:]
    with open_llm(folder, kv_cache_tokens=96, max_model_len=96) as tight:
        tight._loop.scheduler._admission = AdmitAll()
        outputs = run(tight, prompts, params)
        assert tight._loop.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)


def test_a_sequence_that_outgrows_the_pool_ends_with_length(folder: Path) -> None:
    with open_llm(folder, kv_cache_tokens=32, max_model_len="auto") as llm:
        prompt = list(range(5, 35))
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        output = run(llm, [prompt], params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (2, "length")
        assert len(ids(run(llm, [[5, 6]], GREEDY)[0])) == 16


def test_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=8, ignore_eos=True)
    first, again = (run(llm, ["once"], params)[0].outputs for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2, 3]
    texts = [tuple(choice.token_ids) for choice in first]
    assert len(set(texts)) == 4
    assert texts == [tuple(choice.token_ids) for choice in again]
    company = run(llm, ["once", *random_prompts(6)], [params] + [GREEDY] * 6)[0].outputs
    assert texts == [tuple(choice.token_ids) for choice in company]


def test_every_sampling_parameter_reaches_the_tokens(llm: LLM) -> None:
    plain = ids(run(llm, ["abc"], GREEDY)[0])

    def changed(**values: Any) -> list[int]:
        params = SamplingParams(
            **{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **values}
        )
        return ids(run(llm, ["abc"], params)[0])

    assert set(changed(logit_bias={77: 100.0})) == {77}
    assert plain[0] not in changed(logit_bias={plain[0]: -100.0})
    assert set(changed(allowed_token_ids=[9, 10])) <= {9, 10}
    assert changed(stop_token_ids=[plain[3]]) == plain[: plain.index(plain[3]) + 1]
    assert len(changed(stop_token_ids=[plain[0]], min_tokens=5)) >= 5
    assert len(set(changed(frequency_penalty=2.0))) > len(set(plain))
    assert changed(repetition_penalty=30000.0) != plain
    assert changed(presence_penalty=2.0) != plain
    assert changed(temperature=1.0, top_k=1, seed=1) == plain
    assert changed(temperature=1.0, top_p=1e-9, seed=1) == plain
    assert changed(temperature=1.0, min_p=1.0, seed=1) == plain
    assert changed(temperature=1.0, seed=1) != changed(temperature=1.0, seed=2)


def test_bad_words_and_stop_strings_are_about_text(llm: LLM) -> None:
    letters = {
        "seed": 3,
        "max_tokens": 16,
        "ignore_eos": True,
        "allowed_token_ids": byte_ids(b"abcdefgh"),
    }
    text = run(llm, ["abc"], SamplingParams(**letters))[0].outputs[0].text
    letter = text[5]
    banned = SamplingParams(**letters, bad_words=[letter])
    assert letter not in run(llm, ["abc"], banned)[0].outputs[0].text
    stopped = SamplingParams(**letters, stop=letter)
    output = run(llm, ["abc"], stopped)[0].outputs[0]
    assert output.text == text[: text.index(letter)]
    assert (output.finish_reason, output.stop_reason) == ("stop", letter)
    assert "abort" not in llm._loop.stats().finished


def test_logprobs_are_shaped_like_vllms(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)
    output = run(llm, ["abc"], params)[0].outputs[0]
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 2  # greedy: the token itself is among the two best
        assert entry[token].decoded_token is not None
    total = sum(e[t].logprob for t, e in zip(output.token_ids, output.logprobs, strict=True))
    assert output.cumulative_logprob == pytest.approx(total)


def test_chat_and_offline_limits(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)[0]
    assert output.prompt_token_ids.count(1) == 1  # one BOS
    several = llm.chat([[{"role": "user", "content": c}] for c in "ab"], GREEDY, use_tqdm=False)
    assert len(several) == 2
    with pytest.raises(ContextLengthExceeded, match="513"):
        run(llm, [list(range(3, 259)) * 2 + [5]])
    with pytest.raises(InvalidRequest, match="600"):
        run(llm, [[5], [600]])
    assert run(llm, [list(range(3, 259)) + list(range(3, 258))])[0].outputs[0].finish_reason


def test_a_list_of_eos_ids_and_an_overridden_config(folder: Path, tmp_path: Path) -> None:
    copy = make_tiny(tmp_path / "eos")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    with LLM(str(copy), override_generation_config={"temperature": 0.3}) as llm:
        forced = SamplingParams(temperature=0, max_tokens=9, logit_bias={7: 100.0})
        output = run(llm, ["x"], forced)[0].outputs[0]
        assert (output.token_ids, output.text, output.finish_reason) == ([7], "", "stop")
        ignoring = SamplingParams(
            temperature=0, max_tokens=9, logit_bias={7: 100.0}, ignore_eos=True
        )
        assert ids(run(llm, ["x"], ignoring)[0]) == [7] * 9


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_leaves_the_llm_as_good_as_new(
    llm: LLM, error: type[BaseException]
) -> None:
    prompts = random_prompts(6)
    rich = SamplingParams(
        seed=3, max_tokens=12, presence_penalty=0.5, logprobs=1, min_tokens=4, prompt_logprobs=0
    )
    expected = [ids(output) for output in run(llm, prompts, rich)]
    model = llm._loop.executor._worker._model  # type: ignore[attr-defined]
    plain, steps = model.forward, []

    def failing(batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 4:
            raise error("in the middle of a step")
        return plain(batch)

    model.forward = failing
    with pytest.raises(error):
        llm.generate(prompts, rich, use_tqdm=False)
    del model.forward
    llm.audit()
    assert [ids(output) for output in run(llm, prompts, rich)] == expected
    assert llm._loop.stats().running == 0


def test_random_weights_need_no_tokenizer(tmp_path: Path) -> None:
    from tests.fakes.tiny import tiny_config

    tmp_path.joinpath("config.json").write_text(json.dumps(tiny_config("qwen3")))
    for load_format in ("dummy", "dummy:normal"):
        with LLM(str(tmp_path), load_format=load_format, skip_tokenizer_init=True) as llm:
            output = run(llm, [[5, 6, 7]])[0].outputs[0]
            assert (len(output.token_ids), output.text) == (16, "")
            with pytest.raises(InvalidRequest, match="token ids"):
                llm.generate("text", use_tqdm=False)


def test_a_misspelt_option_is_an_error_that_helps(folder: Path) -> None:
    with pytest.raises(StartupError, match="max_num_seqs"):
        LLM(str(folder), max_num_seq=4)


@pytest.mark.anyio
async def test_async_llm_streams_and_aborts(folder: Path, llm: LLM) -> None:
    expected = run(llm, ["abc"])[0].outputs[0]
    engine = AsyncLLM(str(folder), kv_cache_tokens=4096, max_num_seqs=8, disable_log_stats=True)
    seen = [len(o.outputs[0].token_ids) async for o in engine.generate("abc", GREEDY)]
    assert seen == sorted(seen)
    assert seen[-1] == 16
    *_, output = [o async for o in engine.generate("abc", GREEDY)]
    assert output.finished
    assert output.outputs[0].text == expected.text
    async for _ in engine.generate("abc", SamplingParams(max_tokens=400, ignore_eos=True)):
        break
    *_, output = [o async for o in engine.chat([{"role": "user", "content": "hi"}], GREEDY)]
    assert output.finished
    assert (await engine.service.control("audit"))["running"] <= 1
    await engine.close()


def test_the_models_generation_config_is_the_default(folder: Path) -> None:
    defaults = {"temperature": 0, "eos_token_id": [7]}
    with open_llm(folder, override_generation_config=defaults) as llm:
        first, second = llm.generate(["x", "x"], use_tqdm=False)
        assert ids(first) == ids(second)
        biased = SamplingParams(temperature=0, logit_bias={7: 100.0})
        assert ids(run(llm, ["x"], biased)[0]) == [7]
    for refused, message in (
        ({"override_generation_config": {"temprature": 1}}, "temprature"),
        ({"override_generation_config": {"max_new_tokens": 5}}, "max_new_tokens"),
        ({"generation_config": "/nonexistent"}, "nonexistent"),
        ({"port": 3}, "port is an option of the server"),
        ({"revision": "main"}, "--revision"),
    ):
        with pytest.raises(StartupError, match=message):
            open_llm(folder, **refused)


def test_wrong_arguments_are_told_in_one_sentence(llm: LLM) -> None:
    for prompts in (5, [1, "a"], None, [{"text": "x"}], [[1.5]]):
        with pytest.raises(InvalidRequest, match="A prompt must be"):
            llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sampling_params must be"):
        llm.generate("x", {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_an_id_may_be_used_again_and_outputs_are_snapshots(folder: Path) -> None:
    engine = AsyncLLM(str(folder), kv_cache_tokens=4096, max_num_seqs=8, cpu_threads=1)
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    stream = engine.generate("x", long, request_id="q")
    output = await anext(stream)
    await stream.aclose()
    outputs = [o async for o in engine.generate("y", GREEDY, request_id="q")]
    assert outputs[-1].request_id == output.request_id == "q"
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == sorted(set(lengths))  # what comes at once on a busy machine is one output
    assert len(lengths) > 1
    assert lengths[-1] == 16
    assert outputs[-1].outputs[0].finish_reason == "length"
    await engine.close()


def test_closing_while_loading_does_not_hang(folder: Path) -> None:
    async def open_and_close() -> None:
        engine = AsyncLLM(str(folder), kv_cache_tokens=4096, max_num_seqs=8, cpu_threads=1)
        loading = asyncio.create_task(engine.start())
        await asyncio.sleep(0.01)
        await asyncio.wait_for(engine.close(), 30)
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(open_and_close())


def test_the_plainest_instructions_give_the_same_ids(folder: Path, llm: LLM) -> None:
    prompts = random_prompts(4)
    with open_llm(folder, cpu_isa="generic") as plain:
        assert "generic" in plain.info.notes["kernels"]
        assert [ids(o) for o in run(plain, prompts)] == [ids(o) for o in run(llm, prompts)]


def test_a_trace_file_tells_what_ran(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with open_llm(folder, trace_file=str(path)) as llm:
        run(llm, random_prompts(3))
    start, *entries = read_recording(path)
    assert isinstance(start, Start)
    assert (start.max_num_seqs, start.num_pages) == (32, 4096 // 16 + 1)
    ended = [entry for entry in entries if isinstance(entry, Ended)]
    assert sorted(entry.prompt for entry in ended) == sorted(map(len, random_prompts(3)))
    assert {entry.output for entry in ended} == {16}
    assert sum(entry.decode_rows for entry in entries if isinstance(entry, Step)) >= 3 * 15
