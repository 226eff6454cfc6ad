"""The JSON files of a checkpoint folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.core.errors import StartupError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises :class:`StartupError` naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path} is missing.") from None
    except (OSError, ValueError, RecursionError) as error:  # bad JSON and bad UTF-8: ValueError
        raise StartupError(f"Cannot read {path} as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise StartupError(f"{path} must hold a JSON object, not a {type(values).__name__}.")
    return values


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json``. A model that brings Python code is refused: it is never imported."""
    config = read_json(folder / "config.json")
    if config.get("auto_map"):
        raise StartupError(
            f"{folder / 'config.json'} has auto_map: this model brings its own Python code, "
            "which Octavo never runs."
        )
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """``generation_config.json``, or {} if there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}
