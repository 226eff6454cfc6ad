"""What a step must at least read and compute: the roof that a measurement is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.core.capacity import BYTES_PER_ELEMENT, cache_layout
from octavo.core.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved between memory and processor, and floating-point operations."""

    num_bytes: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


def step_cost(
    spec: ModelSpec,
    dtype: str,
    starts: Sequence[int],
    counts: Sequence[int],
    num_samples: int,
    kv_dtype: str | None = None,
) -> Cost:
    """Cost of a step that computes tokens [start, start + count) of each sequence, with keys and
    values in ``kv_dtype`` (None: ``dtype``).

    Bytes: every weight once (the head only if something is sampled), the embedding rows, the keys
    and values that the sequences see, once each, and those that are written. Activations are taken
    to stay in caches. A product of a weight with a token is 2 operations, and so is each element of
    a query with a key and of a probability with a value.
    """
    size = BYTES_PER_ELEMENT[dtype]
    tokens = sum(counts)
    head = spec.vocab_size * spec.hidden_size
    trunk = spec.num_params - head * (1 if spec.tie_embeddings else 2)
    weights = trunk + (head if num_samples else 0) + tokens * spec.hidden_size
    flops = 2 * (trunk * tokens + head * num_samples)
    kv_bytes = 0
    for block in cache_layout(spec, kv_dtype or dtype).blocks:
        per_token = len(block.layers) * (block.bytes_per_token + block.scale_bytes_per_token)
        for start, count in zip(starts, counts, strict=True):
            kv_bytes += per_token * (visible_tokens(start, count, block.window) + count)
            pairs = query_key_pairs(start, count, block.window)
            flops += len(block.layers) * 4 * spec.q_size * pairs
    return Cost(size * weights + kv_bytes, flops)


def visible_tokens(start: int, count: int, window: int = 0) -> int:
    """Tokens that at least one of the queries at [start, start + count) sees."""
    end = start + count
    return end if not window else end - max(0, start + 1 - window)


def query_key_pairs(start: int, count: int, window: int = 0) -> int:
    """Sum of the tokens that each query at [start, start + count) sees, itself included."""
    end = start + count
    if not window:
        return _sum_to(end) - _sum_to(start)
    low, high = min(start, window), min(end, window)
    return _sum_to(high) - _sum_to(low) + window * (count - (high - low))


def _sum_to(n: int) -> int:
    return n * (n + 1) // 2


def total(costs: Iterable[Cost]) -> Cost:
    return sum(costs, Cost())
