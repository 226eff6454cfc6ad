"""Workloads with a name: lengths, arrivals, streams and temperature in one word."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Lengths = Sequence[tuple[int, int]]
"""(Prompt, output) tokens of each request."""


@dataclass(frozen=True, slots=True)
class Named:
    """``due_s``: seconds after the start, None where the rate is the caller's business.
    ``max_concurrency`` None: as many at once as arrive."""

    lengths: Lengths
    due_s: Sequence[float] | None = None
    max_concurrency: int | None = None
    temperature: float = 0.0


def lengths_w1(count: int = 256) -> tuple[list[int], list[int]]:
    """Prompt and output lengths of 100 to 1,024 tokens: all prompts are drawn first, each with its
    ids, so that the lengths are those of other engines' published runs."""
    draw = random.Random(0)
    ins = []
    for _ in range(count):
        length = draw.randint(100, 1024)
        for _ in range(length):
            draw.randint(0, 10000)
        ins.append(length)
    return ins, [draw.randint(100, 1024) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Mix:
    """Short requests, ``rate`` a second, arrive at random (Poisson); a long prompt comes every
    ``long_every_s``, the first one half of that after the start. (Prompt, output) tokens each."""

    seconds: float = 60.0
    rate: float = 8.0
    long_every_s: float = 2.0
    short: tuple[int, int] = (512, 128)
    long: tuple[int, int] = (16_000, 32)

    def arrivals(self, draw: random.Random) -> list[tuple[float, tuple[int, int]]]:
        """(Seconds after the start, lengths), by time."""
        found, now = [], draw.expovariate(self.rate)
        while now < self.seconds:
            found.append((now, self.short))
            now += draw.expovariate(self.rate)
        now = self.long_every_s / 2
        while now < self.seconds:
            found.append((now, self.long))
            now += self.long_every_s
        return sorted(found)


def _w1(draw: random.Random) -> Named:
    return Named(list(zip(*lengths_w1(), strict=True)), temperature=0.6)


def _w6(draw: random.Random) -> Named:
    due, lengths = zip(*Mix().arrivals(draw), strict=True)
    return Named(lengths, due)


def _fixed(count: int, *lengths: int, streams: int | None = None) -> Callable[..., Named]:
    prompt, output = lengths
    return lambda draw: Named([(prompt, output)] * count, max_concurrency=streams)


NAMED: dict[str, Callable[[random.Random], Named]] = {
    "W1": _w1,  # many at once, of all lengths
    "W2": _fixed(1, 128, 256),  # one stream
    "W3": _fixed(32, 4096, 1),  # prompts alone
    "W4": _fixed(512, 32, 512),  # answers alone
    "W5": _fixed(1024, 512, 256, streams=256),  # closed-loop streams
    "W6": _w6,  # short requests beside long prompts
}
