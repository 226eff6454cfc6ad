"""What is refused before anything is downloaded or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.load import load_options
from octavo.core.errors import StartupError
from octavo.engine.startup import prepare
from tests.fakes.tiny import make_tiny


@pytest.mark.parametrize(("place", "why"), [("no/trace", "No such file"), ("", "Is a directory")])
def test_a_trace_file_that_cannot_be_written_is_told_before_the_model_is_looked_for(
    tmp_path: Path, place: str, why: str
) -> None:
    options = load_options({"model": "no/such-model", "trace_file": str(tmp_path / place)}, {})
    with pytest.raises(StartupError, match=f"--trace-file: cannot write .*: {why}"):
        prepare(options)


def test_looking_at_a_trace_file_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, new):
        prepare(load_options({"model": str(make_tiny(tmp_path)), "trace_file": str(path)}, {}))
    assert old.read_text() == "kept"
    assert not new.exists()
