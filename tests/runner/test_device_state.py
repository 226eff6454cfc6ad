"""What the host writes to a GPU's slots arrives, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import tests.fakes.interpreter  # noqa: F401
from octavo.core.plan import Join, StepPlan
from octavo.core.request import Sampling
from octavo.runner.device import DeviceState
from octavo.runner.slots import NewPages, Slots


def send(state: DeviceState) -> None:
    places, values = state.take_writes()
    host = torch.from_numpy(np.concatenate([places.astype(np.int32), values]))
    state.stage(host, host, 0, (len(places), 0, len(places)))


def test_records_and_pages_of_the_last_who_joined() -> None:
    state = DeviceState(3, 2, 5, torch.device("cpu"))
    slots = Slots(3, 20, 4, 2)
    gone = Join(1, [1, 2], 2, Sampling(seed=1))
    joins = [
        Join(0, [1], 1, Sampling(seed=2**64 - 1, temperature=0.5, top_k=-1, top_p=0.25)),
        Join(1, [1, 2, 3], 2, Sampling(seed=7, min_p=0.125, top_k=9)),
    ]
    state.join([gone])
    state.join(joins)
    for join in joins:
        slots.join(join)
    for pages in ([[3, 4, 5], []], [[6], [7]]):
        counts = [[len(pages[0]) - 1, 1], [0, len(pages[1])]]
        for new in slots.append_pages(StepPlan(0, [1, 0], page_counts=counts, pages=pages)):
            state.add_pages(new)
    send(state)
    assert state.records[:, [0, 4, 5]].tolist() == [[-1, 0, 1], [7, 9, 2], [0] * 3, [0] * 3]
    floats = state.records[:2, 1:4].contiguous().view(torch.float64)
    assert floats.tolist() == [[0.5, 0.25, 0.0], [1.0, 1.0, 0.125]]
    assert state.tables[0, :2, :3].tolist() == [[5, 6, 0], [3, 4, 0]]
    assert state.tables[1, :2, :2].tolist() == [[7, 0], [0, 0]]
    assert state.take_writes()[0].size == 0


def test_of_two_writes_to_a_place_the_last_counts() -> None:
    state = DeviceState(2, 1, 4, torch.device("cpu"))
    slot, place = np.array([1]), np.array([2])
    for page in (5, 6):
        state.add_pages(NewPages(0, slot, place, np.array([page], np.int32)))
    send(state)
    assert state.tables[0, 1].tolist() == [0, 0, 6, 0]
