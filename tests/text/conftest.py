from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.bytetok import write_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def pieces_tokenizer() -> Tokenizer:
    """SentencePiece-like: "▁" for spaces, byte fallback, a first space that decoding drops."""
    words = ["▁", "a", "b", "▁a", "ab", "▁▁", "é", "▁你", "好", "▁\n", "😀"]
    return Tokenizer(pieces_backend(words), bos_token="<s>", eos_tokens=["</s>"])


def pieces_backend(words: Sequence[str]) -> Any:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend
