"""A tokenizer from GGUF metadata: vocabulary and merges in, a ``tokenizers`` pipeline out.

GGUF stores no pipeline, only names: ``tokenizer.ggml.model`` (the algorithm) and
``tokenizer.ggml.pre`` (how text is split before merging). What the names stand for is taken from
the published tokenizer.json of the model families. An unknown name stops the start: a wrong
split gives a model that answers, only worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import StartupError
from octavo.text.gguf_metadata import read_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_PLAIN = ("default", "gpt-2", "phi-2")  # byte level with GPT-2's own split
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "codeshell")
_WHOLE_WORDS_FIRST = (_LLAMA3, _TEKKEN)  # a piece that is a token is not taken apart
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # NFC


def read_gguf_tokenizer(path: Path) -> tuple[Backend, dict[str, Any]]:
    """The pipeline and a configuration with tokenizer_config.json's keys.

    The latter holds ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` (texts),
    ``eos_tokens`` (all that end a turn), ``add_bos_token`` and ``add_eos_token``.
    """
    metadata = read_metadata(path)
    prefix = "tokenizer.ggml."
    fields = {key[len(prefix) :]: v for key, v in metadata.items() if key.startswith(prefix)}
    try:
        model = fields["model"]
        if model == "gpt2":
            backend = _byte_level(fields)
        elif model == "llama":
            backend = _sentencepiece(fields)
        else:
            raise StartupError(
                f"{path}: tokenizer.ggml.model is {model!r}; 'gpt2' and 'llama' are supported."
            )
        _add_tokens(backend, fields)
        return backend, _config(fields)
    except StartupError:
        raise
    except KeyError as error:
        raise StartupError(f"{path} has no metadata key {prefix}{error.args[0]}.") from None
    except Exception as error:  # tokenizers raises plain Exception
        raise StartupError(f"{path} holds no usable tokenizer: {error}") from None


def special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, unk_token and pad_token, as far as the file names their ids."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokens"]
    ends = (fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    return {
        **special_texts({f"tokenizer.ggml.{key}": value for key, value in fields.items()}),
        "eos_tokens": [tokens[i] for i in ends if i is not None],
        # A SentencePiece model that does not say gets one: the convention of the format.
        "add_bos_token": fields.get("add_bos_token", fields["model"] == "llama"),
        "add_eos_token": fields.get("add_eos_token", False),
    }


def _byte_level(fields: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = fields.get("pre", "default")
    vocab = {token: i for i, token in enumerate(fields["tokens"])}
    merges = [_pair(merge) for merge in fields["merges"]]
    whole_words = _SPLITS.get(pre) in _WHOLE_WORDS_FIRST
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre in _NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _pre_tokenizer(name: str) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name in _PLAIN:
        return ByteLevel(add_prefix_space=False)
    if name in _SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in _SPLITS:
        split = Split(Regex(_SPLITS[name]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted({*_PLAIN, *_SINGLE_DIGITS, *_SPLITS}))
    raise StartupError(
        f"tokenizer.ggml.pre is {name!r}, which Octavo does not know (it knows {known}); "
        "serve the model's folder with its tokenizer.json instead."
    )


def _sentencepiece(fields: Mapping[str, Any]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = fields.get("unknown_token_id")
    if unknown is None and _UNKNOWN in fields.get("token_type", ()):
        unknown = fields["token_type"].index(_UNKNOWN)
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(tokens, fields["scores"], vocab),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix_space = fields.get("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if prefix_space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(
    tokens: Sequence[str], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges whatever gives the piece with the best score; BPE wants a list.

    Every way to cut a piece into two pieces is a merge; better scores come first, and
    among cuts of equal score the one with the longer left half.
    """
    if len(scores) != len(tokens):
        raise ValueError(f"it has {len(scores)} scores for {len(tokens)} tokens")
    found = [
        (-score, -cut, cut - len(token), token)
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(token[:-cut], token[-cut:]) for _, cut, _, token in found]


def _add_tokens(backend: Backend, fields: Mapping[str, Any]) -> None:
    """Control tokens become special ones; user-defined ones are only never cut.

    One that the model cannot spell (a duplicate text) would get a new id, so it is left out.
    """
    from tokenizers import AddedToken

    tokens, kinds = fields["tokens"], fields.get("token_type") or ()
    known = backend.get_vocab(with_added_tokens=False)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind == wanted and token in known
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
