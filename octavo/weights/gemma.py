"""What a Gemma 3 config says in its own words: the fields of its ModelSpec that others lack."""

from __future__ import annotations

from typing import Any

from octavo.core.spec import LayerSpec, RopeSpec
from octavo.weights.layers import typed_layers
from octavo.weights.reader import Reader
from octavo.weights.rope import rope_of

GEMMA3 = "gemma3_text"

# What no key means (transformers' Gemma3TextConfig; Gemma 3 report, arXiv 2503.19786).
WINDOW = 4096
SLIDING_TO_EACH_FULL = 6  # the last of each six layers is full
QUERY_SCALAR = 256
GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
ACTIVATION = "gelu_pytorch_tanh"

_REFUSED = (
    ("final_logit_softcapping", "of logits is not supported"),
    ("attn_logit_softcapping", "of attention is not supported"),
    ("use_bidirectional_attention", "is not supported"),
)


def gemma3_fields(config: Reader, head_dim: int, count: int) -> dict[str, Any]:
    """Spec fields of a text-only Gemma 3 of ``count`` layers.

    Linear scaling of the global RoPE is part of ``max_position_embeddings`` already; the local one
    is never scaled.
    """
    for key, complaint in _REFUSED:
        if config.values.get(key):
            raise config.error(key, complaint)
    activation = config.text("hidden_activation", config.text("hidden_act", ACTIVATION))
    if activation != ACTIVATION:
        raise config.error("hidden_activation", f"must be {ACTIVATION!r}, not {activation!r}")
    rope, local_rope = _ropes(config, head_dim)
    return {
        "rope": rope,
        "local_rope": local_rope,
        "max_position": config.integer("max_position_embeddings"),
        "layers": _layers(config, count),
        "activation": "gelu_tanh",
        "qk_norm": True,
        "norm_offset": 1.0,
        "output_norms": True,
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        "attention_scale": config.number("query_pre_attn_scalar", QUERY_SCALAR) ** -0.5,
    }


def _layers(config: Reader, count: int) -> tuple[LayerSpec, ...]:
    """Sliding layers stay so whatever the window: their RoPE is another one."""
    sliding = LayerSpec("sliding", window=config.integer("sliding_window", WINDOW))
    kinds = {"sliding_attention": sliding, "full_attention": LayerSpec()}
    if config.has("layer_types"):
        return typed_layers(config, count, kinds)
    every = config.integer("sliding_window_pattern", SLIDING_TO_EACH_FULL)
    return tuple(LayerSpec() if (i + 1) % every == 0 else sliding for i in range(count))


def _ropes(config: Reader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """(full layers', sliding layers'): by layer type, or rope_theta, rope_scaling and
    rope_local_base_freq in the older spelling."""
    by_type = config.section("rope_parameters")
    full, sliding = by_type.section("full_attention"), by_type.section("sliding_attention")
    if config.has("rope_scaling"):
        full = config.section("rope_scaling")
    # An override of rope_theta lies beside the two sections.
    theta = full.number("rope_theta", config.number("rope_theta", GLOBAL_THETA))
    theta = by_type.number("rope_theta", theta)
    local = sliding.number("rope_theta", config.number("rope_local_base_freq", LOCAL_THETA))
    trained = config.integer("max_position_embeddings")
    return rope_of(full, head_dim, theta, trained), rope_of(sliding, head_dim, local, trained)
