"""The harness of `make check`: what is printed, what is kept, and when it fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import Check, main, run_check


def run(
    measure: Callable[[Check], object], folder: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[bool, str, dict[str, Any]]:
    passed = run_check("demo", measure, "make check NAME=demo", folder)
    return passed, capsys.readouterr().out, json.loads((folder / "demo.json").read_text())


def test_lines_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(check: Check) -> None:
        check.note(workload="2 × 3")
        assert check.line("speed", 1.61234, ">=", 1.5, raw=[1.6, 1.63])
        assert check.line("answers", 4, "==", 4)

    passed, out, report = run(measure, tmp_path, capsys)
    assert passed
    assert out == "PASS demo speed 1.612 >= 1.5\nPASS demo answers 4 == 4\n"
    assert report["passed"] is True
    assert report["command"] == "make check NAME=demo"
    assert report["notes"] == {"workload": "2 × 3"}
    assert [line["raw"] for line in report["lines"]] == [[1.6, 1.63], [4]]
    assert {"commit", "versions", "machine", "started"} <= set(report)
    assert report["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("value", "op", "bound"),
    [(1.4, ">=", 1.5), (2, "<=", 1), (3, "==", 4), (math.nan, "<=", 1), (1, "<", 1), (1, ">", 1)],
)
def test_one_miss_fails_the_check(
    value: float, op: str, bound: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(check: Check) -> None:
        check.line("fine", 1, "==", 1)
        assert not check.line("bad", value, op, bound)

    passed, out, report = run(measure, tmp_path, capsys)
    assert not passed
    assert "FAIL demo bad" in out
    assert report["passed"] is False


def test_a_check_that_breaks_off_fails_and_keeps_its_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(check: Check) -> None:
        check.line("fine", 1, "==", 1)
        raise RuntimeError("no server")

    passed, out, report = run(measure, tmp_path, capsys)
    assert not passed
    assert "FAIL demo broke off with RuntimeError: no server" in out
    assert len(report["lines"]) == 1
    assert report["error"] == "RuntimeError: no server"


def test_a_check_without_a_line_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(lambda check: None, tmp_path, capsys)[0]


def test_an_unknown_check_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["no_such_check"]) == 2
    assert "'no_such_check'" in capsys.readouterr().err
    assert main(["../../setup"]) == 2
