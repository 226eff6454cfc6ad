"""What `import octavo` promises: its names, and that it is cheap until an engine is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[1]
LIGHT_ROOMS = ("core", "config", "text", "server")
# The server's libraries are imported by the server: a machine without them still has LLM.
SERVER_LIBRARIES = ("msgspec", "fastapi", "uvicorn", "starlette", "gguf", "zmq")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_exported_name_exists(name: str) -> None:
    assert getattr(octavo, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = octavo.Llm


def test_import_octavo_brings_no_torch() -> None:
    assert run("import sys, octavo; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_rooms_that_know_no_torch_import_none(room: str) -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        f"import octavo.{room} as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print('torch' in sys.modules)"
    )
    assert run(code) == "False"


def test_the_offline_engine_needs_none_of_the_servers_libraries() -> None:
    blocked = dict.fromkeys(SERVER_LIBRARIES)
    assert (
        run(f"import sys; sys.modules.update({blocked}); from octavo import LLM; print(1)") == "1"
    )
