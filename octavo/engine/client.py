"""EngineClient: the whole seam between a front and an engine, four verbs.

The front never sees more of an engine than this, so a fake one tests every route
without torch or sockets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.core.plan import AbortReason, Delta
from octavo.core.request import Request


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine tells once it is warm."""

    max_model_len: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    device: str
    dtype: str
    kv_tokens: int  # what the pages keep in sequences of max_model_len tokens
    prefix_caching: bool = True
    load_seconds: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)  # kernels chosen, weight bytes, …


@dataclass(frozen=True, slots=True)
class Health:
    """``serving``: an engine takes requests. ``state``: starting, ready, draining, dead."""

    serving: bool
    state: str
    detail: str = ""


class DeltaSource(Protocol):
    """A request's deltas in order; ``close`` forgets them (it does not abort the request)."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def close(self) -> None: ...


class EngineClient(Protocol):
    async def ready(self) -> EngineInfo:
        """Wait until the engine is warm. Raises :class:`EngineUnavailable` if it dies first."""

    def submit(self, request: Request) -> DeltaSource:
        """Send a request; yields its deltas, the last with ``finish`` set. Registers the
        stream before anything is sent, so no delta can be missed. A dead engine raises
        :class:`EngineUnavailable` from the iterator."""

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        """Ask for the end of a request; unknown ids are fine. Its stream ends with ``reason``."""

    def health(self) -> Health: ...

    async def control(self, name: str, args: Mapping[str, Any] | None = None) -> Any:
        """One path for every administrative verb: "stats" and "audit" give numbers by name,
        "reset_prefix_cache" the number of pages forgotten. Raises :class:`ServerError`."""
