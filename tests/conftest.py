"""What all rooms' tests share."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import octavo.engine  # noqa: F401  (before torch: it bounds how long OpenMP threads spin)
from octavo.core.scheduler import Scheduler

# Triton decides while it is imported whether kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, so that a red run means a change; no test fails for being slow.
settings.register_profile("octavo", deadline=None, derandomize=True)
settings.load_profile("octavo")


@pytest.fixture(autouse=True)
def _audit_schedulers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After each test, pages, host pages and slots of every scheduler it made must add up, unless
    it is marked ``breaks_audit``."""
    made: list[weakref.ref[Scheduler]] = []
    init = Scheduler.__init__

    def counted(self: Scheduler, **options: Any) -> None:
        init(self, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Scheduler, "__init__", counted)
    yield
    if request.node.get_closest_marker("breaks_audit"):
        return
    for scheduler in filter(None, (ref() for ref in made)):
        scheduler.audit()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's GGUF file, fetched once into the user's cache folder."""
    from octavo.weights.locate import locate

    return locate(None).path
