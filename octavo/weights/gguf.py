"""GGUF tensors under their Hugging Face names, dequantised.

Types that need no table are unpacked here with torch, the rest by the ``gguf`` package, several
times slower; both give the same fp32 values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.weights.gguf_header import TYPES, GgufHeader, TensorInfo

# Just below the 32,768 elements from which torch uses several threads: thousands of thread
# barriers a second gain little on idle cores, and on busy ones cost ten times the work.
CHUNK_BLOCKS = 1000

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IGNORED = {"rope_freqs.weight"}  # part of the RopeSpec
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def hf_name(name: str, arch: str = "llama") -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; unknown: unchanged."""
    parts = _GEMMA3_NAMES if arch == "gemma3" else _LAYER_NAMES
    stem, _, suffix = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        layer, part = match.groups()
        if part in parts:
            return f"model.layers.{layer}.{parts[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}" if stem in _NAMES else name


class GgufSource:
    """The tensors of one GGUF file."""

    def __init__(self, header: GgufHeader, num_heads: int, num_kv_heads: int) -> None:
        self._header = header
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        arch = str(header.metadata.get("general.architecture"))
        if arch != "llama":
            self._heads = {}  # only Llama's rows are stored in interleaved order
        self._norm_offset = 1.0 if arch == "gemma3" else 0.0  # added to norms in the file
        self._infos = {
            hf_name(n, arch): (n, i) for n, i in header.tensors.items() if n not in _IGNORED
        }
        self.shapes = {name: info.shape for name, (_, info) in self._infos.items()}

    def file_of(self, name: str) -> Path:
        return self._header.path

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Quantised tensors in ``dtype`` (None: fp32), plain ones as they are, mapped."""
        size = self._header.path.stat().st_size
        data = torch.from_file(str(self._header.path), size=size, dtype=torch.uint8)
        for name, (own_name, info) in self._infos.items():
            raw = data[info.offset : info.offset + info.num_bytes]
            heads = self._heads.get(own_name.rpartition(".")[0].rpartition(".")[2])
            if heads is not None:
                raw = self._half_split(own_name, raw, info, heads)
            tensor = self._unpack(own_name, raw, info, dtype or torch.float32)
            if self._norm_offset and own_name.endswith("norm.weight"):
                tensor = tensor - self._norm_offset
            yield name, tensor

    def _half_split(self, name: str, raw: Tensor, info: TensorInfo, heads: int) -> Tensor:
        """Rows from interleaved rotary order (0, D/2, 1, D/2 + 1, …) back to 0, 1, 2, …

        Whole rows move, so they move packed (by numpy: one thread, as above).
        """
        rows = info.shape[0]
        if rows % (2 * heads):
            raise self._error(name, f"has {rows} rows, which {heads} heads do not divide in pairs")
        pairs = raw.numpy().reshape(heads, rows // heads // 2, 2, -1)
        return torch.from_numpy(pairs.swapaxes(1, 2).reshape(-1))

    def _unpack(self, name: str, raw: Tensor, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        plain = _PLAIN.get(info.type_name)
        if plain is not None:
            aligned = raw if raw.storage_offset() % plain.itemsize == 0 else raw.clone()
            return aligned.view(plain).view(info.shape)
        unpack = _UNPACKERS.get(info.type_name)
        if unpack is None:
            return self._unpack_slowly(name, raw, info).to(dtype)
        return _in_chunks(unpack, raw.view(-1, TYPES[info.type][2]), dtype).view(info.shape)

    def _unpack_slowly(self, name: str, raw: Tensor, info: TensorInfo) -> Tensor:
        try:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize
        except ImportError:
            raise self._error(name, f"is {info.type_name}: pip install gguf to read it") from None
        rows = raw.view(*info.shape[:-1], -1).numpy()
        try:
            values = dequantize(rows, GGMLQuantizationType(info.type))
        except NotImplementedError:
            raise self._error(name, f"has type {info.type_name}, which is not supported") from None
        return torch.from_numpy(values)

    def _error(self, name: str, complaint: str) -> StartupError:
        return StartupError(f"{self._header.path}: tensor {name} {complaint}.")


def _in_chunks(unpack: Callable[[Tensor], Tensor], blocks: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(blocks), 32, dtype=dtype)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = slice(start, start + CHUNK_BLOCKS)
        out[chunk] = unpack(blocks[chunk])
    return out


def _halves(blocks: Tensor, count: int) -> Tensor:
    """The ``count`` fp16 numbers that begin each block, as fp32 [n, count]."""
    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, 16] bytes: low nibbles, then high ones, fp32 [n, 32]."""
    out = torch.empty(len(packed), 2, 16)
    out[:, 0] = packed & 15
    out[:, 1] = packed >> 4
    return out.view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks, 1))


def _q4_1(blocks: Tensor) -> Tensor:
    ends = _halves(blocks, 2)  # scale, minimum
    return _nibbles(blocks[:, 4:]).mul_(ends[:, :1]).add_(ends[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 1))


_UNPACKERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
