"""The key-value section of a GGUF file, read in milliseconds.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little
endian). Every length is checked against what is left of the file before it is used, so
a truncated or hostile file ends in a sentence and not in an allocation.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from octavo.core.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_NESTING = 4  # arrays in arrays; no known file has more than one level

_BOOL, _STRING, _ARRAY = 7, 8, 9
# GGUF value type: (struct code, bytes).
_SCALARS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    _BOOL: ("B", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
_MIN_BYTES = {_STRING: 8, _ARRAY: 12}  # of one value of a type without a fixed size
_U64 = struct.Struct("<Q")


def read_metadata(path: Path, *, arrays: bool = True) -> dict[str, Any]:
    """All keys and values of a GGUF file; ``arrays=False`` skips the arrays' content.

    Scalars become int, float, bool or str, arrays become lists. Raises
    :class:`StartupError` naming the file when it is not a whole GGUF file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Cursor(data, arrays).metadata()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        raise StartupError(f"Cannot read {path} as a GGUF file: {error}") from None


class Cursor:
    """A cursor over the mapped file. Raises ValueError with the position."""

    def __init__(self, data: mmap.mmap, arrays: bool) -> None:
        self.data = data
        self.size = len(data)
        self.at = 0
        self.arrays = arrays

    def metadata(self) -> dict[str, Any]:
        if self.data[:4] != MAGIC:
            raise ValueError("it does not start with the bytes 'GGUF'")
        self.at = 4
        version = self.scalar(4)
        if version not in VERSIONS:
            raise ValueError(f"its GGUF version is {version}; versions 2 and 3 are supported")
        self.scalar(10)  # number of tensors
        count = self.scalar(10)
        self.need(count, 8 + 4 + 1, "metadata entries")
        return dict(self.entry() for _ in range(count))

    def entry(self) -> tuple[str, Any]:
        key = self.string()
        return key, self.value(self.scalar(4))

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.items(depth)
        number = self.scalar(kind)
        return bool(number) if kind == _BOOL else number

    def scalar(self, kind: int) -> Any:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind} at byte {self.at}")
        code, size = _SCALARS[kind]
        self.need(1, size, "value")
        (number,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += size
        return number

    def string(self) -> str:
        self.need(1, 8, "string length")
        (length,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        self.need(length, 1, "bytes of a string")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def items(self, depth: int) -> list[Any]:
        if depth == MAX_NESTING:
            raise ValueError(f"arrays are nested deeper than {MAX_NESTING} at byte {self.at}")
        kind = self.scalar(4)
        count = self.scalar(10)
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            self.need(count, _MIN_BYTES[kind], "arrays")
            return [self.items(depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown array type {kind} at byte {self.at}")
        return self.numbers(kind, count)

    def numbers(self, kind: int, count: int) -> list[Any]:
        code, size = _SCALARS[kind]
        self.need(count, size, "array values")
        end = self.at + count * size
        raw, self.at = self.data[self.at : end] if self.arrays else b"", end
        values = list(struct.unpack(f"<{len(raw) // size}{code}", raw))
        return [bool(value) for value in values] if kind == _BOOL else values

    def strings(self, count: int) -> list[str]:
        """Hot: a vocabulary is 50,000 to 300,000 strings."""
        self.need(count, _MIN_BYTES[_STRING], "strings")
        data, at, size, unpack = self.data, self.at, self.size, _U64.unpack_from
        found: list[str] = []
        for _ in range(count):
            if size - at < 8:
                raise ValueError(f"the file ends inside a string length at byte {at}")
            (length,) = unpack(data, at)
            at += 8 + length
            if at > size:
                raise ValueError(f"a string of {length} bytes does not fit in the file")
            if self.arrays:
                found.append(data[at - length : at].decode("utf-8", "replace"))
        self.at = at
        return found

    def need(self, count: int, size: int, what: str) -> None:
        """Python integers do not overflow, so the product is exact."""
        if count * size > self.size - self.at:
            raise ValueError(
                f"{count} {what} at byte {self.at} do not fit in the file's {self.size} bytes"
            )
