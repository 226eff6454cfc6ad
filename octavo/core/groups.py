"""Layer groups: the layers whose keys and values share a page, and one visibility rule.

All groups draw equal pages from one pool, so a group with fewer layers than another leaves part of
each of its pages empty. Hence groups of (nearly) equal size: each kind of layer is cut into groups
of g layers. Few groups are better than many (each has a page table of its own), so g is the largest
that leaves at most ``MAX_PADDING`` of the layers' places empty; 1 leaves none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from octavo.core.spec import Mixer, ModelSpec

MAX_PADDING = 1 / 12  # of the model's layers


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one mixer and window, in model order; a page holds all of them."""

    mixer: Mixer
    window: int  # tokens visible, the token itself included; 0 = all
    layers: tuple[int, ...]


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """The groups of ``spec``, ordered by their first layers.

    A model of one kind is one group; 15 sliding and 3 full layers are 6 groups of 3.
    """
    kinds: dict[tuple[Mixer, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        kinds.setdefault((layer.mixer, layer.window), []).append(index)
    size = group_size([len(members) for members in kinds.values()])
    groups = [
        LayerGroup(mixer, window, tuple(members[at : at + size]))
        for (mixer, window), members in kinds.items()
        for at in range(0, len(members), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers))


def group_size(counts: Collection[int]) -> int:
    """Layers a group, for kinds that have ``counts`` layers."""
    allowed = MAX_PADDING * sum(counts)
    return next(
        size
        for size in range(min(counts), 0, -1)
        if sum(-count % size for count in counts) <= allowed
    )
