"""GGUF: the tokenizer of the file is the model's own, and a broken file is a sentence."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import StartupError
from octavo.text.chat import load_chat_template
from octavo.text.gguf_metadata import read_metadata
from octavo.text.tokenizer import Tokenizer, load_tokenizer

gguf = pytest.importorskip("gguf")

SENTENCES = [
    "Hello, world! It's 5 o'clock; I'LL be there.",
    "def f(x: int) -> int:\n    return x ** 2  # square\n\n\n\tif x:\n\t\tpass\r\n",
    "你好，世界。这是一个测试！《红楼梦》",
    "😀 👩‍👩‍👧 🇫🇷 👍🏽 naïve café Ångström",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|",
    "     leading,  double   triple    trailing     ",
    "\n\n\n \t \n",
    "",
    " ",
    "a\u00a0b\u2003c\u200bd\u0000e",
    "1234567890 3.14159 1,000,000 0x1F 12:30",
    "مرحبا بالعالم שלום עולם नमस्ते 안녕하세요 ありがとう",
    "SELECT * FROM t WHERE x != 'y' -- z",
    "http://example.com/?q=a%20b&c=d#e _foo__bar_ $x^2$",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]


def random_texts(count: int, alphabet: str) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 60))) for _ in range(count)]


MIXED = "abcXYZ  \n\t.,!?'\"(){}[]<>|_-=+*/\\@#你好世界é😀ßñ한あ"
DIGITS = MIXED + "0123456789½²Ⅷ٣"


@pytest.fixture(scope="session")
def ours(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="session")
def theirs(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_ids_equal_transformers_on_the_same_file(ours: Tokenizer, theirs: Any) -> None:
    for text in SENTENCES + random_texts(200, MIXED):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids, skip_special=False) == theirs.decode(
            ids, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids, skip_special=False) == text


def test_digits_stand_alone_as_in_the_published_tokenizer(ours: Tokenizer, theirs: Any) -> None:
    """transformers reads no "smollm" split from a GGUF file; the model's tokenizer.json has one:
    each digit by itself before anything else, so a run of spaces before one stays whole."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    published = Backend.from_str(theirs.backend_tokenizer.to_str())
    published.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    for text in random_texts(100, DIGITS):
        assert ours.encode(text) == published.encode(text).ids, text
    assert [ours.token_text(i) for i in ours.encode("x   42")] == ["x", "   ", "4", "2"]


def test_facts_of_the_embedded_model(ours: Tokenizer, smollm2: Path) -> None:
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49_152, 1, (2,))
    assert (ours.eos_token, len(ours.special_ids)) == ("<|im_end|>", 17)
    template = load_chat_template(smollm2)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_metadata_equals_the_gguf_packages(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", model="gpt2", tokens=["a", "é"], merges=["a é"])
    fields = gguf.GGUFReader(file).fields
    ours = read_metadata(file)
    assert ours == {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert read_metadata(file, arrays=False)["tokenizer.ggml.tokens"] == []


# --- the two algorithms


def write_gguf(path: Path, **fields: Any) -> Path:
    """``tokenizer.ggml.*`` fields by their names; lists become arrays."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_bool("some.bool", True)
    writer.add_array("some.floats", [0.5, -1.5])
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_fields() -> dict[str, Any]:
    words = ["▁", "t", "h", "e", "▁t", "he", "▁the", "the", "re", "▁there", "r", "▁▁", "a", "an"]
    words += ["n", "d", "▁a", "▁an", "▁and", "nd", "é", "你", "<tool>"]
    control = ["<unk>", "<s>", "</s>"]
    tokens = control + [f"<0x{byte:02X}>" for byte in range(256)] + words
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(i) for i in range(len(words))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(words) - 1) + [4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


def test_sentencepiece_ids_equal_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file = write_gguf(tmp_path / "sp.gguf", **sentencepiece_fields())
    ours = load_tokenizer(file)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    texts = ["the and there", " the", "  the  and", "", "你好 é the", "a<tool>the", "</s>the", "\n"]
    for text in texts + random_texts(100, "thean dr  é你x😀"):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ids[:1] == [1]
        if "\ufffd" not in theirs.decode(ids):
            assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert ours.special_ids == {1, 2}


@pytest.mark.parametrize("space_prefix", [True, False])
def test_space_prefix_is_added_and_dropped_together(tmp_path: Path, space_prefix: bool) -> None:
    fields = sentencepiece_fields() | {"add_space_prefix": space_prefix, "add_bos_token": False}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "sp.gguf", **fields))
    ids = tokenizer.encode("the")
    assert [fields["tokens"][i] for i in ids] == (["▁the"] if space_prefix else ["the"])
    assert tokenizer.decode(ids) == "the"


def test_user_defined_runs_of_spaces_are_taken_first(tmp_path: Path) -> None:
    """As Gemma has them: the longest run counts, and it takes the space before the word."""
    fields = sentencepiece_fields() | {"add_space_prefix": False, "add_bos_token": False}
    for name, values in (
        ("tokens", ["  ", "    "]),
        ("scores", [-1e3] * 2),
        ("token_type", [4] * 2),
    ):
        fields[name] = fields[name] + values
    tokenizer = load_tokenizer(write_gguf(tmp_path / "sp.gguf", **fields))
    ids = tokenizer.encode("     the  the the")
    pieces = [fields["tokens"][i] for i in ids]
    assert pieces == ["    ", "▁the", "  ", "the", "▁the"]
    assert tokenizer.decode(ids) == "     the  the the"


def byte_level_fields(pre: str) -> dict[str, Any]:
    from octavo.text.tokenizer import _BYTE_OF

    tokens = [*sorted(_BYTE_OF, key=_BYTE_OF.__getitem__), "12", "123", "Ġ1", "<|end|>"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * 259 + [3],
        "merges": ["1 2", "12 3", "Ġ 1"],
        "eos_token_id": 259,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [" 1", "2", "3", "4"]),
        ("default", [" 1", "2", "3", "4"]),
        ("smollm", [" ", "1", "2", "3", "4"]),
        ("qwen2", [" ", "1", "2", "3", "4"]),
        ("llama-bpe", [" ", "123", "4"]),
    ],
)
def test_how_each_kind_splits_digits(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    fields = byte_level_fields(pre)
    if pre in ("gpt-2", "default"):
        fields["merges"] = ["Ġ 1", "1 2", "12 3"]
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", **fields))
    ids = tokenizer.encode(" 1234<|end|>")
    assert [tokenizer.token_text(i) for i in ids] == [*pieces, "<|end|>"]
    assert tokenizer.decode(ids) == " 1234"


def test_all_tokens_that_end_a_turn(tmp_path: Path) -> None:
    fields = byte_level_fields("gpt-2") | {"eot_token_id": 258}
    assert load_tokenizer(write_gguf(tmp_path / "x.gguf", **fields)).eos_ids == (259, 258)


# --- files that are not what they should be


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"pre": "martian"}, "'martian'.*llama-bpe.*tokenizer.json"),
        ({"model": "t5"}, "'t5'"),
        ({"merges": ["a b c"]}, "no usable tokenizer"),
        ({"merges": ["qq ww"]}, "no usable tokenizer"),
        ({"eos_token_id": 99_999}, "no usable tokenizer"),
        ({"tokens": 7}, "no usable tokenizer"),
    ],
)
def test_unusable_metadata_stops_the_start(
    tmp_path: Path, change: dict[str, Any], word: str
) -> None:
    file = write_gguf(tmp_path / "x.gguf", **(byte_level_fields("gpt-2") | change))
    with pytest.raises(StartupError, match=word):
        load_tokenizer(file)


@pytest.mark.parametrize("missing", ["model", "tokens", "merges"])
def test_missing_key_is_named(tmp_path: Path, missing: str) -> None:
    fields = byte_level_fields("gpt-2")
    del fields[missing]
    with pytest.raises(StartupError, match=f"tokenizer.ggml.{missing}"):
        load_tokenizer(write_gguf(tmp_path / "x.gguf", **fields))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "x.gguf", **byte_level_fields("gpt-2")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(64), *range(64, len(whole) - 32, 61)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(StartupError, match=r"cut\.gguf"):
            read_metadata(cut)


HEADER = b"GGUF" + struct.pack("<IQ", 3, 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n" + b"x" * 90,
        b"GGUF" + struct.pack(">I", 3) + b"\0" * 16,
        HEADER + struct.pack("<Q", 2**64 - 1),
        HEADER + struct.pack("<QQ", 1, 2**63),
        HEADER + struct.pack("<QQ1sI", 1, 1, b"k", 99) + b"\0" * 16,
        HEADER + struct.pack("<QQ1sIQ", 1, 1, b"k", 8, 2**64 - 8) + b"\0" * 16,
        HEADER + struct.pack("<QQ1sIIQ", 1, 1, b"k", 9, 8, 2**61) + b"\0" * 16,
        HEADER + struct.pack("<QQ1sIIQ", 1, 1, b"k", 9, 10, 2**61 + 1) + b"\0" * 16,
        HEADER + struct.pack("<QQ1sI", 1, 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 5000,
    ],
)
def test_hostile_lengths_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=r"bad\.gguf"):
        load_tokenizer(file)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_start_up_error_or_metadata(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x03" + b"\0" * 7 + data)
    with contextlib.suppress(StartupError):
        assert len(read_metadata(file)) <= 3


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"none\.gguf"):
        load_tokenizer(tmp_path / "none.gguf")
