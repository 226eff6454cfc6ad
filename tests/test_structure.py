"""The map is true: docs/structure.md names what exists, and imports go only downwards."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\d+) \| .+? \| `([^`]+)` \|(.*)\|$")


def rows() -> list[tuple[int, str, list[str]]]:
    """(number, file, names) of each row of the table of behaviours."""
    found = []
    for line in (ROOT / "docs" / "structure.md").read_text().splitlines():
        match = ROW.match(line)
        if match:
            found.append((int(match[1]), match[2], re.findall(r"`([^`]+)`", match[3])))
    return found


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods as Class.method, and assigned names of a module."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            names.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    visit(ast.parse(path.read_text()).body, "")
    return names


@pytest.mark.parametrize(("number", "file", "names"), rows(), ids=lambda value: str(value))
def test_each_row_names_what_exists(number: int, file: str, names: list[str]) -> None:
    path = ROOT / file
    assert path.is_file(), file
    if names:
        missing = set(names) - names_in(path)
        assert not missing, f"{file} has no {', '.join(sorted(missing))}"


def test_every_numbered_item_has_a_row_and_every_row_is_read() -> None:
    assert {number for number, _, _ in rows()} == set(range(1, 13))
    table = (ROOT / "docs" / "structure.md").read_text().partition("## Where each behaviour")[2]
    lines = [line for line in table.splitlines() if re.match(r"\| \d", line)]
    assert len(lines) == len(rows())


def test_every_room_is_on_the_map_and_exists() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    named = set(re.findall(r"^\| `octavo/(\w+)/`", text, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "octavo").glob("*/__init__.py")}
    assert named == rooms


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/log.md"])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), f"{page}: {target}"


def test_every_dependency_has_a_reason_in_the_log() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[;]", entry)[0] for entry in project["dependencies"]}
    log = (ROOT / "docs" / "log.md").read_text()
    assert names == set(re.findall(r"^\| ([a-z_0-9]+) \| .+ \|$", log, re.MULTILINE)) - {"package"}


def test_imports_go_only_downwards() -> None:
    """The contracts of import-linter; `make lint` runs them too."""
    pytest.importorskip("importlinter")
    program = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports())"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
