"""The embedded model, fetched once into the user's cache folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.weights.locate import locate


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return locate(None).path
