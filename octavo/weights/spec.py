"""Hugging Face ``config.json`` to ModelSpec: every naming quirk ends here. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec, ModelSpec
from octavo.weights.gemma import GEMMA3, gemma3_fields
from octavo.weights.layers import typed_layers
from octavo.weights.reader import Reader
from octavo.weights.rope import override_rope, rope_spec

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": GEMMA3,
}
_WITH_VISION = ("Gemma3ForConditionalGeneration", "gemma3")  # as architecture, as model_type
DTYPES = ("float32", "float16", "bfloat16")
MAX_LAYERS = 10_000
HEAD_DIMS = {"qwen3": 128, GEMMA3: 256}  # where a config does not say; the others divide
MISTRAL_WINDOW = 4096  # where a Mistral config does not say; null means none
QWEN_MAX_WINDOW_LAYERS = 28


def spec_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    file: str = "config.json",
) -> ModelSpec:
    """``overrides`` replace whole top-level keys of ``config``.

    Raises :class:`StartupError` naming the file and key: unsupported architecture or
    quantisation, a value that is missing, of a wrong type or out of range.
    """
    if overrides:
        config = {**override_rope(config, overrides), **overrides}
    reader = Reader(config, file)
    architecture, family = _family(reader)
    _refuse_quantised(reader)
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads",
            f"must divide the {num_heads} attention heads, not be {num_kv_heads}",
        )
    head_dim = _head_dim(reader, family, hidden_size, num_heads)
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    bos_id, eos_ids = _ends(reader, Reader(generation_config or {}, "generation_config.json"))
    biased = family in ("llama", "qwen3", GEMMA3) and reader.boolean("attention_bias", False)
    return ModelSpec(
        family=family,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=reader.integer("vocab_size"),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        tie_embeddings=reader.boolean("tie_word_embeddings", family == GEMMA3),
        qkv_bias=family == "qwen2" or biased,
        o_bias=biased,
        mlp_bias=family == "llama" and reader.boolean("mlp_bias", False),
        dtype=_dtype(reader, family),
        bos_id=bos_id,
        eos_ids=eos_ids,
        **(
            gemma3_fields(reader, head_dim, num_layers)
            if family == GEMMA3
            else _llama_fields(reader, family, head_dim, num_layers)
        ),
    )


def _llama_fields(config: Reader, family: str, head_dim: int, count: int) -> dict[str, Any]:
    """What the families other than Gemma say in the same words."""
    trained = config.integer("max_position_embeddings")
    rope, max_position = rope_spec(config, head_dim, trained)
    return {
        "rope": rope,
        "max_position": max_position,
        "layers": _layers(config, family, count, max_position),
        "activation": _activation(config),
        "qk_norm": family == "qwen3",
    }


def _family(config: Reader) -> tuple[str, str]:
    """(architecture, family). Without ``architectures``, ``model_type`` decides."""
    names = config.texts("architectures", [])
    if not names:
        by_type = {family: name for name, family in FAMILIES.items()}
        model_type = config.text("model_type")
        names = [by_type.get(model_type, model_type)]
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
        if name in _WITH_VISION:
            raise StartupError(
                f"{config.file}: {name} has a vision tower, which is not supported; serve its "
                "text part as a GGUF file or as Gemma3ForCausalLM."
            )
    raise StartupError(
        f"{config.file}: {', '.join(names)} is not supported; "
        f"supported architectures are {', '.join(FAMILIES)}."
    )


def _refuse_quantised(config: Reader) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            method = config.section(key).text("quant_method", "unnamed")
            raise config.error(key, f"asks for {method!r}, a quantisation that is not supported")


def _head_dim(config: Reader, family: str, hidden_size: int, num_heads: int) -> int:
    default = HEAD_DIMS.get(family)
    if default is None and not config.has("head_dim"):
        if hidden_size % num_heads:
            raise config.error(
                "hidden_size", f"must be a multiple of the {num_heads} heads, not {hidden_size}"
            )
        default = hidden_size // num_heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even for rotary embeddings, not {head_dim}")
    return head_dim


def _layers(config: Reader, family: str, count: int, max_position: int) -> tuple[LayerSpec, ...]:
    """A window of at least the whole context is full attention by another name."""
    full = LayerSpec()
    window = _window(config, family)
    sliding = LayerSpec("sliding", window=window) if 0 < window < max_position else full
    if family == "llama":
        return (full,) * count
    if config.has("layer_types"):
        return typed_layers(config, count, {"full_attention": full, "sliding_attention": sliding})
    if family == "mistral":
        return (sliding,) * count
    first = min(config.integer("max_window_layers", QWEN_MAX_WINDOW_LAYERS, low=0), count)
    return (full,) * first + (sliding,) * (count - first)


def _window(config: Reader, family: str) -> int:
    """Tokens visible to a sliding layer, itself included; 0 = all."""
    if family in ("qwen2", "qwen3") and not config.boolean("use_sliding_window", False):
        return 0
    if family == "mistral" and "sliding_window" not in config.values:
        return MISTRAL_WINDOW
    return config.optional_integer("sliding_window") or 0


def _activation(config: Reader) -> str:
    name = config.text("hidden_act", "silu")
    if name not in ("silu", "swish"):
        raise config.error("hidden_act", f"must be 'silu', not {name!r}")
    return "silu"


def _dtype(config: Reader, family: str) -> str:
    """A Gemma stored as float16 is computed in bfloat16: hidden states overflow."""
    key = "dtype" if config.has("dtype") else "torch_dtype"
    name = config.text(key, "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise config.error(key, f"must be one of {', '.join(DTYPES)}, not {name!r}")
    return "bfloat16" if family == GEMMA3 and name == "float16" else name


def _ends(config: Reader, generation: Reader) -> tuple[int | None, tuple[int, ...]]:
    """(BOS, all ids that end a text): both files count, the config's first."""
    bos = config.ids("bos_token_id") or generation.ids("bos_token_id")
    eos = dict.fromkeys([*config.ids("eos_token_id"), *generation.ids("eos_token_id")])
    return (bos[0] if bos else None), tuple(eos)
