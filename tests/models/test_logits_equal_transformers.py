"""Logits through paged, chunked, mixed steps equal transformers' on the same random weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from tests.fakes.paged import Row, model_kv, paged_batch, paged_logits
from tests.fakes.tiny_models import random_tensor, tiny_model, tiny_spec

CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3_text": Gemma3TextConfig,
}
# The first prompt is still being chunked while the others decode one token a step.
CHUNKS = ([7, 13, 1, 17, 5, 1, 1], [5, *[1] * 6], [33, 1, 1, 3])
PROMPTS = [
    torch.randint(131, (sum(sizes),), generator=torch.Generator().manual_seed(i)).tolist()
    for i, sizes in enumerate(CHUNKS)
]
ROPES = {
    "linear": RopeSpec(10_000.0, 16, "linear", factor=4.0),
    "yarn": RopeSpec(10_000.0, 16, "yarn", factor=4.0, original_max_position=16),
    "llama3": RopeSpec(500_000.0, 16, "llama3", factor=8.0, original_max_position=32),
}


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    config: dict[str, Any]  # what transformers needs beside the common numbers


def sliding(*windows: int) -> tuple[LayerSpec, ...]:
    return tuple(LayerSpec("sliding" if window else "full", window=window) for window in windows)


def case(family: str, changes: dict[str, Any] | None = None, **config: Any) -> Case:
    return Case(tiny_spec(family, **changes or {}), config)


QWEN_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"],
}


def gemma(window: int, **changes: Any) -> Case:
    """Four groups of one layer, as the one full layer has them."""
    layers = sliding(window, window, window, 0)
    return case(
        "gemma3_text",
        {"num_layers": 4, "layers": layers, **changes},
        sliding_window=window,
        layer_types=[f"{layer.mixer}_attention" for layer in layers],
        query_pre_attn_scalar=20,
    )


CASES = {
    "llama": case("llama"),
    "llama-tied": case("llama", {"tie_embeddings": True}),
    "llama-biases": case(
        "llama",
        {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama-one-kv-head": case("llama", {"num_kv_heads": 1}),
    "llama-no-sharing": case("llama", {"num_kv_heads": 4, "num_heads": 4}),
    "mistral": case("mistral", sliding_window=None),
    "mistral-window": case("mistral", {"layers": sliding(9, 9)}, sliding_window=9),
    "mistral-window-a-page": case("mistral", {"layers": sliding(16, 16)}, sliding_window=16),
    "qwen2": case("qwen2"),
    "qwen2-window": case("qwen2", {"layers": sliding(0, 9)}, **QWEN_WINDOW),
    "qwen3": case("qwen3", {"head_dim": 32, "rope": RopeSpec(1e6, 32)}),
    "qwen3-window": case("qwen3", {"layers": sliding(0, 9)}, **QWEN_WINDOW),
    "gemma3-window-8": gemma(8),
    "gemma3-window-24": gemma(24, tie_embeddings=True, num_kv_heads=1),
    "gemma3-linear": gemma(16, rope=RopeSpec(1e6, 16, "linear", factor=8.0)),
    **{kind: case("llama", {"rope": rope}) for kind, rope in ROPES.items()},
}


def rope_parameters(rope: RopeSpec) -> dict[str, Any]:
    given: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        given["factor"] = rope.factor
    if rope.kind in ("yarn", "llama3"):
        given["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        given |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": 4.0}
    return given


def ropes_by_layer(spec: ModelSpec) -> dict[str, Any]:
    if spec.local_rope is None:
        return rope_parameters(spec.rope)
    return {
        "full_attention": rope_parameters(spec.rope),
        "sliding_attention": rope_parameters(spec.local_rope),
    }


def transformers_logits(
    spec: ModelSpec, prompts: list[list[int]], *, max_position: int = 512, **config: Any
) -> list[Tensor]:
    """Each prompt alone, in one eager pass, on the weights of :func:`tiny_model`."""
    made = CONFIGS[spec.family](
        num_hidden_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=max_position,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tie_embeddings,
        rope_parameters=ropes_by_layer(spec),
        **config,
    )
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    model.load_state_dict(
        {name: random_tensor(name, tuple(old.shape)) for name, old in model.state_dict().items()}
    )
    model.tie_weights()
    if spec.tie_embeddings:
        name = "model.embed_tokens.weight"
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(random_tensor(name, (spec.vocab_size, 48)))
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    assert all(part.abs().max() > 1 for part in expected)
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_of_chunked_mixed_steps(name: str) -> None:
    spec, config = CASES[name].spec, CASES[name].config
    found = paged_logits(tiny_model(spec), spec, PROMPTS, CHUNKS)
    assert found[0].dtype == torch.float32
    assert largest_error(found, transformers_logits(spec, PROMPTS, **config)) <= 1e-4


@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3-window-24"])
def test_page_sizes_and_places_do_not_matter(name: str, page_size: int) -> None:
    spec = CASES[name].spec
    model = tiny_model(spec)
    whole = [[len(prompt)] for prompt in PROMPTS]
    expected = paged_logits(model, spec, PROMPTS, whole, page_size=16)
    found = paged_logits(model, spec, PROMPTS, CHUNKS, page_size=page_size, seed=page_size)
    assert largest_error(found, expected) <= 1e-4


def test_dynamic_rope_equals_transformers_at_the_served_length() -> None:
    prompts, chunks = [PROMPTS[0]], [CHUNKS[0]]
    served, trained = len(PROMPTS[0]), 20
    rope = RopeSpec(10_000.0, 16, "dynamic", factor=3.0, original_max_position=trained)
    spec = tiny_spec("llama", rope=rope)
    found = paged_logits(tiny_model(spec, max_position=served), spec, prompts, chunks)
    expected = transformers_logits(spec, prompts, max_position=trained)
    assert largest_error(found, expected) <= 1e-4
    untouched = tiny_model(replace(spec, rope=RopeSpec(10_000.0, 16)), max_position=served)
    assert largest_error(paged_logits(untouched, spec, prompts, chunks), expected) > 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3-window-8"])
def test_a_prefix_hit_reads_the_pages_that_another_request_wrote(name: str) -> None:
    spec, config = CASES[name].spec, CASES[name].config
    first = PROMPTS[0]  # 45 tokens: two full pages that the second shares
    second = first[:32] + PROMPTS[2][:9]
    model, kv = tiny_model(spec), model_kv(spec, num_pages=6, page_size=16)
    steps = [[Row(first, 0, [5, 2, 3])], [Row(second[32:], 32, [5, 2, 4])]]
    for rows in steps:
        hidden = model.forward(paged_batch(rows, spec, kv, page_size=16))
    expected = transformers_logits(spec, [second], **config)[0][32:]
    assert largest_error([model.logits(hidden)], [expected]) <= 1e-4
