"""Kinds of option values as types of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from octavo.config.kinds import Kind


def value_of(kind: Kind) -> Callable[[str], Any]:
    """A type for ``add_argument`` whose message says what is expected."""

    def parse(given: str) -> Any:
        try:
            return kind.parse(given)
        except ValueError:
            message = f"must be {kind.expects}, not {given!r}"
            raise argparse.ArgumentTypeError(message) from None

    return parse
