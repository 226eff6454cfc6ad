"""Streams: the text is that of a one-shot decode, however the ids are cut, and stops stop."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequest
from octavo.core.plan import Delta, TokenLogprobs
from octavo.text.stream import MAX_STOP_CHARS, Chunk, TextStream
from octavo.text.tokenizer import Tokenizer
from tests.fakes.bytetok import byte_ids


def feed(stream: TextStream, parts: Sequence[Sequence[int]], finish: Any = "length") -> list[Chunk]:
    """One delta for each part, the last with ``finish``; ends early on a stop."""
    chunks = []
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        chunks.append(stream.push(Delta("r", list(part), finish=finish if last else None)))
        if chunks[-1].finish is not None:
            break
    return chunks


def text_of(chunks: Sequence[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def script(*parts: str | bytes) -> list[list[int]]:
    return [byte_ids(part) for part in parts]


def cut(items: Sequence[int], places: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(place % (len(items) + 1) for place in places), len(items)]
    return [list(items[a:b]) for a, b in pairwise(edges)]


# --- characters


def test_character_split_over_tokens(byte_tokenizer: Tokenizer) -> None:
    chunks = feed(TextStream(byte_tokenizer), script(b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd"))
    assert [chunk.text for chunk in chunks] == ["", "你", "好"]


def test_end_inside_a_character_is_one_replacement(byte_tokenizer: Tokenizer) -> None:
    chunks = feed(TextStream(byte_tokenizer), script(b"\x41", b"\xe4\xbd"))
    assert [chunk.text for chunk in chunks] == ["A", "\ufffd"]
    assert byte_tokenizer.decode(byte_ids(b"\x41\xe4\xbd")) == "A\ufffd"


def test_end_inside_a_character_without_new_ids(byte_tokenizer: Tokenizer) -> None:
    chunks = feed(TextStream(byte_tokenizer), [*script(b"\x41\xe4"), []], finish="abort")
    assert [chunk.text for chunk in chunks] == ["A", "\ufffd"]
    assert chunks[-1].finish == "abort"


@given(st.text(), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_of_any_text_streams_to_that_text(
    byte_tokenizer: Tokenizer, text: str, places: list[int]
) -> None:
    chunks = feed(TextStream(byte_tokenizer), cut(byte_ids(text), places))
    assert text_of(chunks) == text
    assert "\ufffd" in text or all("\ufffd" not in chunk.text for chunk in chunks)


@given(
    st.sampled_from(["byte_tokenizer", "pieces_tokenizer"]),
    st.lists(st.integers(0, 275) | st.sampled_from([0xE4 + 3, 0xBD + 3, 0xA0 + 3, 0xED + 3, 1])),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
)
def test_random_ids_stream_to_their_one_shot_decode(
    request: pytest.FixtureRequest, kind: str, ids: list[int], places: list[int], skip: bool
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    expected = tokenizer.decode(ids, skip_special=skip)
    for parts in (cut(ids, places), [[i] for i in ids] or [[]]):
        stream = TextStream(tokenizer, skip_special=skip)
        assert text_of(feed(stream, parts)) == expected
        stream = TextStream(tokenizer, skip_special=skip, stops=["\ue000", "  \ue000"])
        assert text_of(feed(stream, parts)) == expected


@given(st.lists(st.integers(0, 49_151), max_size=30))
def test_random_ids_of_the_real_vocabulary(real_tokenizer: Tokenizer, ids: list[int]) -> None:
    chunks = feed(TextStream(real_tokenizer), [[i] for i in ids] or [[]])
    assert text_of(chunks) == real_tokenizer.decode(ids)


@pytest.fixture(scope="session")
def real_tokenizer(smollm2: Any) -> Tokenizer:
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(smollm2)


def test_ids_beyond_the_vocabulary_have_no_text(byte_tokenizer: Tokenizer) -> None:
    parts = [[68], [40_000], byte_ids(b"\xe4\xbd"), [40_000], byte_ids(b"\xa0")]
    assert text_of(feed(TextStream(byte_tokenizer), parts)) == "A你"


@given(
    st.lists(st.integers(259, 269), min_size=1, max_size=6),
    st.lists(st.integers(259, 269), max_size=6),
)
def test_an_answer_that_continues_a_text_keeps_its_first_space(
    pieces_tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    stream = TextStream(pieces_tokenizer, continues=True)
    answer = text_of(feed(stream, [[i] for i in ids] or [[]]))
    assert pieces_tokenizer.decode(prompt) + answer == pieces_tokenizer.decode(prompt + ids)


# --- special and stop tokens


def test_special_tokens_are_skipped_or_shown(byte_tokenizer: Tokenizer) -> None:
    parts = [[68], [1], [69]]
    assert text_of(feed(TextStream(byte_tokenizer), parts)) == "AB"
    assert text_of(feed(TextStream(byte_tokenizer, skip_special=False), parts)) == "A<s>B"


@pytest.mark.parametrize(
    ("stop_id", "include_stop", "skip_special", "text", "reason"),
    [
        (2, False, True, "A", None),
        (2, False, False, "A", None),
        (2, True, True, "A", None),
        (2, True, False, "A</s>", None),
        (69, False, True, "A", 69),
        (69, True, True, "AB", 69),
    ],
)
def test_text_of_a_stop_token(
    byte_tokenizer: Tokenizer,
    stop_id: int,
    include_stop: bool,
    skip_special: bool,
    text: str,
    reason: int | None,
) -> None:
    stream = TextStream(byte_tokenizer, include_stop=include_stop, skip_special=skip_special)
    first = stream.push(Delta("r", [68]))
    last = stream.push(Delta("r", [stop_id], finish="stop", stop_id=stop_id))
    assert first.text + last.text == text
    assert (last.ids, last.finish, last.stop_reason) == ([stop_id], "stop", reason)


def test_ignored_eos_is_an_ordinary_special_token(byte_tokenizer: Tokenizer) -> None:
    assert text_of(feed(TextStream(byte_tokenizer), [[68], [2], [69]])) == "AB"


# --- stop strings


def test_stop_string_over_token_boundaries(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, stops=["\nUser:"])
    chunks = feed(stream, script("Hel", "lo\nUs", "er", ": bye"))
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", "", ""]
    assert (chunks[-1].finish, chunks[-1].stop_reason) == ("stop", "\nUser:")
    assert chunks[-1].ids == byte_ids(":")  # what follows is no part of the answer


def test_ids_end_where_a_stop_string_does_however_they_came(byte_tokenizer: Tokenizer) -> None:
    ids = byte_ids("abcd")
    logprobs = [TokenLogprobs([i], [-0.5], 1) for i in ids]
    for size in (1, 2, 4):
        stream = TextStream(byte_tokenizer, stops=["bc"])
        found: list[Chunk] = []
        for k in range(0, 4, size):
            if not found or found[-1].finish is None:
                found.append(
                    stream.push(Delta("r", ids[k : k + size], logprobs=logprobs[k : k + size]))
                )
        assert [i for chunk in found for i in chunk.ids] == ids[:3]
        assert [e for chunk in found for e in chunk.logprobs] == logprobs[:3]


def test_held_text_is_flushed_at_the_end(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, stops=["\nUser:"])
    chunks = feed(stream, script("Hel", "lo\nUs", "ed"))
    assert text_of(chunks) == "Hello\nUsed"
    stream = TextStream(byte_tokenizer, stops=["\nUser:"])
    chunks = feed(stream, script("Hel", "lo\nUs"))
    assert [chunk.text for chunk in chunks] == ["Hel", "lo\nUs"]
    assert (chunks[-1].finish, chunks[-1].stop_reason) == ("length", None)


def test_held_text_is_flushed_before_a_stop_token(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, stops=["\nUser:"])
    first = stream.push(Delta("r", byte_ids("a\nUs")))
    last = stream.push(Delta("r", [2], finish="stop", stop_id=2))
    assert (first.text, last.text, last.stop_reason) == ("a", "\nUs", None)


def test_only_a_proper_prefix_of_a_stop_is_held_back(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, stops=["aab", "ba"])
    pushed = [stream.push(Delta("r", byte_ids(char))).text for char in "aaac"]
    assert pushed == ["", "", "a", "aac"]


def test_include_stop(byte_tokenizer: Tokenizer) -> None:
    stream = TextStream(byte_tokenizer, stops=["END"], include_stop=True)
    assert text_of(feed(stream, script("aE", "N", "Db"))) == "aEND"


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["bcd", "c"], "ab", "c"),  # the one that ends first
        (["c", "bc"], "a", "bc"),  # of two that end together, the longer
        (["d", "xbcd"], "abc", "d"),
    ],
)
def test_which_stop_wins_does_not_depend_on_the_cut(
    byte_tokenizer: Tokenizer, stops: list[str], text: str, stop: str
) -> None:
    for parts in (script("abcd"), script("a", "b", "c", "d"), script("ab", "cd")):
        chunks = feed(TextStream(byte_tokenizer, stops=stops), parts)
        assert (text_of(chunks), chunks[-1].stop_reason) == (text, stop)


def oracle(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first place where a stop ends, the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.text("ab你", max_size=30),
    st.lists(st.text("ab你", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(0, 1000), max_size=10),
    st.booleans(),
)
@example("aaaab", ["aaab", "ab"], [1, 2], False)
def test_stops_equal_their_definition_at_every_cut(
    byte_tokenizer: Tokenizer, text: str, stops: list[str], places: list[int], include: bool
) -> None:
    expected, stop = oracle(text, stops, include)
    stream = TextStream(byte_tokenizer, stops=stops, include_stop=include)
    chunks = feed(stream, cut(byte_ids(text), places))
    assert (text_of(chunks), chunks[-1].stop_reason) == (expected, stop)
    assert chunks[-1].finish == ("length" if stop is None else "stop")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_no_more_is_held_back_than_must_be(
    byte_tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    stream = TextStream(byte_tokenizer, stops=stops)
    seen = sent = ""
    for char in text:
        chunk = stream.push(Delta("r", byte_ids(char)))
        seen += char
        sent += chunk.text
        if chunk.finish is not None:
            return
        beginnings = [s[:i] for s in stops for i in range(1, len(s)) if seen.endswith(s[:i])]
        assert len(seen) - len(sent) == max(map(len, beginnings), default=0)


def test_stops_do_not_count_within_min_tokens(byte_tokenizer: Tokenizer) -> None:
    def run(min_tokens: int) -> str:
        stream = TextStream(byte_tokenizer, stops=["ab"], min_tokens=min_tokens)
        return text_of(feed(stream, script("xab", "ab", "y")))

    assert [run(n) for n in (0, 2, 3, 4, 5, 9)] == ["x", "x", "xab", "xab", "xababy", "xababy"]


def test_stop_in_the_replacement_of_a_cut_character(byte_tokenizer: Tokenizer) -> None:
    chunks = feed(TextStream(byte_tokenizer, stops=["\ufffd"]), script(b"A", b"\xe4"))
    assert (text_of(chunks), chunks[-1].stop_reason) == ("A", "\ufffd")


def test_too_much_to_look_for_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_STOP_CHARS + 1)) as caught:
        TextStream(byte_tokenizer, stops=["x" * (MAX_STOP_CHARS + 1)])
    assert caught.value.param == "stop"


# --- the rest of a chunk


def test_a_chunk_carries_what_its_delta_does(byte_tokenizer: Tokenizer) -> None:
    logprob = TokenLogprobs([68], [-0.5], 1)
    prompt = TokenLogprobs([69], [-1.5], 2)
    delta = Delta("r", [68], logprobs=[logprob], prompt_logprobs=[prompt], cached_tokens=16)
    chunk = TextStream(byte_tokenizer).push(delta)
    assert chunk == Chunk("A", [68], [logprob], [prompt], cached_tokens=16)
    delta = Delta("r", [], finish="error", error_code="out_of_memory", error="no pages")
    chunk = TextStream(byte_tokenizer, stops=["x"]).push(delta)
    assert chunk == Chunk(finish="error")
