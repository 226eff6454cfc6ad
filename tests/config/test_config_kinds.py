"""Option kinds: texts into values, with the units that people write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.kinds import (
    choice,
    count,
    json_object,
    number_of,
    or_auto,
    real,
    size,
    size_in_gib,
    switch,
    text,
)


@pytest.mark.parametrize(
    ("given_text", "value"),
    [
        ("7", 7),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1m", 10**6),
        ("1M", 2**20),
        ("0.5K", 512),
    ],
)
def test_counts_read_k_as_vllm_does(given_text: str, value: int) -> None:
    assert count(1).parse(given_text) == value


@pytest.mark.parametrize(
    ("given_text", "value"),
    [
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("512 MiB", 2**29),
        ("1.5GiB", 3 * 2**29),
        ("2G", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("1048576", 2**20),
        ("1TiB", 2**40),
    ],
)
def test_sizes(given_text: str, value: int) -> None:
    assert size().parse(given_text) == value


@pytest.mark.parametrize(
    ("given_text", "value"),
    [
        ("4", 4 * 2**30),
        ("0", 0),
        ("0.1", 107_374_182),
        ("512MB", 512 * 10**6),
        ("1.5GiB", 3 * 2**29),
    ],
)
def test_a_bare_size_may_count_gib(given_text: str, value: int) -> None:
    assert size_in_gib().parse(given_text) == value


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (count(1), "0"),
        (count(1, 8), "9"),
        (count(1), "1.5"),
        (count(1), "x"),
        (count(1), ""),
        (count(1), "1e3"),
        (count(1), "1kb"),
        (size(), "0"),
        (size(), "2GiBs"),
        (size(), "GiB"),
        (size(), "-1GiB"),
        (size(), "0.3"),
        (size_in_gib(), "-1"),
        (size_in_gib(), "4 GiBs"),
        (size_in_gib(), "."),
        (size_in_gib(), ""),
        (real(0, 1, above_low=True), "0"),
        (real(0, 1), "1.01"),
        (real(0), "nan"),
        (real(0), "inf"),
        (switch(), "maybe"),
        (choice("a", "b"), "c"),
        (number_of(16, 32), "17"),
        (number_of(16, 32), "x"),
        (json_object(), "[1]"),
        (json_object(), "{"),
        (text(), " "),
        (or_auto(count(1)), "automatic"),
    ],
)
def test_anything_else_is_refused(kind: object, bad: str) -> None:
    with pytest.raises(ValueError):
        kind.parse(bad)  # type: ignore[attr-defined]


def test_auto_and_its_other_spelling() -> None:
    kind = or_auto(count(1), "-1")
    assert [kind.parse(word) for word in ("auto", "AUTO", "-1", "5")] == ["auto", "auto", "auto", 5]


def test_choices_ignore_case_and_know_aliases() -> None:
    kind = choice("float16", aliases={"half": "float16"})
    assert kind.parse("Half") == kind.parse("FLOAT16") == "float16"


@given(st.integers(1, 2**50))
def test_plain_bytes_are_exact(number: int) -> None:
    assert size().parse(str(number)) == number


@given(st.text(max_size=12))
def test_no_text_raises_anything_but_value_error(words: str) -> None:
    for kind in (count(1), size(), size_in_gib(), real(0), switch(), json_object(), number_of(16)):
        try:
            kind.parse(words)
        except ValueError:
            continue
