"""The file of the H200 benchmark, the check that judges it, and the page that shows it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.check import Check, main
from benchmarks.checks import h200 as check_h200
from benchmarks.h200_doc import DOC, measured, number, render
from benchmarks.h200_results import (
    RESULT,
    Session,
    Stale,
    latest_rows,
    new_run,
    read_runs,
    require_fresh,
    write_runs,
)
from benchmarks.h200_table import PARTS, ROWS


def git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *args],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def commit(root: Path, name: str, text: str) -> str:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(root, "add", name)
    git(root, "commit", "-qm", name)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository with one kernel, and its commit."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    return root, commit(root, "octavo/ops/triton/kernel.py", "one")


def whole_run(commit: str, **values: float) -> dict[str, Any]:
    """All rows just within their bounds, but for ``values``."""
    run = new_run(commit, "a card", ["a", "command"])
    for row in ROWS.values():
        value = values.get(row.name, row.bound + (row.op == ">"))
        run["rows"].append({"row": row.name, "value": value, "raw": [value] * row.reps})
    return run


def judged(path: Path, root: Path) -> Check:
    check = Check("h200")
    check_h200.run(check, path, root)
    return check


def test_every_row_has_a_part() -> None:
    assert {row.part for row in ROWS.values()} == set(PARTS)


def test_values_at_their_bounds_pass(repository: tuple[Path, str], tmp_path: Path) -> None:
    root, measured_at = repository
    write_runs(tmp_path / "h200.json", [whole_run(measured_at)])
    commit(root, "docs/page.md", "later")
    check = judged(tmp_path / "h200.json", root)
    assert check.passed, check.lines
    assert len(check.lines) == len(ROWS)


def test_a_miss_a_lacking_row_and_too_few_repetitions_fail(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    root, measured_at = repository
    run = whole_run(measured_at, **{"8B W1": 10_499.0, "W6 without chunks, ITL p99.9": 60.0})
    run["rows"] = [row for row in run["rows"] if row["row"] != "8B W4"]
    next(row for row in run["rows"] if row["row"] == "0.6B W2")["raw"].pop()
    write_runs(tmp_path / "h200.json", [run])
    failed = {e["metric"] for e in judged(tmp_path / "h200.json", root).lines if not e["passed"]}
    assert failed == {
        "8B W1", "W6 without chunks, ITL p99.9", "8B W4", "8B W4, repetitions",
        "0.6B W2, repetitions",
    }  # fmt: skip


def test_no_file_fails_with_what_to_do(
    repository: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not judged(tmp_path / "h200.json", repository[0]).passed
    assert "There is no h200.json: run python -m benchmarks.h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "is_stale"),
    [
        ("octavo/ops/triton/kernel.py", True), ("octavo/runner/graphs.py", True),
        ("octavo/ops/cpu/attention.py", False), ("octavo/server/app.py", False),
    ],
)  # fmt: skip
def test_figures_are_stale_once_a_kernel_or_the_runner_has_changed(
    changed: str, is_stale: bool, repository: tuple[Path, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    root, measured_at = repository
    write_runs(tmp_path / "h200.json", [whole_run(measured_at)])
    commit(root, changed, "two")
    assert judged(tmp_path / "h200.json", root).passed is not is_stale
    assert (f"{changed} has changed since" in capsys.readouterr().out) is is_stale


def test_a_change_that_is_not_committed_counts(repository: tuple[Path, str]) -> None:
    root, measured_at = repository
    require_fresh(measured_at, root)
    (root / "octavo/ops/triton/kernel.py").write_text("two")
    with pytest.raises(Stale, match="has changed since"):
        require_fresh(measured_at, root)


def test_a_commit_beside_this_checkout_is_refused(repository: tuple[Path, str]) -> None:
    root, _ = repository
    git(root, "checkout", "-qb", "other")
    other = commit(root, "docs/other.md", "other")
    git(root, "checkout", "-q", "main")
    with pytest.raises(Stale, match="no ancestor of this checkout"):
        require_fresh(other, root)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    for text in ("[]", "nothing", "{}"):
        path.write_text(text)
        with pytest.raises(Stale, match="is not a file of"):
            read_runs(path)


def test_the_last_whole_run_that_has_a_row_counts() -> None:
    first, second, short = (new_run(name, "card", []) for name in ("first", "second", "short"))
    short["short"] = True
    first["rows"] = [{"row": "8B W1", "value": 1}, {"row": "8B W2", "value": 1}]
    second["rows"] = [{"row": "8B W1", "value": 2}]
    short["rows"] = [{"row": "8B W1", "value": 3}]
    rows = latest_rows([first, second, short])
    assert {name: (row["value"], row["commit"]) for name, row in rows.items()} == {
        "8B W1": (2, "second"), "8B W2": (1, "first"),
    }  # fmt: skip


def open_session(path: Path, rows: list[str], seconds: float = 1e3, **how: bool) -> Session:
    write_runs(path, [new_run("abc", "card", [])])
    return Session(path, rows, time.time() + seconds, **how)


def test_each_repetition_is_written_and_the_median_counts(tmp_path: Path) -> None:
    session = open_session(tmp_path / "h200.json", ["8B W1"])
    values = iter((3.0, 1.0, 2.0))

    def measure() -> float:
        kept = latest_rows(read_runs(tmp_path / "h200.json"))
        seen.append(len(kept["8B W1"]["raw"]) if kept else 0)
        return next(values)

    seen: list[int] = []
    assert session.repeat("8B W1", measure) == [3.0, 1.0, 2.0]
    assert seen == [0, 1, 2]
    assert latest_rows(read_runs(tmp_path / "h200.json"))["8B W1"]["value"] == 2.0
    assert session.repeat("8B W4", measure) == []  # nobody wants it


def test_no_repetition_starts_that_would_end_too_late(tmp_path: Path) -> None:
    late = open_session(tmp_path / "h200.json", ["8B W1"], seconds=-1.0)
    assert late.repeat("8B W1", lambda: 1.0) == [1.0]  # once it is better than nothing
    short = open_session(tmp_path / "h200.json", ["8B W1"], short=True)
    assert short.repeat("8B W1", lambda: 1.0) == [1.0]


def test_a_row_that_fails_is_noted_and_the_next_one_begins(tmp_path: Path) -> None:
    session = open_session(tmp_path / "h200.json", ["8B W1", "8B W2"])

    def fail() -> float:
        raise RuntimeError("no memory")

    assert session.repeat("8B W1", fail) == []
    assert session.repeat("8B W2", lambda: 1.0)
    (run,) = read_runs(tmp_path / "h200.json")
    assert run["failures"] == {"8B W1": "RuntimeError: no memory"}
    assert [row["row"] for row in run["rows"]] == ["8B W2"]


def test_the_check_writes_no_file_over_the_figures(monkeypatch: pytest.MonkeyPatch,
                                                   tmp_path: Path) -> None:  # fmt: skip
    monkeypatch.setattr("benchmarks.check.RESULTS", tmp_path)
    monkeypatch.setattr(check_h200, "run", lambda check: check.line("one", 1, "==", 1))
    assert main(["h200"]) == 0
    assert not list(tmp_path.iterdir())


def test_the_page_is_what_its_command_renders() -> None:
    assert DOC.read_text() == render(read_runs(RESULT) if RESULT.exists() else [])


def test_the_page_shows_what_was_measured() -> None:
    run = whole_run("abcdef", **{"8B W1": 11_234.4})
    w6 = next(row for row in run["rows"] if row["row"] == "W6 TTFT p99")
    spreads = {name: {"p50": 1.5} for name in ("ttft_ms", "itl_ms", "long_ttft_ms")}
    w6 |= {"server": "--target-itl-ms 20", "found": spreads}
    page = render([run])
    assert "| 8B W1 | output tok/s | 11,234 | ≥ 10,500 | 9,530 |" in page
    assert "W6 TTFT p99: `octavo serve … --target-itl-ms 20`." in page
    assert "TTFT p50 1.5; ITL p50 1.5; TTFT of 16k prompts p50 1.5." in page
    assert "a card, commit abcdef" in page
    assert measured(None) == "not measured"
    assert measured({"value": 0.25, "raw": [0.2, 0.25, 0.31]}) == "0.25 (0.2 to 0.31)"
    assert [number(v) for v in (0, 0.97123, 25.04, 9_999.6)] == ["0", "0.9712", "25.04", "10,000"]
