"""StartClock: which part of a start took how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StartClock:
    """Runs from its making. Parts do not overlap; what is in none of them is not told."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside; a name may come more than once."""
        start = self._clock()
        yield
        self._parts[name] = self._parts.get(name, 0.0) + self._clock() - start

    @property
    def seconds(self) -> float:
        return self._clock() - self._start

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._parts.items())
        return f"{self.seconds:.1f} s ({parts})"
