"""TINY: checkpoints with random weights, small enough to write anew in every test.

Not flat: matrices keep the size of what flows through them, and logits spread by about 2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fakes.bytetok import write_byte_tokenizer

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
OWN_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
}
EMBEDDING_STD = 0.25


def tiny_config(
    family: str = "llama",
    *,
    layers: int = 2,
    vocab: int = 512,
    max_position: int = 512,
    tie: bool | None = None,
    dtype: str = "float32",
    **config: Any,
) -> dict[str, Any]:
    """A ``config.json``; further keywords are its keys. ``tie`` None: Qwen's and Gemma's are."""
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": family.startswith(("qwen", "gemma")) if tie is None else tie,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **OWN_KEYS.get(family, {}),
        **config,
    }


def make_tiny(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Write a checkpoint and its byte tokenizer to ``folder``; returns it.

    Keywords are those of :func:`tiny_config`. ``tensors`` replace the random ones.
    """
    from safetensors.torch import save_file

    values = tiny_config(family, **config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "_from_model_config": True})
    )
    weights = tiny_tensors(values, seed) if tensors is None else tensors
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder, vocab_size=values["vocab_size"], chat_template=True)
    return folder


def make_tiny_shards(folder: Path, family: str = "llama", count: int = 3, **config: Any) -> Path:
    """:func:`make_tiny`, its weights in ``count`` files with an index."""
    from safetensors.torch import load_file, save_file

    make_tiny(folder, family, **config)
    single = folder / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    where: dict[str, str] = {}
    for i in range(count):
        file_name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part = {name: tensors[name].clone() for name in names[i::count]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file_name))
    single.unlink()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def tiny_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint of ``config``."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    family = config["model_type"]
    biased = config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        matrices = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        for letter, shape in matrices.items():
            layer[f"self_attn.{letter}_proj.weight"] = shape
            if biased or (family == "qwen2" and letter != "o"):
                layer[f"self_attn.{letter}_proj.bias"] = shape[:1]
        if family == "gemma3_text":
            layer["pre_feedforward_layernorm.weight"] = (hidden,)
            layer["post_feedforward_layernorm.weight"] = (hidden,)
        if family in ("qwen3", "gemma3_text"):
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (
                config["head_dim"],
            )
        if config.get("mlp_bias", False):
            layer |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,)}
            layer["mlp.down_proj.bias"] = (hidden,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of ``config`` in its dtype, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    mean = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    return {
        name: _random(name, shape, generator, mean).to(dtype)
        for name, shape in tiny_shapes(config).items()
    }


def _random(
    name: str, shape: tuple[int, ...], generator: torch.Generator, norm_mean: float
) -> Tensor:
    draws = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return norm_mean + 0.1 * draws
    if name.endswith("bias"):
        return 0.2 * draws
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return EMBEDDING_STD * draws
    return draws / shape[1] ** 0.5


def make_tiny_gguf(
    path: Path, family: str = "llama", *, quant: str = "F32", seed: int = 0, **config: Any
) -> dict[str, Tensor]:
    """Write a GGUF file (no tokenizer) and return its fp32 tensors by Hugging Face name.

    ``quant`` is the type of the matrices, one that the ``gguf`` package can quantise; norms
    and biases are F32. The tensors returned are what dequantising gives.
    """
    import gguf

    values = tiny_config(family, **config)
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(family, family)
    offset = 1.0 if arch == "gemma3" else 0.0  # the format's, of norms
    parts = _GEMMA3_PARTS if arch == "gemma3" else _GGUF_PARTS
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_vocab_size(values["vocab_size"])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    writer.add_key_length(values["head_dim"])
    writer.add_value_length(values["head_dim"])
    writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    writer.add_rope_freq_base(values["rope_theta"])
    writer.add_bos_token_id(values["bos_token_id"])
    writer.add_eos_token_id(values["eos_token_id"])
    if arch == "gemma3":
        writer.add_sliding_window(values["sliding_window"])
    kind = gguf.GGMLQuantizationType[quant]
    expected: dict[str, Tensor] = {}
    for name, tensor in tiny_tensors(values, seed).items():
        data = _interleave(name, tensor, values) if arch == "llama" else tensor
        plain = gguf.GGMLQuantizationType.F32
        own = plain if tensor.dim() == 1 else kind
        added = offset if name.endswith("norm.weight") else 0.0
        packed = gguf.quants.quantize(data.float().numpy() + added, own)
        writer.add_tensor(_gguf_name(name, parts), packed, raw_dtype=own)
        restored = torch.from_numpy(gguf.quants.dequantize(packed, own).copy()) - added
        expected[name] = _deinterleave(name, restored, values) if arch == "llama" else restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_PARTS = {
    **_GGUF_PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _gguf_name(name: str, parts: dict[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{suffix}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{parts[part]}.{suffix}"


def _heads(name: str, config: dict[str, Any]) -> int:
    """Heads whose rows GGUF's Llama stores interleaved; 0 for other tensors."""
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def _interleave(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _heads(name, config)
    if not heads:
        return tensor
    halves = tensor.reshape(heads, 2, config["head_dim"] // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _deinterleave(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    heads = _heads(name, config)
    if not heads:
        return tensor
    pairs = tensor.reshape(heads, config["head_dim"] // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
