"""octavo warm-cache: a start without weights, for what it leaves in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.facts import HostFacts
from octavo.tools import cli, warm_cache
from tests.fakes.tiny import make_tiny

NO_GPU = HostFacts(cpu_count=1, total_bytes=2**34, available_bytes=2**33)


def test_without_a_gpu_there_is_nothing_to_compile_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_cache, "read_host_facts", lambda: NO_GPU)
    assert cli.main(["warm-cache", "org/name"]) == cli.FAILURE
    error = capsys.readouterr().err
    assert error.startswith("octavo: Kernels are compiled for the GPU that they will run on")
    assert len(error.splitlines()) == 1


def test_a_cpus_kernels_without_reading_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"not weights")
    arguments = [str(folder), "--device", "cpu", "--kv-cache-tokens", "1024", "--cpu-threads", "1"]
    assert cli.main(["warm-cache", *arguments]) == 0
    assert ": compiled, in " in capsys.readouterr().out
