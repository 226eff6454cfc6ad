"""A SentencePiece vocabulary: the space between a prompt and its answer is part of the answer."""

from __future__ import annotations

import json

import pytest

from tests.fakes.engine import Script
from tests.server.conftest import completion_text, prompt
from tests.text.conftest import pieces_backend

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
SPACE_A, B = 262, 261  # "▁a", "b"


@pytest.fixture
async def served(serve, tmp_path):
    pieces_backend(["▁", "a", "b", "▁a", "ab"]).save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return await serve(Script([SPACE_A, B]), folder=tmp_path)


async def test_completions_keep_it(served):
    body = prompt([SPACE_A, B], max_tokens=2)
    choice = (await served.client.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == " ab"
    assert completion_text(await served.client.stream(COMPLETIONS, body)) == " ab"


async def test_generate_and_echo_join_prompt_and_answer(served):
    answer = (await served.client.post("/generate", {"prompt": "b", "max_tokens": 2})).json()
    assert answer["text"] == ["b ab"]
    body = prompt([SPACE_A, B], max_tokens=2, echo=True, logprobs=1)
    choice = (await served.client.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == "ab ab"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 4]


async def test_a_text_that_begins_after_a_special_token_has_none(served):
    body = prompt([1], max_tokens=2, logprobs=1)
    choice = (await served.client.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["text_offset"] == [0, 1]
