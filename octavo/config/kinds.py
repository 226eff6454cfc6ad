"""Kinds of option values: how a text becomes a value, and how to say what is expected.

A kind's ``parse`` raises :class:`ValueError` on anything else than it expects. The one place that
turns this into a message is :mod:`octavo.config.load`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

COUNT_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}
BYTE_UNITS = COUNT_UNITS | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for base, unit in ((1000, f"{letter}b"), (1024, f"{letter}ib"))
}


@dataclass(frozen=True, slots=True)
class Kind:
    """``expects`` completes the sentence "--x must be …"; ``metavar`` stands for it in the help."""

    parse: Callable[[str], Any]
    expects: str
    metavar: str
    is_switch: bool = False


def text(metavar: str = "TEXT") -> Kind:
    return Kind(_text, "a non-empty text", metavar)


def switch() -> Kind:
    """A yes-or-no value: ``--x`` and ``--no-x`` as flags, true or false elsewhere."""
    return Kind(_switch, "true or false", "BOOL", is_switch=True)


def choice(*values: str, aliases: Mapping[str, str] | None = None) -> Kind:
    names = {value: value for value in values} | dict(aliases or {})

    def parse(given: str) -> str:
        name = given.lower()
        if name not in names:
            raise ValueError(given)
        return names[name]

    return Kind(parse, "one of " + ", ".join(values), "|".join(values))


def number_of(*values: int) -> Kind:
    """One of a few whole numbers."""

    def parse(given: str) -> int:
        if int(given) not in values:
            raise ValueError(given)
        return int(given)

    names = [str(value) for value in values]
    return Kind(parse, "one of " + ", ".join(names), "|".join(names))


def count(low: int, high: int | None = None) -> Kind:
    """A whole number. As in vLLM, 1k is 1000 and 1K is 1024; 25.6k is 25600."""
    return Kind(
        lambda given: _bounded(_scaled(given, COUNT_UNITS), low, high), _span(low, high), "N"
    )


def size() -> Kind:
    """Bytes. 2GB is 2·10⁹, 2GiB is 2·2³⁰; a single letter reads as in :func:`count`."""
    return Kind(
        lambda given: _bounded(_scaled(given, BYTE_UNITS), 1, None),
        "a size such as 2GiB, 512MB or a number of bytes",
        "SIZE",
    )


def size_in_gib() -> Kind:
    """Bytes, from 0 on; a number without a unit counts GiB, as vLLM's --swap-space does."""

    def parse(given: str) -> int:
        if given.replace(".", "", 1).isdigit():
            return int(Fraction(given) * BYTE_UNITS["gib"])
        return _bounded(_scaled(given, BYTE_UNITS), 0, None)

    return Kind(parse, "a size such as 2GiB, 512MB or a number of GiB", "SIZE")


def real(low: float, high: float = math.inf, *, above_low: bool = False) -> Kind:
    def parse(given: str) -> float:
        value = float(given)
        if not low <= value <= high or math.isinf(value) or (above_low and value == low):
            raise ValueError(given)
        return value

    bound = f"above {low:g}" if above_low else f"of at least {low:g}"
    upper = "" if math.isinf(high) else f" and at most {high:g}"
    return Kind(parse, f"a number {bound}{upper}", "X")


def json_object() -> Kind:
    return Kind(_json_object, "a JSON object such as '{\"key\": 1}'", "JSON")


def or_auto(kind: Kind, *spellings: str) -> Kind:
    """``kind``, or "auto" (or another spelling of it)."""

    def parse(given: str) -> Any:
        return "auto" if given.lower() in ("auto", *spellings) else kind.parse(given)

    return Kind(parse, f"{kind.expects}, or auto", f"{kind.metavar}|auto")


def _text(given: str) -> str:
    if not given.strip():
        raise ValueError(given)
    return given


def _switch(given: str) -> bool:
    name = given.lower()
    if name in ("true", "1", "yes", "on"):
        return True
    if name in ("false", "0", "no", "off"):
        return False
    raise ValueError(given)


def _json_object(given: str) -> dict[str, Any]:
    value = json.loads(given)
    if not isinstance(value, dict):
        raise ValueError(given)
    return value


def _scaled(given: str, units: Mapping[str, int]) -> int:
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?) *([a-zA-Z]*)", given)
    if match is None:
        raise ValueError(given)
    # Only single letters differ by case: 2gib means 2GiB, but 2g does not mean 2G.
    unit = match[2] if len(match[2]) == 1 else match[2].lower()
    if unit not in units:
        raise ValueError(given)
    whole, _, fraction = match[1].partition(".")
    value, rest = divmod(int(whole + fraction) * units[unit], int(10 ** len(fraction)))
    if rest:
        raise ValueError(given)
    return value


def _bounded(value: int, low: int, high: int | None) -> int:
    if value < low or (high is not None and value > high):
        raise ValueError(value)
    return value


def _span(low: int, high: int | None) -> str:
    limit = f"of at least {low}" if high is None else f"between {low} and {high}"
    return f"a whole number {limit}"
