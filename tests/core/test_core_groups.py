"""Which layers share pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.groups import MAX_PADDING, LayerGroup, group_size, layer_groups
from octavo.core.spec import LayerSpec
from tests.fakes.tiny_models import tiny_spec

FULL, NEAR, FAR = LayerSpec(), LayerSpec("sliding", window=8), LayerSpec("sliding", window=9)


def groups_of(*layers: LayerSpec) -> tuple[LayerGroup, ...]:
    return layer_groups(replace(tiny_spec(), num_layers=len(layers), layers=layers))


def test_one_kind_is_one_group() -> None:
    assert groups_of(FULL, FULL, FULL) == (LayerGroup("full", 0, (0, 1, 2)),)


def test_each_mixer_and_window_is_cut_into_groups_of_the_smallest_kind() -> None:
    assert groups_of(NEAR, FULL, NEAR, FAR, NEAR) == (
        LayerGroup("sliding", 8, (0,)),
        LayerGroup("full", 0, (1,)),
        LayerGroup("sliding", 8, (2,)),
        LayerGroup("sliding", 9, (3,)),
        LayerGroup("sliding", 8, (4,)),
    )


@pytest.mark.parametrize(
    ("num_layers", "size", "count"),
    [(18, 3, 6), (26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 6, 11)],
    ids=["270m", "1b", "4b", "12b", "27b"],
)
def test_gemma_3_has_few_groups_and_little_padding(num_layers: int, size: int, count: int) -> None:
    groups = groups_of(*(NEAR if (i + 1) % 6 else FULL for i in range(num_layers)))
    assert (max(len(group.layers) for group in groups), len(groups)) == (size, count)
    assert sorted(i for group in groups for i in group.layers) == list(range(num_layers))


@given(st.lists(st.integers(1, 80), min_size=1, max_size=4))
def test_padding_is_bounded(counts: list[int]) -> None:
    size = group_size(counts)
    assert sum(-count % size for count in counts) <= MAX_PADDING * sum(counts)
    assert len(counts) > 1 or size == counts[0]
