"""TextFront: BOS once in a chat, absurd texts refused unread, slow work off the event loop."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ContextLengthExceeded, InvalidRequest
from octavo.core.plan import Delta
from octavo.core.sampling import SamplingParams
from octavo.text.chat import ChatTemplate, load_chat_template
from octavo.text.front import MAX_BAD_WORDS, TextFront
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.bytetok import byte_ids, write_byte_tokenizer

HI = [{"role": "user", "content": "hi"}]


def make_front(folder: Path, chat_template: bool | str = True, **options: Any) -> TextFront:
    write_byte_tokenizer(folder, chat_template=chat_template)
    return TextFront(
        load_tokenizer(folder), load_chat_template(folder), **({"max_model_len": 512} | options)
    )


def test_chat_has_the_templates_bos_and_no_other(tmp_path: Path) -> None:
    source = "{{bos_token}}{% for m in messages %}[{{m.role}}]{{m.content}}{% endfor %}"
    ids = make_front(tmp_path / "a", source).render_now(HI)
    assert ids == [1, *byte_ids("[user]hi")]
    ids = make_front(tmp_path / "b", source.replace("{{bos_token}}", "")).render_now(HI)
    assert ids == byte_ids("[user]hi")


def test_chat_without_template_says_what_to_do(tmp_path: Path) -> None:
    front = make_front(tmp_path, False)
    with pytest.raises(InvalidRequest, match="--chat-template"):
        front.render_now(HI)
    front.warm_up_now()
    assert front.encode_now("x") == [1, *byte_ids("x")]


class Unreadable(Tokenizer):
    """Fails if a text is tokenized."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        raise AssertionError(f"tokenized {len(text)} characters")


def test_absurd_lengths_are_refused_without_tokenizing(tmp_path: Path) -> None:
    front = make_front(tmp_path)
    assert front.max_chars == 512 * 5
    assert len(front.encode_now("a" * 2560)) == 2561
    front.tokenizer.__class__ = Unreadable
    text = "a " * 13_500_000  # 27 MB
    with pytest.raises(ContextLengthExceeded, match=r"27000000 characters.*512 tokens") as caught:
        front.encode_now(text)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(ContextLengthExceeded, match="2560 characters") as caught:
        front.render_now([{"role": "user", "content": text}])
    assert caught.value.param == "messages"


@pytest.mark.anyio
async def test_async_twins_work_on_other_threads(tmp_path: Path) -> None:
    front = make_front(tmp_path, threads=1)
    await front.warm_up()
    assert await front.encode("hi") == front.encode_now("hi")
    assert await front.encode("hi", add_special=False) == byte_ids("hi")
    options: dict[str, Any] = {"add_generation_prompt": False, "kwargs": {"x": 1}}
    assert await front.render(HI, **options) == front.render_now(HI, **options)
    assert await front.run(threading.current_thread) is not threading.current_thread()


@pytest.mark.anyio
async def test_the_event_loop_goes_on_while_a_template_runs(tmp_path: Path) -> None:
    front = make_front(tmp_path, False)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    front.template = ChatTemplate(endless, max_seconds=0.3)
    rendering = asyncio.create_task(front.render(HI))
    turns = 0
    while not rendering.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(InvalidRequest, match="did not end"):
        await rendering
    assert turns > 2


def test_bad_words_with_and_without_a_leading_space(
    tmp_path: Path, pieces_tokenizer: Tokenizer
) -> None:
    front = make_front(tmp_path)
    assert front.bad_word_ids(["ab", " ab", "c"]) == (tuple(byte_ids("ab")), tuple(byte_ids("c")))
    front = TextFront(pieces_tokenizer, None, max_model_len=64)
    for ids in front.bad_word_ids(["a"]):
        assert pieces_tokenizer.decode(ids).strip() == "a"


def test_bad_words_of_a_real_vocabulary(smollm2: Path) -> None:
    front = TextFront(load_tokenizer(smollm2), None, max_model_len=64)
    banned = front.bad_word_ids(["Paris"])
    assert {front.tokenizer.decode(ids) for ids in banned} == {"Paris", " Paris"}


@pytest.mark.parametrize("words", [["x"] * (MAX_BAD_WORDS + 1), ["x" * 5000], ["  "]])
def test_bad_words_have_bounds(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_front(tmp_path).bad_word_ids(words)
    assert caught.value.param == "bad_words"


def test_open_stream_passes_all_text_parameters(tmp_path: Path) -> None:
    params = SamplingParams(
        stop=["ab"], include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=3
    )
    stream = make_front(tmp_path).open_stream(params)
    chunk = stream.push(Delta("r", [1, *byte_ids("abxabx")]))
    assert (chunk.text, chunk.stop_reason) == ("<s>abxab", "ab")


@pytest.mark.parametrize(
    ("prompt", "text"), [([], "a"), ([1], "a"), ([262, 2], "a"), ([262], " a"), ([2, 260], " a")]
)
def test_a_first_space_is_dropped_where_a_text_begins(
    pieces_tokenizer: Tokenizer, prompt: list[int], text: str
) -> None:
    """Token 262 is "▁a"; 1 and 2 are special."""
    front = TextFront(pieces_tokenizer, None, max_model_len=64)
    stream = front.open_stream(SamplingParams(), prompt)
    assert stream.push(Delta("r", [262], finish="length")).text == text
