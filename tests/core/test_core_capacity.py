"""Capacity arithmetic on known models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core import capacity
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec

LLAMA_8B = ModelSpec(
    family="llama",
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position=131072,
    norm_eps=1e-5,
    rope=RopeSpec(theta=500000.0, dim=128),
    layers=(LayerSpec(),) * 32,
)


@pytest.mark.parametrize(
    ("kv_dtype", "expected"),
    [("auto", 131_072), ("bfloat16", 131_072), ("float32", 262_144), ("fp8", 65_536 + 1024)],
)
def test_llama_31_8b_bytes_per_token(kv_dtype: str, expected: int) -> None:
    layout = capacity.cache_layout(LLAMA_8B, kv_dtype)
    assert capacity.bytes_per_token(layout) == expected
    assert layout.page_bytes == 16 * expected


def test_ranks_split_kv_heads_and_replicate_when_fewer() -> None:
    per_rank = [
        capacity.bytes_per_token(capacity.cache_layout(LLAMA_8B, ranks=ranks))
        for ranks in (1, 2, 8, 16)
    ]
    assert per_rank == [131_072, 65_536, 16_384, 16_384]


def test_pages_from_bytes_and_tokens() -> None:
    layout = capacity.cache_layout(LLAMA_8B)
    assert capacity.pages_from_bytes(layout, 2**30) == 512
    assert capacity.pages_from_bytes(layout, 2**30 - 1) == 511
    assert capacity.pages_from_tokens(layout, 65536) == 4097  # and the null page
    assert capacity.pages_from_tokens(layout, 65537) == 4098


def test_largest_model_len_is_rounded_down_to_a_page() -> None:
    layout = capacity.cache_layout(LLAMA_8B)
    assert capacity.largest_model_len(layout, 459 + 1) == 7344
    assert capacity.max_concurrency(layout, 460, 7344) == 1.0
    assert capacity.max_concurrency(layout, 460, 3672) == pytest.approx(459 / 230)


def test_layers_with_a_window_are_a_group_of_their_own() -> None:
    sliding = LayerSpec(mixer="sliding", window=4096)
    spec = replace(LLAMA_8B, layers=(LayerSpec(),) * 8 + (sliding,) * 24)
    layout = capacity.cache_layout(spec)
    assert [(len(b.layers), b.window) for b in layout.blocks] == [(8, 0), (24, 4096)]
    assert layout.page_bytes == 16 * 24 * 4096
    assert capacity.bytes_per_token(layout) == 2 * 24 * 4096
    assert capacity.largest_model_len(layout, 101) == 50 * 16
    assert capacity.pages_from_tokens(layout, 800) == 101


def test_unknown_dtype_and_mixer_are_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        capacity.cache_layout(LLAMA_8B, "int3")
    with pytest.raises(NotImplementedError, match="mla"):
        capacity.cache_layout(replace(LLAMA_8B, layers=(LayerSpec(mixer="mla"),)))
