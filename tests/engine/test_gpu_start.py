"""A start on a GPU, without one: the memory's readings are made up, kernels are the reference's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.config.facts import Gpu, HostFacts
from octavo.config.load import ARGUMENT, load_options
from octavo.config.resolve import Config
from octavo.core.capacity import cache_layout
from octavo.core.errors import StartupError
from octavo.core.request import Request, Sampling
from octavo.engine import build, startup
from octavo.engine.client import EngineInfo
from octavo.engine.loop import EngineLoop
from octavo.ops.api import Ops
from octavo.runner import select
from octavo.runner.runner import Runner
from tests.fakes.memory import FakeMemory
from tests.fakes.news import as_deltas
from tests.fakes.tiny import make_tiny

MIB = 2**20
TOTAL, OTHERS, CONTEXT, WEIGHTS, STEP, GRAPH = (n * MIB for n in (1400, 2, 50, 300, 694, 8))
ROOM = int(0.8 * TOTAL) - CONTEXT - WEIGHTS - STEP - 2 * GRAPH
OPTIONS = {
    "max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 64, "swap_space": 0,
    "gpu_memory_utilization": 0.8,
}  # fmt: skip


class Card:
    """What would happen on a GPU, noted: the memory's share of each part, kernels compiled."""

    def __init__(self) -> None:
        self.memory = FakeMemory(TOTAL, others=OTHERS, context=CONTEXT)
        self.compiled = 0
        self.captured = 0
        self.most_locked = 200

    def facts(self) -> HostFacts:
        gpu = Gpu("Fake", TOTAL, TOTAL - OTHERS)
        return HostFacts(cpu_count=2, total_bytes=2**34, available_bytes=2**33, gpus=(gpu,))

    def compile(self, work: Callable[[], object], *_: Any) -> tuple[int, int]:
        work()
        self.compiled += 1
        return 7, 2

    def lock(self, num_pages: int, page_bytes: int) -> torch.Tensor:
        if num_pages > self.most_locked:
            raise RuntimeError("CUDA error: out of memory")
        return torch.zeros(num_pages, page_bytes, dtype=torch.uint8)

    def capture(self) -> None:
        self.memory.context += GRAPH
        self.captured += 1


class GraphRunner(Runner):
    """Of a backend that works beside the host; its steps take memory, and its two graphs."""

    overlaps = True
    card: Card

    def captures(self) -> list[Callable[[], None]]:
        return [self.card.capture] * 2

    def execute(self, plan: Any) -> Any:
        self.card.memory.takes(STEP)
        return super().execute(plan)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("gpu") / "tiny")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    compiler = pytest.importorskip("octavo.ops.triton.compiler")
    monkeypatch.setattr(compiler, "ensure_compiled", card.compile)
    monkeypatch.setattr(GraphRunner, "card", card, raising=False)
    monkeypatch.setattr(select, "Runner", GraphRunner)
    monkeypatch.setattr(startup, "read_host_facts", card.facts)
    load = build.fill_model

    def loaded(*args: Any) -> str:
        card.memory.kept = WEIGHTS
        return load(*args)

    here = SimpleNamespace(device=lambda name: torch.device("cpu"), Tensor=torch.Tensor,
                           inference_mode=torch.inference_mode)  # fmt: skip
    for name, value in {
        "read_host_facts": card.facts,
        "GpuMemory": lambda device: card.memory,
        "select_ops": lambda *args, **options: Ops(),
        "torch": here,
        "fill_model": loaded,
        "locked_memory": card.lock,
    }.items():
        monkeypatch.setattr(build, name, value)
    return card


def start(folder: Path, **options: Any) -> tuple[EngineLoop, EngineInfo, Config, list[str]]:
    stages: dict[str, None] = {}
    given = {"model": str(folder), **OPTIONS, **options}
    config = startup.prepare(load_options(given, {}, ARGUMENT))
    loop, info = build.build_engine(config, lambda stage, share: stages.setdefault(stage))
    return loop, info, config, list(stages)


def test_the_pool_is_what_the_worst_step_and_graphs_leave(
    tiny: Path, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "octavo.engine"):
        loop, info, config, stages = start(tiny)
    page_bytes = cache_layout(startup.read_checkpoint(config).spec, "float32").page_bytes
    measured_with = build.PROBE_PAGES * page_bytes  # which the step's reading holds too
    assert info.num_pages == (ROOM + measured_with) // page_bytes < config.num_pages
    assert loop.scheduler.pool.num_pages == info.num_pages
    assert stages[-3:] == ["Warming up", "Allocating the KV cache", "Capturing graphs"]
    assert (card.compiled, card.captured) == (1, 4)  # two to measure, two to run
    for part in (
        "a step 0.68, graphs 0.02, libraries 0.05, other processes 0.00 of 1.37 GiB",
        "Kernels: 7, of which 2 were compiled",
        "Graphs: captured in",
        f"{info.kv_tokens:,} tokens",
        "Start took",
    ):
        assert part in caplog.text
    loop.submit(Request("a", [5, 6, 7], 4, Sampling(temperature=0.0)), 0.0)
    deltas = []
    while loop.has_work:
        deltas += as_deltas(loop.step(0.0))
    assert deltas[-1].finish == "length"


def test_a_given_pool_that_is_too_large_beside_a_step_is_refused(tiny: Path, card: Card) -> None:
    with pytest.raises(StartupError, match=r"0\.7 GiB of a step, 0\.0 GiB of graphs and 0\.0"):
        start(tiny, kv_cache_memory=100 * MIB)


def test_no_memory_for_the_worst_step_is_refused(
    tiny: Path, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(card.memory, "takes", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (MIB, TOTAL))
    with pytest.raises(StartupError, match="run a step of 24 tokens of 3 sequences"):
        start(tiny)


def test_host_memory_is_taken_while_the_model_loads(
    tiny: Path, card: Card, caplog: pytest.LogCaptureFixture
) -> None:
    loop, _, config, _ = start(tiny, swap_space="1MiB")
    host_pages = loop.executor._worker._host_pages  # type: ignore[attr-defined]
    assert host_pages.num_pages == config.num_host_pages == 128
    assert host_pages._host.data_ptr() == host_pages._memory.data_ptr()
    card.most_locked = 10
    loop, _, _, _ = start(tiny, swap_space="1MiB")
    host_pages = loop.executor._worker._host_pages  # type: ignore[attr-defined]
    assert (host_pages.num_pages, host_pages._memory) == (128, None)
    assert "locking it failed (CUDA error: out of memory)" in caplog.text
