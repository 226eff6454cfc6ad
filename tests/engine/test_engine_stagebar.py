"""The bar of a start."""

from __future__ import annotations

import io

import pytest

from octavo.engine.stagebar import StageBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_stages_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with StageBar() as bar:
        bar.show("Compiling kernels", 0.25)
        bar.show("Capturing graphs", 1.0)
    text = screen.getvalue()
    assert "Compiling kernels:  25%" in text
    assert "Capturing graphs: 100%" in text
    assert not text.rsplit("\r", 1)[-1].strip()


def test_elsewhere_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := io.StringIO())
    with StageBar() as bar:
        bar.show("Compiling kernels", 0.25)
    assert screen.getvalue() == ""
