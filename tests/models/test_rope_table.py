"""The table equals transformers' at the ends of a long context, for every kind of scaling."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.core.spec import RopeSpec
from octavo.models.rope import rope_table

SERVED = 131_072
TRAINED = 32_768
POSITIONS = torch.tensor([0, 32_767, 131_071])
NAMES = {"original_max_position": "original_max_position_embeddings"}

CASES: list[RopeSpec] = [
    RopeSpec(10_000.0, 128),
    RopeSpec(1_000_000.0, 64),
    RopeSpec(10_000.0, 128, "linear", factor=4.0),
    RopeSpec(10_000.0, 128, "dynamic", factor=4.0, original_max_position=TRAINED),
    RopeSpec(1_000_000.0, 128, "yarn", factor=4.0, original_max_position=TRAINED),
    RopeSpec(10_000.0, 64, "yarn", factor=32.0, original_max_position=4096, truncate=False),
    RopeSpec(10_000.0, 64, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=0.707),
    RopeSpec(150_000.0, 64, "yarn", 4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7),
    RopeSpec(500_000.0, 128, "llama3", factor=8.0, original_max_position=8192),
    RopeSpec(500_000.0, 64, "llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
]
READ = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_position",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
}


def transformers_config(rope: RopeSpec) -> LlamaConfig:
    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    for name in READ[rope.kind]:
        if (value := getattr(rope, name)) is not None:
            parameters[NAMES.get(name, name)] = value
    length = rope.original_max_position if rope.kind == "dynamic" else SERVED
    return LlamaConfig(
        hidden_size=4 * rope.dim,
        num_attention_heads=4,
        head_dim=rope.dim,
        max_position_embeddings=length,
        rope_parameters=parameters,
    )


def transformers_table(rope: RopeSpec) -> Tensor:
    """The model's own rotary module at POSITIONS, the last of which fixes dynamic's length."""
    cos, sin = LlamaRotaryEmbedding(transformers_config(rope))(torch.empty(0), POSITIONS[None])
    half = rope.dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


@pytest.mark.parametrize("rope", CASES, ids=lambda rope: f"{rope.kind}-{rope.dim}-{rope.factor:g}")
def test_table_equals_transformers(rope: RopeSpec) -> None:
    table = rope_table(rope, SERVED)
    assert table.shape == (SERVED, rope.dim)
    assert table.dtype == torch.float32
    torch.testing.assert_close(
        table[POSITIONS], transformers_table(rope), rtol=0, atol=1e-5, check_stride=False
    )


def test_dynamic_is_the_default_up_to_the_trained_length() -> None:
    dynamic = RopeSpec(10_000.0, 64, "dynamic", factor=4.0, original_max_position=2048)
    plain = RopeSpec(10_000.0, 64)
    torch.testing.assert_close(rope_table(dynamic, 2048), rope_table(plain, 2048))
    assert not torch.allclose(rope_table(dynamic, 2049)[:2048], rope_table(plain, 2048), atol=1e-6)


def test_yarn_factor_is_folded_into_the_table() -> None:
    rope = RopeSpec(10_000.0, 64, "yarn", factor=4.0, original_max_position=2048)
    first = rope_table(rope, 1)[0]
    assert first[0].item() == pytest.approx(0.1 * math.log(4.0) + 1.0)
