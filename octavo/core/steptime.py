"""How long a step takes, as a function of what it computes, and how to learn that while it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY = 256  # steps of one kind over which the fit forgets
READY_STEPS = 32  # steps before a prediction is worth acting on
READY_PREFILLS = 4  # and those among them that computed prompts
SOLVE_EVERY = 8  # steps
MAX_SURPRISE = 4.0  # times the usual deviation: what a slower or faster step counts for
LEAST_DEVIATION = 0.02  # of a prediction
RIDGE = 1e-7  # relative; splits the price evenly between what never varied alone


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

    def prefill_tokens_within(self, seconds: float, decode_rows: int, context_tokens: int) -> int:
        """Most prompt tokens that fit beside decodes into a step of ``seconds``; 0 if none does.

        Of the context of those tokens only they themselves are counted.
        """
        left = seconds - self.seconds(0, decode_rows, context_tokens)
        price = self.per_token + self.per_context
        if left <= 0:
            return 0
        return int(left / price) if left < price * sys.maxsize else sys.maxsize


class StepTimeFit:
    """A :class:`StepTime` that follows the steps it is shown.

    Least squares of the *relative* error, so that short steps count as much as long ones, with
    exponential forgetting over ``memory`` steps. Steps with and without prompts are forgotten
    apart: an hour of decodes does not erase what a prompt costs. A step that deviates far from
    the prediction (a pause of the collector, a compilation) counts as one that deviates
    ``MAX_SURPRISE`` times as far as usual; if it becomes usual, the fit follows.
    """

    def __init__(self, memory: float = MEMORY) -> None:
        self.model = StepTime(0.0)
        self._keep = 1 - 1 / memory
        self._sums = ([0.0] * 14, [0.0] * 14)  # without prompts, with; see _products
        self._num_steps = 0
        self._num_prefills = 0
        self._deviation = 0.0  # relative, running mean

    @property
    def ready(self) -> bool:
        """Enough was seen. Before that, predictions are of little worth, and 0 at first."""
        return self._num_steps >= READY_STEPS and self._num_prefills >= READY_PREFILLS

    def predict(self, prefill_tokens: int, decode_rows: int, context_tokens: int) -> float:
        """Seconds of a step."""
        return self.model.seconds(prefill_tokens, decode_rows, context_tokens)

    def prefill_tokens_within(self, seconds: float, decode_rows: int, context_tokens: int) -> int:
        return self.model.prefill_tokens_within(seconds, decode_rows, context_tokens)

    def observe(
        self, prefill_tokens: int, decode_rows: int, context_tokens: int, seconds: float
    ) -> None:
        """A step has taken ``seconds`` > 0."""
        if self.ready:
            seconds = self._tempered(
                self.predict(prefill_tokens, decode_rows, context_tokens), seconds
            )
        kind = 1 if prefill_tokens else 0
        new = _products(prefill_tokens, decode_rows, context_tokens, seconds)
        keep = self._keep
        self._sums[kind][:] = [
            keep * old + value for old, value in zip(self._sums[kind], new, strict=True)
        ]
        self._num_steps += 1
        self._num_prefills += kind
        if self._num_steps % SOLVE_EVERY == 0:
            self.model = _solve([a + b for a, b in zip(*self._sums, strict=True)])

    def _tempered(self, predicted: float, seconds: float) -> float:
        """``seconds``, or as far from the prediction as one step may pull."""
        if predicted <= 0:
            return seconds
        surprise = seconds / predicted - 1
        most = MAX_SURPRISE * max(self._deviation, LEAST_DEVIATION)
        surprise = max(-min(most, 0.9), min(surprise, most))
        self._deviation += (abs(surprise) - self._deviation) / 32
        return predicted * (1 + surprise)


def fit_step_time(steps: Sequence[tuple[int, int, int, float]]) -> StepTime:
    """The :class:`StepTime` of least relative error over (prefill tokens, decode rows, context
    tokens, seconds), scaled so that its total is the steps' total: noise must not bias a sum."""
    if not steps:
        raise ValueError("a fit needs at least one step")
    sums = [0.0] * 14
    for step in steps:
        sums = [a + b for a, b in zip(sums, _products(*step), strict=True)]
    fit = _solve(sums)
    predicted = sum(fit.seconds(*step[:3]) for step in steps)
    scale = sum(step[3] for step in steps) / predicted
    return StepTime(
        fit.base * scale, fit.per_token * scale, fit.per_row * scale, fit.per_context * scale
    )


def _products(prefill: int, rows: int, context: int, seconds: float) -> tuple[float, ...]:
    """A step's part of the normal equations: features over seconds, each times each (upper
    triangle by rows), then each times the target, which is 1."""
    a = 1 / seconds
    b, c, d = (prefill + rows) * a, rows * a, context * a
    return (a * a, a * b, a * c, a * d, b * b, b * c, b * d, c * c, c * d, d * d, a, b, c, d)


def _solve(sums: Sequence[float]) -> StepTime:
    """Coefficients ≥ 0: while one is negative, it becomes 0 and the others are solved for anew."""
    upper, target = iter(sums[:10]), sums[10:]
    matrix = [[0.0] * 4 for _ in range(4)]
    for i in range(4):
        for j in range(i, 4):
            matrix[i][j] = matrix[j][i] = next(upper)
    scales = [row[i] ** 0.5 for i, row in enumerate(matrix)]  # a coefficient's unit
    active = [i for i in range(4) if scales[i] > 0]
    while active:
        solution = _eliminate(matrix, target, active)
        value, worst = min((solution[i] * scales[i], i) for i in active)
        if value >= 0:
            return StepTime(*(solution.get(i, 0.0) for i in range(4)))
        active.remove(worst)
    return StepTime(0.0)


def _eliminate(
    matrix: Sequence[Sequence[float]], target: Sequence[float], active: Sequence[int]
) -> dict[int, float]:
    """Gauss on the ``active`` rows and columns of a symmetric positive matrix, with ``RIDGE``."""
    rows = [[matrix[i][j] for j in active] + [target[i]] for i in active]
    for k, row in enumerate(rows):
        row[k] *= 1 + RIDGE
    size = len(rows)
    for k, pivot in enumerate(rows):
        for row in rows[k + 1 :]:
            factor = row[k] / pivot[k]
            for j in range(k, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * size
    for k in range(size - 1, -1, -1):
        rest = sum(rows[k][j] * solution[j] for j in range(k + 1, size))
        solution[k] = (rows[k][size] - rest) / rows[k][k]
    return dict(zip(active, solution, strict=True))
