"""How long a step takes, as a function of what it computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: a floor, and prices for what it computes. No coefficient is negative.

    The floor is what any step costs (weights are read, kernels launched). A *token* is computed,
    in a prompt or as the next of an answer; a *row* is a decode; a *context* token is one
    whose keys and values a slice reads, its own among them.
    """

    base: float
    per_token: float = 0.0
    per_row: float = 0.0
    per_context: float = 0.0

    def seconds(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> float:
        return (
            self.base
            + self.per_token * (prefill_tokens + decode_rows)
            + self.per_row * decode_rows
            + self.per_context * context_tokens
        )
