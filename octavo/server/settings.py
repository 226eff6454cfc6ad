"""ServerSettings: what the HTTP side needs to know, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import StartupError
from octavo.version import __version__

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """``model_names``: the first is the default and the one in answers; the rest are aliases.

    ``api_keys``: any of them opens every route that is not public; none means no check.
    ``max_waiting_requests`` without a token yet, or ``max_concurrent_requests`` in all: one more is
    refused with 429 (None: no limit).
    ``default_sampling``: the checkpoint's generation_config, used where a request is silent.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    body_timeout_s: float = 60.0
    max_waiting_requests: int | None = None
    max_concurrent_requests: int | None = None
    allowed_origins: tuple[str, ...] = ()  # CORS; empty = no cross-origin browser may call
    root_path: str = ""  # where a proxy shows the server: "" or /a/path
    enable_docs: bool = True
    log_requests: bool = False
    keep_alive_s: float = 15.0  # an idle stream gets a comment line this often; 0 = never
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__

    def __post_init__(self) -> None:
        if not self.model_names:
            raise StartupError("The server needs at least one model name.")
        if any(not key.strip() for key in self.api_keys):
            raise StartupError("An API key must not be empty.")
