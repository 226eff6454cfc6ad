"""Distributions of lengths, as people write them on a command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 2**30  # tokens
FORMS = "N, LOW-HIGH, pareto:ALPHA:LOW-HIGH, or several of them with commas (equally likely)"
_PART = re.compile(
    r"(?:pareto:(?P<alpha>\d{1,9}(?:\.\d{1,9})?):)?(?P<low>\d{1,10})(?:-(?P<high>\d{1,10}))?"
)


@dataclass(frozen=True, slots=True)
class Part:
    """Uniform on low … high, or Pareto with exponent ``alpha`` from ``low``, cut off at ``high``.

    A draw of the latter that lies above ``high`` becomes ``high``.
    """

    low: int
    high: int
    alpha: float | None = None

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        if self.alpha is None:
            return generator.integers(self.low, self.high, count, endpoint=True)
        with np.errstate(over="ignore"):  # infinity lies above high, too
            values = self.low * (1 - generator.random(count)) ** (-1 / self.alpha)
        return np.minimum(values, self.high).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Equally likely parts."""

    parts: tuple[Part, ...]

    @property
    def longest(self) -> int:
        return max(part.high for part in self.parts)

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = np.stack([part.draw(generator, count) for part in self.parts])
        chosen = generator.integers(len(self.parts), size=count)
        return np.asarray(drawn[chosen, np.arange(count)])


def parse_lengths(given: str) -> Lengths:
    """A type for ``add_argument``."""
    parts = []
    for text in given.split(","):
        match = _PART.fullmatch(text.strip())
        low = int(match["low"]) if match else 0
        high = int(match["high"] or low) if match else 0
        alpha = float(match["alpha"]) if match and match["alpha"] else None
        if not 1 <= low <= high <= MOST or alpha == 0 or (alpha is not None and low == high):
            raise argparse.ArgumentTypeError(
                f"must be {FORMS}, of at most {MOST} tokens, not {given!r:.60}"
            )
        parts.append(Part(low, high, alpha))
    return Lengths(tuple(parts))
