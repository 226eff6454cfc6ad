"""A tokenizer whose ids can be read by eye: byte b is id b + 3, BOS is 1, EOS is 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
BYTE_OFFSET = 3
SPECIALS = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID}

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_ids(text: str | bytes) -> list[int]:
    """The ids of a text (UTF-8) or of bytes, without BOS."""
    data = text.encode() if isinstance(text, str) else text
    return [byte + BYTE_OFFSET for byte in data]


def write_byte_tokenizer(
    folder: Path,
    vocab_size: int = 512,
    chat_template: bool | str = True,
    add_bos: bool = True,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json of ``vocab_size`` >= 259 ids; returns folder.

    Ids from 259 on are plain tokens that no text encodes to; id 300 decodes to "<300>".
    ``chat_template`` False writes none, True :data:`CHAT_TEMPLATE`, a string itself.
    """
    if vocab_size < BYTE_OFFSET + 256:
        raise ValueError(f"vocab_size must be at least 259, not {vocab_size}")
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template:
        config["chat_template"] = CHAT_TEMPLATE if chat_template is True else chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json(vocab_size, add_bos)))
    return folder


def _tokenizer_json(vocab_size: int, add_bos: bool) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    vocab = dict(SPECIALS)
    vocab |= {_printable(byte): byte + BYTE_OFFSET for byte in range(256)}
    vocab |= {f"<{i}>": i for i in range(BYTE_OFFSET + 256, vocab_size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, i in SPECIALS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "post_processor": _bos_first() if add_bos else None,
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _printable(byte: int) -> str:
    """The character that stands for a byte in byte-level BPE vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in shown:
        return chr(byte)
    return chr(256 + sum(1 for other in range(byte) if other not in shown))


def _bos_first() -> dict[str, Any]:
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
    }
