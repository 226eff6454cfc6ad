"""Cost models of hardware: what a step takes, without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.steptime import StepTime


class CostModel(Protocol):
    def seconds(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> float:
        """Seconds of a step that computes ``prefill_tokens`` of prompts and ``decode_rows`` single
        tokens, and reads keys and values of ``context_tokens``."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """A GPU step: weights are read while tokens are computed, and the slower of the two counts;
    attention reads the KV cache on top. Seconds, and seconds a token."""

    weights: float
    per_token: float
    per_context: float

    def seconds(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> float:
        compute = self.per_token * (prefill_tokens + decode_rows)
        return max(self.weights, compute) + self.per_context * context_tokens


# 8 billion parameters in bf16 on an H200: 128 KiB of KV a token at 4.3 TB/s.
GPU = Roofline(weights=4.2e-3, per_token=27e-6, per_context=128 * 1024 / 4.3e12)
# SmolLM2-135M in bf16 on two cores: 22.5 KiB of KV a token.
CPU = StepTime(base=19e-3, per_token=0.9e-3, per_context=1.2e-6)

COST_MODELS: dict[str, CostModel] = {"gpu": GPU, "cpu": CPU}
