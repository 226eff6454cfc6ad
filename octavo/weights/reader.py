"""Typed reads of a model's configuration, which fail with the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import StartupError

MAX_INTEGER = 2**31 - 1  # no size or id of a model is larger


class Reader:
    """Reads one JSON object (or GGUF metadata). A null value counts as absent.

    Without a ``default`` a key must be there. Raises :class:`StartupError`.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self.file = file

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER
    ) -> int:
        value = self._get(key, default)
        if not _is_int(value) or not low <= value <= high:
            raise self.error(key, f"must be an integer between {low} and {high}, not {value!r}")
        return int(value)

    def optional_integer(self, key: str, *, low: int = 1) -> int | None:
        return self.integer(key, low=low) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise self.error(key, f"must be a finite number above 0, not {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, f"must be a list of strings, not {value!r}")
        return value

    def ids(self, key: str) -> list[int]:
        """A token id or a list of them; absent is empty."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(_is_int(item) and item >= 0 for item in ids):
            raise self.error(key, f"must be a token id or a list of them, not {value!r}")
        return ids

    def section(self, key: str) -> Reader:
        """The object under a key; empty if absent. Its keys read as ``key.inner``."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return Reader(value, f"{self.file}: {key}")

    def error(self, key: str, complaint: str) -> StartupError:
        return StartupError(f"{self.file}: {key} {complaint}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
