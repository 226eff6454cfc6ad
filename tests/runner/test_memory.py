"""What a start measures of a device's memory."""

from __future__ import annotations

import pytest
import torch

from octavo.core.errors import StartupError
from octavo.runner.memory import SAMPLED_GRAPHS, MemoryMeter, refused_without_memory
from tests.fakes.memory import FakeMemory

GIB = 2**30


def loaded() -> tuple[FakeMemory, MemoryMeter]:
    """15 GiB of weights on a card of 80 that another process has 3 of."""
    memory = FakeMemory(80 * GIB, others=3 * GIB, context=GIB // 2)
    memory.kept = 15 * GIB
    memory.takes(2 * GIB)  # what loading left behind
    return memory, MemoryMeter(memory, others=3 * GIB)


def test_a_step_is_what_was_reserved_at_most_beside_weights_and_pages() -> None:
    memory, meter = loaded()
    meter.steps(lambda: (memory.takes(5 * GIB), memory.takes(4 * GIB)), pool_bytes=GIB)
    use = meter.use()
    assert (use.weights, use.step, use.graphs) == (15 * GIB, 4 * GIB, 0)
    assert (use.context, use.others, use.total) == (GIB // 2, 3 * GIB, 80 * GIB)


def test_what_a_step_loads_into_the_driver_counts_as_context() -> None:
    memory, meter = loaded()

    def run() -> None:
        memory.takes(GIB)
        memory.context += GIB

    meter.steps(run, pool_bytes=0)
    assert meter.use().context == 3 * GIB // 2


@pytest.mark.parametrize("count", [0, 1, SAMPLED_GRAPHS, 40])
def test_graphs_that_are_not_captured_take_what_the_last_ones_took(count: int) -> None:
    memory, meter = loaded()
    meter.steps(lambda: None, pool_bytes=0)
    captured = 0

    def capture() -> None:
        nonlocal captured
        memory.context += GIB if captured == 0 else GIB // 64
        captured += 1

    meter.graphs([capture] * count)
    assert captured == min(count, SAMPLED_GRAPHS)
    assert meter.use().graphs == (GIB + (count - 1) * GIB // 64 if count else 0)


def test_no_memory_while_starting_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB // 2, 24 * GIB))
    with (
        pytest.raises(StartupError, match=r"no memory to hold the weights: 0\.5 GiB of 24\.0"),
        refused_without_memory("hold the weights"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
