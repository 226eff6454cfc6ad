"""Ids and texts: BOS once, bytes exactly, and a clear word for what cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequest, StartupError
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.bytetok import byte_ids, write_byte_tokenizer

TEXTS = ["", "hi", "你好 😀", "  a\n\n\tb  ", "<s>", "</s><pad>x", "\x00\x7f\u0080é", "<300>"]


@pytest.fixture(scope="session")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("folder"))


def edit(folder: Path, file: str, **changes: Any) -> Path:
    path = folder / file
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | changes))
    return folder


def test_folder_gives_the_ids_of_the_tokenizers_library(bytes_folder: Path) -> None:
    from tokenizers import Tokenizer as Backend

    ours = load_tokenizer(bytes_folder)
    theirs = Backend.from_file(str(bytes_folder / "tokenizer.json"))
    for text in TEXTS:
        for add_special in (False, True):
            expected = theirs.encode(text, add_special_tokens=add_special).ids
            if add_special and text.startswith("<s>"):
                expected = expected[1:]
            assert ours.encode(text, add_special=add_special) == expected
        ids = ours.encode(text)
        for skip in (False, True):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_facts_of_the_byte_tokenizer(byte_tokenizer: Tokenizer) -> None:
    assert (byte_tokenizer.vocab_size, byte_tokenizer.bos_id) == (512, 1)
    assert (byte_tokenizer.eos_ids, byte_tokenizer.eos_token) == ((2,), "</s>")
    assert byte_tokenizer.special_ids == {0, 1, 2}
    assert byte_tokenizer.max_token_chars == 5
    assert byte_tokenizer.encode("é") == [1, *byte_ids("é")]
    assert byte_tokenizer.decode([511, 68]) == "<511>A"
    assert [byte_tokenizer.token_bytes(b + 3) for b in range(256)] == [
        bytes([b]) for b in range(256)
    ]


def test_ids_of_padded_embeddings_have_no_text(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.token_bytes(512) == b""
    assert byte_tokenizer.decode([68, 40_000, 69]) == "AB"


@pytest.mark.parametrize(
    ("text", "count"), [("x", 1), ("<s>x", 1), ("<s>", 1), ("", 1), ("x<s>", 2), (" <s>", 2)]
)
def test_raw_prompt_gets_bos_once(byte_tokenizer: Tokenizer, text: str, count: int) -> None:
    ids = byte_tokenizer.encode(text)
    assert ids[0] == 1
    assert ids.count(1) == count


def test_without_add_special_nothing_is_added(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode("x", add_special=False) == byte_ids("x")
    assert byte_tokenizer.encode("<s>x", add_special=False) == [1, *byte_ids("x")]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_explicit_add_bos_token_wins_over_the_pipeline(
    tmp_path: Path, written: bool, wanted: bool | None
) -> None:
    folder = write_byte_tokenizer(tmp_path, add_bos=written)
    edit(folder, "tokenizer_config.json", add_bos_token=wanted)
    ids = load_tokenizer(folder).encode("x")
    assert ids == ([1] if (written if wanted is None else wanted) else []) + byte_ids("x")


def test_add_eos_token(tmp_path: Path) -> None:
    folder = edit(write_byte_tokenizer(tmp_path), "tokenizer_config.json", add_eos_token=True)
    assert load_tokenizer(folder).encode("x") == [1, *byte_ids("x"), 2]


def test_special_tokens_as_objects_and_from_the_map_file(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    edit(folder, "special_tokens_map.json", eos_token={"content": "</s>"}, bos_token="wrong")
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


def test_truncation_in_tokenizer_json_is_not_obeyed(tmp_path: Path) -> None:
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    folder = edit(write_byte_tokenizer(tmp_path), "tokenizer.json", truncation=limit)
    assert len(load_tokenizer(folder).encode("x" * 100)) == 101


def test_lone_surrogate_is_the_callers_fault(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_tokenizer.encode("a\ud800b")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["no tokenizer.json", "GGUF"]),
        ({"tokenizer.model": "x"}, ["tokenizer.model", "save_pretrained"]),
        ({"tokenizer.json": "{"}, ["Cannot read"]),
    ],
)
def test_what_to_do_without_a_usable_tokenizer(
    tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(StartupError) as caught:
        load_tokenizer(tmp_path)
    assert all(word in str(caught.value) for word in [str(tmp_path), *words])


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_broken_tokenizer_config(tmp_path: Path, content: str) -> None:
    folder = write_byte_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("decoder", "word"),
    [({"type": "BPEDecoder", "suffix": "</w>"}, "BPEDecoder"), (None, "no dec")],
)
def test_a_decoder_that_cannot_be_streamed_is_refused(
    tmp_path: Path, decoder: object, word: str
) -> None:
    folder = edit(write_byte_tokenizer(tmp_path), "tokenizer.json", decoder=decoder)
    with pytest.raises(StartupError, match=word):
        load_tokenizer(folder)


@given(st.text())
def test_sentencepiece_text_round_trips(pieces_tokenizer: Tokenizer, text: str) -> None:
    ids = pieces_tokenizer.encode(text, add_special=False)
    plain = text.replace("▁", " ")  # the pieces' spelling of a space
    for special in ("<unk>", "<s>", "</s>"):
        plain = plain.replace(special, "")
    if not plain.startswith(" "):  # else a first space is the text's own, and no other is put
        assert pieces_tokenizer.decode(ids) == plain


def test_added_token_in_the_pieces_spelling_is_decoded() -> None:
    from tokenizers import AddedToken

    from tests.text.conftest import pieces_backend

    backend = pieces_backend(["a"])
    backend.add_tokens([AddedToken("▁▁▁", normalized=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([259, 260, 259]) == "a   a"


def test_added_token_outside_the_byte_alphabet_is_text(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    state = json.loads((folder / "tokenizer.json").read_text())
    for id, content in ((512, "œé"), (513, "a b")):
        state["added_tokens"].append(
            state["added_tokens"][0] | {"id": id, "content": content, "special": False}
        )
    (folder / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("xœéa b", add_special=False) == [*byte_ids("x"), 512, 513]
    assert tokenizer.decode([512, 513]) == "œéa b"


def test_sentencepiece_first_space_and_byte_fallback(pieces_tokenizer: Tokenizer) -> None:
    assert pieces_tokenizer.token_bytes(262) == b" a"
    assert pieces_tokenizer.decode([262, 262]) == "a a"
    assert pieces_tokenizer.decode([1, 262], skip_special=False) == "<s> a"
    assert pieces_tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert pieces_tokenizer.decode([260, 3 + 0xE4, 3 + 0xBD]) == "a\ufffd"
    assert pieces_tokenizer.token_text(3 + 0xE4) == "\ufffd"
    assert pieces_tokenizer.token_bytes(1) == b"<s>"
