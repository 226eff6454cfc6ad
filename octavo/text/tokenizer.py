"""Text to ids and back, over the ``tokenizers`` library.

Decoding is defined on bytes: each id stands for a byte string, a text is the UTF-8 decoding
of their concatenation with U+FFFD for what is not UTF-8. So that a stream of ids can be
decoded piece by piece with the same result as at once (:mod:`octavo.text.stream`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import InvalidRequest, StartupError
from octavo.text.gguf_tokenizer import read_gguf_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Ids of one vocabulary. Ids in [0, vocab_size) without a token decode to nothing."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token: str | None = None,
        eos_tokens: Sequence[str] = (),
    ) -> None:
        """``eos_tokens``: all that may end a turn, the main one first."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id = None if bos_token is None else vocab.get(bos_token)
        self.bos_token = None if self.bos_id is None else bos_token
        self.eos_token = eos_tokens[0] if eos_tokens else None
        self.eos_ids = tuple(dict.fromkeys(vocab[t] for t in eos_tokens if t in vocab))
        rules = _decoding_rules(backend)
        self.strips_first_space = rules.strips_first_space
        self._bytes = [b""] * self.vocab_size
        # Special tokens are text, added ones are outside the byte-level spelling.
        as_text = set(added) if rules.byte_level else self.special_ids
        for token, i in vocab.items():
            self._bytes[i] = token.encode() if i in as_text else rules.token_bytes(token)
        self.max_token_chars = max(
            (len(b.decode("utf-8", "replace")) for b in self._bytes), default=0
        )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text; ``add_special`` adds BOS (EOS) where the model wants them.

        A text that begins with the BOS token itself does not get a second one.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("The text holds a lone surrogate, which is not Unicode.") from None
        if add_special and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ids; U+FFFD stands for bytes that are no UTF-8, as at a cut character."""
        skipped = self.special_ids if skip_special else ()
        text = b"".join([self.token_bytes(i) for i in ids if i not in skipped]).decode(
            "utf-8", "replace"
        )
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token (of a special one: its text); none for an id without token."""
        return self._bytes[id] if id < self.vocab_size else b""

    def token_text(self, id: int) -> str:
        """One token as text, for log-probabilities: a part of a character is U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def whole_texts(self, *, skip_special: bool) -> list[str | None]:
        """By id, the token's text where its bytes are whole characters, else None."""
        return self._hidden_special_texts if skip_special else self._texts

    @cached_property
    def _texts(self) -> list[str | None]:
        return [_whole_text(data) for data in self._bytes]

    @cached_property
    def _hidden_special_texts(self) -> list[str | None]:
        texts = list(self._texts)
        for i in self.special_ids:
            texts[i] = ""
        return texts


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _Rules:
    """How a vocabulary's spelling becomes bytes, read off the pipeline's decoder."""

    def __init__(self, steps: Iterable[Mapping[str, Any]]) -> None:
        self.byte_level = False
        self.byte_fallback = False
        self.space = ""  # the character that stands for a space
        self.strips_first_space = False
        for step in steps:
            self._read(step)

    def _read(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Replace" and step["content"] == " " and "String" in step["pattern"]:
            self.space = step["pattern"]["String"]
        elif kind == "Metaspace":
            self.space = step["replacement"]
            self.strips_first_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and not step["stop"]:
            self.strips_first_space = step["start"] > 0
        elif kind != "Fuse":
            raise StartupError(
                f"The tokenizer decodes with {kind!r} ({dict(step)}); byte-level BPE and "
                "SentencePiece (Replace, Metaspace, ByteFallback, Fuse, Strip) are supported."
            )

    def token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:  # not in the byte alphabet: the text itself
                return token.encode()
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return (token.replace(self.space, " ") if self.space else token).encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in shown)
    return {chr(byte): byte for byte in shown} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _decoding_rules(backend: Backend) -> _Rules:
    if backend.decoder is None:
        raise StartupError("The tokenizer has no decoder, so ids cannot become text.")
    state = json.loads(backend.decoder.__getstate__())
    return _Rules(state["decoders"] if state["type"] == "Sequence" else [state])


def load_tokenizer(source: Path) -> Tokenizer:
    """From a folder with tokenizer.json (tokenizer_config.json beside it) or a GGUF file.

    Raises :class:`StartupError` with what to do when there is none to use.
    """
    source = Path(source)
    if source.is_dir():
        backend, config = _read_folder(source)
    else:
        backend, config = read_gguf_tokenizer(source)
    eos_tokens = config.get("eos_tokens") or [config.get("eos_token")]
    _set_post_processor(backend, config)
    return Tokenizer(
        backend,
        bos_token=config.get("bos_token"),
        eos_tokens=[token for token in eos_tokens if token],
    )


def _read_folder(folder: Path) -> tuple[Backend, dict[str, Any]]:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise StartupError(_no_tokenizer(folder))
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise StartupError(f"Cannot read {file}: {error}") from None
    return backend, read_tokenizer_config(folder)


def _no_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file():
        return (
            f"{folder} has a SentencePiece tokenizer.model but no tokenizer.json; convert it once: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r}) "
            "with the transformers and sentencepiece packages."
        )
    return f"{folder} has no tokenizer.json; download it with the model, or serve a GGUF file."


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, special tokens as plain strings."""
    config = {**_read_json(folder / "special_tokens_map.json")}
    config |= _read_json(folder / "tokenizer_config.json")
    for name in SPECIAL_NAMES:
        value = config.get(name)
        config[name] = value["content"] if isinstance(value, dict) else value
    return config


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise StartupError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartupError(f"{file} must hold a JSON object.")
    return value


def _set_post_processor(backend: Backend, config: Mapping[str, Any]) -> None:
    """An explicit add_bos_token or add_eos_token wins over the pipeline's own rule."""
    from tokenizers.processors import TemplateProcessing

    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    around = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        id = backend.token_to_id(token) if token and config.get(f"add_{name}") else None
        around[name] = (token, id) if id is not None else None
    bos, eos = around["bos_token"], around["eos_token"]
    single = [bos[0]] if bos else []
    single += ["$A"]
    single += [eos[0]] if eos else []
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=[entry for entry in (bos, eos) if entry]
    )
