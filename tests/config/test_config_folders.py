"""One cache folder, also for a user who has no home."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from octavo.config.folders import user_cache


def test_the_cache_is_where_the_desktop_says_or_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache() == Path("/somewhere/octavo")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "octavo"


@pytest.mark.parametrize("home", ["/no/such/home", ""])
def test_without_a_home_it_is_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    assert user_cache().parent == Path(tempfile.gettempdir())


def test_a_user_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert user_cache().parent == Path(tempfile.gettempdir())
