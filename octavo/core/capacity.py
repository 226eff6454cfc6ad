"""Capacity arithmetic: what a model's KV cache costs, and what a number of pages holds."""

from __future__ import annotations

from octavo.core.pages import BlockSpec, CacheLayout
from octavo.core.spec import ModelSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
FP8_SCALE_BYTES = 2  # one fp16 scale per token and KV head, for K and for V


def cache_layout(
    spec: ModelSpec, kv_dtype: str = "auto", page_size: int = 16, *, ranks: int = 1
) -> CacheLayout:
    """Layer groups of ``spec``, as one of ``ranks`` tensor-parallel ranks keeps them.

    ``kv_dtype`` is "auto" (the checkpoint's dtype) or a key of ``BYTES_PER_ELEMENT``. Layers with
    equal mixer and window form a group, in the order of their first layers. Raises ValueError on an
    unknown dtype and NotImplementedError for mixers without a block spec.
    """
    dtype = spec.dtype if kv_dtype == "auto" else kv_dtype
    if dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"kv_cache_dtype must be one of {list(BYTES_PER_ELEMENT)}, not {dtype!r}")
    groups: dict[int, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.mixer not in ("full", "sliding"):
            raise NotImplementedError(f"no KV cache is defined for {layer.mixer!r} layers")
        groups.setdefault(layer.window if layer.mixer == "sliding" else 0, []).append(index)
    kv_heads = max(1, spec.num_kv_heads // ranks)
    blocks = tuple(
        BlockSpec(
            layers=tuple(layers),
            bytes_per_token=2 * kv_heads * spec.head_dim * BYTES_PER_ELEMENT[dtype],
            scale_bytes_per_token=2 * kv_heads * FP8_SCALE_BYTES if dtype == "fp8" else 0,
            window=window,
        )
        for window, layers in groups.items()
    )
    return CacheLayout(blocks, page_size)


def bytes_per_token(layout: CacheLayout) -> int:
    """KV bytes that one more token costs, windows not counted on."""
    return layout.page_bytes * layout.num_paged // layout.page_size


def pages_from_bytes(layout: CacheLayout, num_bytes: int) -> int:
    """Pages, the null page among them, that fit into ``num_bytes``."""
    return num_bytes // layout.page_bytes


def pages_from_tokens(layout: CacheLayout, num_tokens: int) -> int:
    """Pages, the null page among them, that keep one sequence of ``num_tokens`` tokens."""
    return sum(layout.group_pages(num_tokens)) + 1


def max_concurrency(layout: CacheLayout, num_pages: int, max_model_len: int) -> float:
    """Sequences of ``max_model_len`` tokens that ``num_pages`` (null page included) keep."""
    return (num_pages - 1) / sum(layout.group_pages(max_model_len))


def largest_model_len(layout: CacheLayout, num_pages: int) -> int:
    """Longest context that ``num_pages`` (null page included) keep, rounded down to a page."""
    return layout.largest_sequence(num_pages - 1)
