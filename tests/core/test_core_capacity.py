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


GIB = 2**30


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
    for length in (100, 4096, 131072):
        pages = capacity.pages_from_tokens(layout, 65536, length, chunk=1)
        assert pages == 4097  # and the null page
        assert capacity.tokens_from_pages(layout, pages, length, chunk=1) == 65536
        assert capacity.pages_from_tokens(layout, 65537, length, chunk=1) == 4098


def test_largest_model_len_is_rounded_down_to_a_page() -> None:
    layout = capacity.cache_layout(LLAMA_8B)
    assert capacity.largest_model_len(layout, 459 + 1, chunk=1) == 7344
    assert capacity.max_concurrency(layout, 460, 7344, chunk=1) == 1.0
    assert capacity.max_concurrency(layout, 460, 3672, chunk=1) == pytest.approx(459 / 230)


def test_groups_are_equal_so_a_window_pads_no_page() -> None:
    sliding = LayerSpec(mixer="sliding", window=4096)
    spec = replace(LLAMA_8B, layers=(LayerSpec(),) * 8 + (sliding,) * 24)
    layout = capacity.cache_layout(spec)
    assert [(len(b.layers), b.window) for b in layout.blocks] == [(8, 0)] + [(8, 4096)] * 3
    assert layout.page_bytes == 16 * 8 * 4096
    assert capacity.bytes_per_token(layout) == 32 * 4096


def test_capacity_counts_on_windows() -> None:
    sliding = LayerSpec(mixer="sliding", window=4096)
    layout = capacity.cache_layout(
        replace(LLAMA_8B, layers=(LayerSpec(),) * 8 + (sliding,) * 24), page_size=16
    )
    window, added = 4096 // 16 + 1, 1024 // 16  # pages of a window group; of a step's 1,024 tokens
    one = 4096 + 3 * window
    assert layout.peak_pages(65536, 1024) == one + 3 * added
    assert capacity.largest_model_len(layout, one + 3 * added + 1, 1024) == 65536
    assert capacity.max_concurrency(layout, one + 3 * added + 1, 65536, 1024) == 1.0
    assert capacity.max_concurrency(layout, one + 3 * added, 65536, 1024) < 1.0
    pages = 2 * one + 3 * added + 1  # only one of the two can compute 1,024 tokens in a step
    assert capacity.max_concurrency(layout, pages, 65536, 1024) == 2.0
    assert capacity.pages_from_tokens(layout, 131072, 65536, 1024) == pages
    assert capacity.tokens_from_pages(layout, pages, 65536, 1024) == 131072
    # Sequences within the window keep every page in all four groups.
    assert capacity.pages_from_tokens(layout, 131072, 2048, 1024) == 4 * 8192 + 1
    assert capacity.tokens_from_pages(layout, 4 * 8192 + 1, 2048, 1024) == 131072


def test_unknown_dtype_and_mixer_are_refused() -> None:
    with pytest.raises(ValueError, match="int3"):
        capacity.cache_layout(LLAMA_8B, "int3")
    with pytest.raises(NotImplementedError, match="mla"):
        capacity.cache_layout(replace(LLAMA_8B, layers=(LayerSpec(mixer="mla"),)))


def test_what_others_and_the_worst_step_leave() -> None:
    use = capacity.MemoryUse(
        total=80 * GIB, others=10 * GIB, weights=15 * GIB, step=4 * GIB, graphs=GIB, context=GIB
    )
    assert use.own == 21 * GIB
    assert use.room(0.5) == 19 * GIB  # of a half of the card
    assert use.room(1.0) == use.room(None) == 49 * GIB - capacity.SLACK_BYTES
    assert use.room(0.25) == -GIB
    assert "weights 15.00, a step 4.00, graphs 1.00, libraries 1.00, other processes 10.00" in str(
        use
    )
