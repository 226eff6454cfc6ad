"""Terms: how a call is to be scheduled, beside what it asks to compute."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.errors import InvalidRequest
from octavo.core.sampling import integer, number

MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 10**6  # seconds
MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Terms:
    """Raises :class:`InvalidRequest` on a bad value.

    ``priority``: lower runs first. ``tenant``: whom fair scheduling charges. ``timeout``: seconds
    until the request ends with what it has. Pages are shared only under equal ``cache_salt``.
    """

    priority: int = 0
    tenant: str = ""
    timeout: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout is not None:
            number("timeout", self.timeout, 0, MAX_TIMEOUT, exclusive_low=True)
        salt = self.cache_salt
        if salt is not None and not isinstance(salt, str):
            raise InvalidRequest(
                f"cache_salt must be a text, not {salt!r:.40}.", param="cache_salt"
            )
        if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, not {len(salt)}.",
                param="cache_salt",
            )


NO_TERMS = Terms()
