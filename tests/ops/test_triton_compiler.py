"""Kernels compiled in other processes are found by the one that launches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction

from octavo.ops.triton import compiler
from octavo.ops.triton.compiler import compile_variants, ensure_compiled
from octavo.ops.triton.variants import Variant, collecting

OTHER_SIDE = """
import json, sys
for number, variant in enumerate(json.load(sys.stdin)):
    if number == {last}:
        sys.exit(3)
    print(json.dumps({{"name": variant["name"], "error": {error!r}}}), flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def variants(count: int) -> list[Variant]:
    return [Variant("m", f"kernel_{i}", "{}", ("cuda", 90, 32), f"{i:064x}") for i in range(count)]


def other_side(monkeypatch: pytest.MonkeyPatch, *, error: str = "", last: int = -1) -> None:
    program = OTHER_SIDE.format(error=error, last=last)
    monkeypatch.setattr(compiler, "_command", lambda processes: [sys.executable, "-c", program])


def test_what_is_marked_is_found_again(cache: Path) -> None:
    one, other = variants(2)
    assert not one.is_compiled
    one.mark_compiled()
    assert one.is_compiled
    assert not other.is_compiled


def test_only_what_is_missing_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = variants(4)
    needed[2].mark_compiled()
    asked: list[list[Variant]] = []
    monkeypatch.setattr(compiler, "collect", lambda work: needed)
    monkeypatch.setattr(compiler, "compile_variants", lambda missing, *rest: asked.append(missing))
    assert ensure_compiled(lambda: None, 8, lambda share: None) == (4, 3)
    for variant in needed:
        variant.mark_compiled()
    assert ensure_compiled(lambda: None, 8, lambda share: None) == (4, 0)
    assert asked == [[needed[0], needed[1], needed[3]]]


def test_progress_is_told_and_so_is_what_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shares: list[float] = []
    other_side(monkeypatch)
    compile_variants(variants(4), 2, shares.append)
    assert shares == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert not caplog.records
    other_side(monkeypatch, error="CompilationError: no")
    compile_variants(variants(1), 2, shares.append)
    assert "Kernel kernel_0 was not compiled: CompilationError: no" in caplog.text


def test_a_compiler_that_dies_only_costs_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other_side(monkeypatch, last=1)
    compile_variants(variants(3), 2, lambda share: None)
    assert "2 kernels compile one after the other: the compiler ended with status 3" in caplog.text


def test_launches_are_themselves_again_after_collecting() -> None:
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    with suppress(ZeroDivisionError), collecting():
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert JITFunction.run is run
    assert knobs.runtime.jit_cache_hook is hook


FOR_A_CARD_THAT_IS_NOT_HERE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:
    def get_current_device(self): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_stream(self, device): return 0

driver.set_active(Driver())
from octavo.ops.sampling.gpu import TritonSamplingOps
from octavo.ops.sampling.reference import DrawParams
from octavo.ops.triton.compiler import ensure_compiled
from octavo.ops.triton.variants import collect

def draw():
    real, whole = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    params = DrawParams(real, whole, real, real, whole, whole)
    TritonSamplingOps(early=True).draw(torch.zeros(2, 300), params)

first, again = (ensure_compiled(draw, 2, lambda share: None) for _ in range(2))
hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
run = triton.runtime.jit.JITFunction.run
triton.runtime.jit.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(
    self, *args, grid=grid, warmup=True, **kwargs)
draw()
print(json.dumps([first, again, hits]))
"""


@pytest.mark.slow
def test_the_sampler_for_a_hopper_card(tmp_path: Path) -> None:
    """Its kernels call each other, which is where keys went apart."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FOR_A_CARD_THAT_IS_NOT_HERE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (needed, compiled), again, hits = json.loads(done.stdout.splitlines()[-1])
    assert needed == compiled == len(hits) >= 3
    assert again == [needed, 0]
    assert all(hits)
