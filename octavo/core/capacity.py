"""Capacity arithmetic: what a model's KV cache costs, and what a number of pages holds."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.groups import layer_groups
from octavo.core.pages import BlockSpec, CacheLayout
from octavo.core.spec import ModelSpec

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
FP8_SCALE_BYTES = 2  # one fp16 scale per token and KV head, for K and for V
SLACK_BYTES = 2**28  # of a device, left alone: allocations are rounded up, memory splinters


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a device, as measured before its KV pages are taken.

    ``others``: other processes; ``step``: the most that activations and sampling of a step take;
    ``graphs``: what captured graphs will take; ``context``: the driver's and libraries' own.
    """

    total: int
    others: int
    weights: int
    step: int
    graphs: int
    context: int

    def __str__(self) -> str:
        parts = {
            "weights": self.weights, "a step": self.step, "graphs": self.graphs,
            "libraries": self.context, "other processes": self.others,
        }  # fmt: skip
        figures = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items())
        return f"{figures} of {self.total / 2**30:.2f} GiB"

    @property
    def own(self) -> int:
        return self.weights + self.step + self.graphs + self.context

    def room(self, share: float | None) -> int:
        """Bytes that are left for KV pages (negative: short of them), of ``share`` of the device;
        None: of all that other processes leave."""
        free = self.total - self.others - self.own - SLACK_BYTES
        return free if share is None else min(free, int(self.total * share) - self.own)


def cache_layout(
    spec: ModelSpec, kv_dtype: str = "auto", page_size: int = 16, *, ranks: int = 1
) -> CacheLayout:
    """A block for each of :func:`layer_groups`: what one of ``ranks`` tensor-parallel ranks keeps.

    ``kv_dtype`` is "auto" (the checkpoint's dtype) or a key of ``BYTES_PER_ELEMENT``. Raises
    ValueError on an unknown dtype and NotImplementedError for mixers without a block spec.
    """
    dtype = spec.dtype if kv_dtype == "auto" else kv_dtype
    if dtype not in BYTES_PER_ELEMENT:
        raise ValueError(f"kv_cache_dtype must be one of {list(BYTES_PER_ELEMENT)}, not {dtype!r}")
    for layer in spec.layers:
        if layer.mixer not in ("full", "sliding"):
            raise NotImplementedError(f"no KV cache is defined for {layer.mixer!r} layers")
    kv_heads = max(1, spec.num_kv_heads // ranks)
    blocks = tuple(
        BlockSpec(
            layers=group.layers,
            bytes_per_token=2 * kv_heads * spec.head_dim * BYTES_PER_ELEMENT[dtype],
            scale_bytes_per_token=2 * kv_heads * FP8_SCALE_BYTES if dtype == "fp8" else 0,
            window=group.window,
        )
        for group in layer_groups(spec)
    )
    return CacheLayout(blocks, page_size)


def bytes_per_token(layout: CacheLayout) -> int:
    """KV bytes that one more token costs, windows not counted on."""
    return layout.page_bytes * layout.num_paged // layout.page_size


def pages_from_bytes(layout: CacheLayout, num_bytes: int) -> int:
    """Pages, the null page among them, that fit into ``num_bytes``."""
    return num_bytes // layout.page_bytes


def pages_from_tokens(layout: CacheLayout, num_tokens: int, max_model_len: int, chunk: int) -> int:
    """Pages, the null page among them, that keep ``num_tokens`` tokens in sequences of at most
    ``max_model_len``, of which a step computes at most ``chunk``."""
    length = min(num_tokens, max_model_len)
    each, extra = _pages_of_each(layout, length, chunk)
    return -(-_pages(layout, num_tokens) * each // _pages(layout, length)) + extra + 1


def tokens_from_pages(layout: CacheLayout, num_pages: int, max_model_len: int, chunk: int) -> int:
    """Tokens that ``num_pages`` (null page included) keep in sequences of ``max_model_len``."""
    tokens = _pages(layout, max_model_len) * layout.page_size
    each, extra = _pages_of_each(layout, max_model_len, chunk)
    if num_pages - 1 < each + extra:
        return (num_pages - 1) * tokens // (each + extra)
    return (num_pages - 1 - extra) * tokens // each


def max_concurrency(layout: CacheLayout, num_pages: int, max_model_len: int, chunk: int) -> float:
    """Sequences of ``max_model_len`` tokens that ``num_pages`` (null page included) keep."""
    each, extra = _pages_of_each(layout, max_model_len, chunk)
    if num_pages - 1 < each + extra:
        return (num_pages - 1) / (each + extra)
    return (num_pages - 1 - extra) / each


def largest_model_len(layout: CacheLayout, num_pages: int, chunk: int) -> int:
    """Longest context that ``num_pages`` (null page included) keep, rounded down to a page."""
    return layout.largest_sequence(num_pages - 1, chunk)


def _pages_of_each(layout: CacheLayout, length: int, chunk: int) -> tuple[int, int]:
    """Pages of a sequence of ``length`` tokens that computes its last one, and what the ``chunk``
    tokens of a step add: once, since all sequences of the step share them."""
    each = layout.peak_pages(length, 1)
    return each, layout.peak_pages(length, chunk) - each


def _pages(layout: CacheLayout, num_tokens: int) -> int:
    return -(-num_tokens // layout.page_size)
