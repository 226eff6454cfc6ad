"""What went wrong elsewhere when somebody else had the GPU's memory (O-01)."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.facts import Gpu, HostFacts
from octavo.engine import startup
from octavo.tools import cli

GIB = 2**30


def test_a_gpu_that_others_use_is_refused_in_one_sentence(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("Shared GPU", total_bytes=24 * GIB, free_bytes=9 * GIB)
    facts = HostFacts(cpu_count=2, total_bytes=16 * GIB, available_bytes=12 * GIB, gpus=(gpu,))
    monkeypatch.setattr(startup, "read_host_facts", lambda: facts)
    assert cli.main(["serve", str(tiny), "--gpu-memory-utilization", "0.9"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    for part in ("21.6 GiB requested", "9.0 GiB free of 24.0 GiB", "12.6 GiB less",
                 "others use 15.0 GiB", "--gpu-memory-utilization (0.9)"):  # fmt: skip
        assert part in line
