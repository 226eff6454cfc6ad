"""Trace: who asks for how much, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Trace:
    """Requests as columns, in the order in which they arrive.

    ``output`` is the length at which a request stops by itself; the scheduler learns it only when
    it happens. ``max_tokens`` is what the client asked for. Arrivals are in seconds. The first
    ``shared`` tokens of a prompt are those of all other prompts that share as many or more.
    ``timeout`` and ``queue_timeout`` (seconds) hold for every request.
    """

    arrival: NDArray[np.float64]
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    max_tokens: NDArray[np.int64]
    tenant: list[str] = field(default_factory=list)  # empty: one tenant
    priority: list[int] = field(default_factory=list)  # empty: all 0
    shared: NDArray[np.int64] | None = None  # None: all 0
    timeout: float | None = None
    queue_timeout: float | None = None

    def __post_init__(self) -> None:
        count = len(self.prompt)
        columns = (self.arrival, self.output, self.max_tokens)
        optional = (self.tenant, self.priority, () if self.shared is None else self.shared)
        if any(len(column) != count for column in columns) or any(
            len(column) not in (0, count) for column in optional
        ):
            raise ValueError("the columns of a trace must be equally long")
        if count and (self.prompt.min() < 1 or self.output.min() < 1 or self.max_tokens.min() < 1):
            raise ValueError("a request has at least one token of prompt and one of output")
        if np.any(np.diff(self.arrival) < 0):
            raise ValueError("a trace must be sorted by arrival")

    def __len__(self) -> int:
        return len(self.prompt)


def backlog(
    prompt: NDArray[np.int64],
    output: NDArray[np.int64],
    max_tokens: NDArray[np.int64] | int,
) -> Trace:
    """All requests arrive at once; ``max_tokens`` may be the same for all."""
    return Trace(
        arrival=np.zeros(len(prompt)),
        prompt=np.asarray(prompt, np.int64),
        output=np.asarray(output, np.int64),
        max_tokens=np.broadcast_to(np.asarray(max_tokens, np.int64), (len(prompt),)),
    )
