"""GGUF header: metadata, the table of tensors, and the same model as a Hugging Face config.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Torch-free, and without the
``gguf`` package, whose reader takes seconds on a large vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import StartupError
from octavo.text.gguf_metadata import Cursor
from octavo.weights.reader import Reader

_U32, _U64 = 4, 10  # GGUF value types
_MAX_DIMS = 4
_MIN_TENSOR_ENTRY = 8 + 4 + 4 + 8  # bytes of an entry with no name and no dimension

# ggml type: (name, elements per block, bytes per block).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

_GEMMA3_27B_LAYERS = 62

# Llama 3.1's rope scaling reaches GGUF only as a table of divisors; these are its constants.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` row-major (the last axis is contiguous); ``offset`` from the file's start."""

    shape: tuple[int, ...]
    type: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TYPES[self.type][0]


@dataclass(frozen=True)
class GgufHeader:
    """``metadata`` without the content of arrays (vocabulary and merges)."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def total_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def read_header(path: Path) -> GgufHeader:
    """Raises :class:`StartupError` naming the file, and the tensor that lies outside it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:
        raise StartupError(f"Cannot read {path} as a GGUF file: {error}.") from None


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = Cursor(data, arrays=False)
    metadata = cursor.metadata()
    (count,) = struct.unpack_from("<Q", data, 8)
    cursor.need(count, _MIN_TENSOR_ENTRY, "tensors")
    entries = [_tensor_entry(cursor) for _ in range(count)]
    alignment = Reader(metadata, str(path)).integer("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"tensor {name} is there twice")
        info = TensorInfo(shape, kind, start + offset, _num_bytes(name, shape, kind))
        end = info.offset + info.num_bytes
        if end > len(data):
            raise ValueError(
                f"tensor {name} ends at byte {end}, but the file has {len(data)} bytes"
            )
        tensors[name] = info
    if Reader(metadata, str(path)).integer("split.count", 1, low=0) > 1:
        raise ValueError("it is one part of several; join them with gguf-split --merge")
    return GgufHeader(path, metadata, tensors)


def _tensor_entry(cursor: Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type, offset in the data section)."""
    name = cursor.string()
    num_dims = cursor.scalar(_U32)
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions; at most {_MAX_DIMS} exist")
    shape = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
    if 0 in shape:
        raise ValueError(f"tensor {name} has the empty shape {list(shape)}")
    return name, shape, cursor.scalar(_U32), cursor.scalar(_U64)


def _num_bytes(name: str, shape: Sequence[int], kind: int) -> int:
    if kind not in TYPES:
        raise ValueError(f"tensor {name} has the unknown type {kind}")
    type_name, per_block, block_bytes = TYPES[kind]
    if math.prod(shape) % per_block or (shape and shape[-1] % per_block):
        raise ValueError(
            f"tensor {name} has rows of {shape[-1]}, not a multiple of {type_name}'s {per_block}"
        )
    return math.prod(shape) // per_block * block_bytes


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """The ``config.json`` that this file's model would have.

    Raises :class:`StartupError` naming the metadata key.
    """
    meta = Reader(header.metadata, str(header.path))
    arch = meta.text("general.architecture")
    if arch not in ARCHITECTURES or meta.integer(f"{arch}.expert_count", 0, low=0):
        name = f"{arch} with experts" if arch in ARCHITECTURES else arch
        raise StartupError(
            f"{header.path}: architecture {name} is not supported; "
            f"supported GGUF architectures are {', '.join(ARCHITECTURES)}."
        )
    num_heads = meta.integer(f"{arch}.attention.head_count")
    hidden_size = meta.integer(f"{arch}.embedding_length")
    head_dim = meta.integer(f"{arch}.attention.key_length", max(1, hidden_size // num_heads))
    rope = _rope(header, meta, arch, head_dim)
    biased = "blk.0.attn_q.bias" in header.tensors
    return {
        "architectures": [ARCHITECTURES[arch]],
        "num_hidden_layers": meta.integer(f"{arch}.block_count"),
        "hidden_size": hidden_size,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": biased and arch != "qwen2",
        "dtype": _dtype(header),
        "bos_token_id": meta.optional_integer("tokenizer.ggml.bos_token_id", low=0),
        "eos_token_id": _eos_ids(meta),
        **(_gemma3(meta, rope) if arch == "gemma3" else _window(meta, arch)),
    }


def _vocab_size(header: GgufHeader) -> int:
    info = header.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise StartupError(f"{header.path}: tensor token_embd.weight is missing.")
    return info.shape[0]


def _eos_ids(meta: Reader) -> list[int]:
    """The ids that end a text (eos), a turn (eot) or a message (eom)."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    found = (meta.optional_integer(key, low=0) for key in keys)
    return list(dict.fromkeys(token for token in found if token is not None))


def _window(meta: Reader, arch: str) -> dict[str, Any]:
    window = meta.integer(f"{arch}.attention.sliding_window", 0, low=0)
    if not window:
        return {}
    if arch == "llama":
        raise meta.error(f"{arch}.attention.sliding_window", "is not supported")
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}


def _gemma3(meta: Reader, rope: dict[str, Any]) -> dict[str, Any]:
    """The keys in which Gemma 3 differs. Files say neither the local RoPE base (newer ones do) nor
    the query scalar: it is the head size, but for 27B."""
    config = {
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": meta.number("gemma3.rope.freq_base_swa", 10_000.0),
            },
        },
        "sliding_window": meta.integer("gemma3.attention.sliding_window"),
        "query_pre_attn_scalar": meta.integer("gemma3.attention.key_length"),
        "final_logit_softcapping": meta.values.get("gemma3.final_logit_softcapping"),
        "attn_logit_softcapping": meta.values.get("gemma3.attn_logit_softcapping"),
    }
    if meta.integer("gemma3.block_count") == _GEMMA3_27B_LAYERS:
        hidden_size = meta.integer("gemma3.embedding_length")
        config["query_pre_attn_scalar"] = hidden_size // meta.integer("gemma3.attention.head_count")
    return config


def _dtype(header: GgufHeader) -> str:
    """The plain type of the embedding, or bfloat16 for quantised blocks."""
    plain = {"F32": "float32", "F16": "float16"}
    matrix = header.tensors.get("blk.0.attn_q.weight", header.tensors["token_embd.weight"])
    return plain.get(matrix.type_name, "bfloat16")


def _rope(header: GgufHeader, meta: Reader, arch: str, head_dim: int) -> dict[str, Any]:
    prefix = f"{arch}.rope."
    rotated = meta.integer(prefix + "dimension_count", head_dim)
    if rotated != head_dim:
        raise meta.error(
            prefix + "dimension_count", f"must be the head size {head_dim}, not {rotated}"
        )
    theta = meta.number(prefix + "freq_base", 10_000.0)
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(header, theta, head_dim)
    kind = meta.text(prefix + "scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = meta.number(prefix + "scaling.factor")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = meta.integer(
            prefix + "scaling.original_context_length"
        )
        rope["beta_fast"] = meta.number(prefix + "scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = meta.number(prefix + "scaling.yarn_beta_slow", 1.0)
        if meta.has(prefix + "scaling.attn_factor"):  # on top of yarn's own
            own = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            rope["attention_factor"] = own * meta.number(prefix + "scaling.attn_factor")
    return rope


def _llama3_rope(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Recognise ``rope_freqs.weight``, the divisor of each frequency, as llama3 scaling."""
    info = header.tensors["rope_freqs.weight"]
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise StartupError(f"{header.path}: rope_freqs.weight must be F32 [{head_dim // 2}].")
    with header.path.open("rb") as file:
        file.seek(info.offset)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(info.num_bytes))
    factor = max(divisors)
    expected = llama3_divisors(theta, head_dim, factor)
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(divisors, expected, strict=True)):
        raise StartupError(
            f"{header.path}: rope_freqs.weight is not Llama 3.1's; no other scaling is supported."
        )
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}


def llama3_divisors(theta: float, head_dim: int, factor: float) -> list[float]:
    """What Llama 3.1 divides each of the head_dim / 2 frequencies by."""
    low, high, trained = _LLAMA3.values()
    divisors = []
    for i in range(head_dim // 2):
        turns = trained / (2 * math.pi * theta ** (2 * i / head_dim))
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors
