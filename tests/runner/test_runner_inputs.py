"""Page tables of a step: right for every row, and only what has changed is copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import Join, StepPlan
from octavo.core.request import Sampling
from octavo.runner.inputs import PageRows
from octavo.runner.slots import Slots
from octavo.runner.warmup import StepLimits, warm_up

SLOTS, MAX_PAGES = 5, 12


def make_slots(groups: int = 1) -> Slots:
    return Slots(SLOTS, MAX_PAGES * 4, 4, groups)


def append(slots: Slots, new: dict[int, list[int]], group: int = 0) -> None:
    counts = [[0] * len(new) for _ in slots.tables]
    pages: list[list[int]] = [[] for _ in slots.tables]
    counts[group] = [len(ids) for ids in new.values()]
    pages[group] = [page for ids in new.values() for page in ids]
    plan = StepPlan(0, list(new), [0] * len(new), page_counts=counts, pages=pages)
    slots.append_pages(plan)


steps = st.lists(
    st.tuples(
        st.permutations(range(SLOTS)),  # order of the rows
        st.integers(1, SLOTS),  # how many rows
        st.sets(st.integers(0, SLOTS - 1)),  # slots taken by somebody else before
        st.lists(st.integers(0, 3), min_size=SLOTS, max_size=SLOTS),  # new pages by slot
    ),
    max_size=8,
)


@given(steps=steps)
@settings(max_examples=200)
def test_every_row_has_its_own_pages(steps: list[Any]) -> None:
    slots = make_slots()
    rows = PageRows(slots, 0)
    known: list[list[int]] = [[] for _ in range(SLOTS)]
    fresh = iter(range(1, 10_000))
    for order, count, joined, growth in steps:
        for slot in joined:
            slots.join(Join(slot, [1], 1, Sampling()))
            known[slot] = []
        used = order[:count]
        new = {s: [next(fresh) for _ in range(growth[s])] for s in used}
        new = {s: ids[: MAX_PAGES - len(known[s])] for s, ids in new.items()}
        append(slots, new)
        for slot in used:
            known[slot] += new[slot]
        width = max(len(known[slot]) for slot in used)
        found = rows.take(np.array(used), width)
        assert found.shape == (count, width)
        for row, slot in zip(found.tolist(), used, strict=True):
            assert row[: len(known[slot])] == known[slot]


def test_a_row_that_goes_on_is_not_copied_again() -> None:
    slots = make_slots(groups=2)
    rows = PageRows(slots, 1)
    for slot in range(3):
        slots.join(Join(slot, [1], 1, Sampling()))
    append(slots, {0: [5, 6], 1: [7], 2: [8]}, group=1)
    rows.take(np.array([0, 1, 2]), 2)
    slots.tables[1][0, 0] = 99  # whoever copies it again would see this
    append(slots, {0: [9], 1: [], 2: []}, group=1)
    assert rows.take(np.array([0, 1, 2]), 3)[0].tolist() == [5, 6, 9]
    assert rows.take(np.array([0, 2]), 1).tolist() == [[5], [8]]
    slots.join(Join(0, [1], 1, Sampling()))
    append(slots, {0: [3, 4, 2]}, group=1)
    assert rows.take(np.array([0, 2]), 3)[0].tolist() == [3, 4, 2]


def test_warm_up_tells_how_far_it_is() -> None:
    told: list[tuple[str, float]] = []
    plans: list[StepPlan] = []
    runner: Any = SimpleNamespace(execute=plans.append, overlaps=True)
    sampler: Any = SimpleNamespace(warm_up=lambda: None)
    warm_up(
        runner, sampler, StepLimits(8, 64, 128),
        progress=lambda stage, share: told.append((stage, share)),
    )  # fmt: skip
    assert len(plans) > 1
    assert [share for _, share in told] == [k / len(plans) for k in range(len(plans) + 1)]
