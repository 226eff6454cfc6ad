"""The loads of the storm check: prompts and answers whose lengths nobody knows in advance.

Answers have 256 to 360 tokens in the mean, whatever their distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.tools.simulate.trace import Trace, backlog

Lengths = NDArray[np.int64]

PROMPTS = {"50-500": (50, 500), "20-100": (20, 100)}
# What each client asks for, whatever it will get: no more than half of what the pool holds.
MAX_TOKENS = {8: 2000, 32: 4000, 128: 4000, 1000: 4000}


def uniform(draw: np.random.Generator, count: int, most: int) -> Lengths:
    return draw.integers(1, 512, count, endpoint=True)


def bimodal(draw: np.random.Generator, count: int, most: int) -> Lengths:
    """Two thirds short answers, one third long ones."""
    short = draw.integers(10, 60, count, endpoint=True)
    long = draw.integers(500, 900, count, endpoint=True)
    return np.where(draw.random(count) < 2 / 3, short, long)


def pareto(draw: np.random.Generator, count: int, most: int) -> Lengths:
    """Pareto with exponent 1.2 from 100 tokens on, capped at what clients ask for."""
    return np.minimum(100 * (1 - draw.random(count)) ** (-1 / 1.2), most).astype(np.int64)


def shift(draw: np.random.Generator, count: int, most: int) -> Lengths:
    """Short answers in the first half, five times as long ones in the second."""
    half = shifted_at(count)
    short = draw.integers(1, 200, half, endpoint=True)
    return np.concatenate([short, draw.integers(200, 800, count - half, endpoint=True)])


def shifted_at(count: int) -> int:
    """The first request after the shift."""
    return count // 2


SHAPES: dict[str, Callable[[np.random.Generator, int, int], Lengths]] = {
    "uniform": uniform,
    "bimodal": bimodal,
    "pareto": pareto,
    "shift": shift,
}


def make_trace(shape: str, prompts: str, count: int, seed: int, held: int) -> Trace:
    """All at once: the queue is never empty before the last ones."""
    draw = np.random.default_rng([seed, count])
    low, high = PROMPTS[prompts]
    most = MAX_TOKENS[held]
    lengths = draw.integers(low, high, count, endpoint=True), SHAPES[shape](draw, count, most)
    return backlog(*lengths, most)


def mean_tokens(shape: str, prompts: str, held: int) -> float:
    """Of a request, prompt and answer together, in the long run."""
    trace = make_trace(shape, prompts, 200_000, 0, held)
    return float((trace.prompt + trace.output).mean())
