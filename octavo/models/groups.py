"""Layer groups: the layers that share one KV page layout and one visibility rule."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.spec import Mixer, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one mixer and window, in model order; a page holds all of them."""

    mixer: Mixer
    window: int  # tokens visible, the token itself included; 0 = all
    layers: tuple[int, ...]


def layer_groups(spec: ModelSpec) -> tuple[LayerGroup, ...]:
    """One group for each distinct (mixer, window), ordered by its first layer."""
    members: dict[tuple[Mixer, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        members.setdefault((layer.mixer, layer.window), []).append(index)
    return tuple(
        LayerGroup(mixer, window, tuple(layers)) for (mixer, window), layers in members.items()
    )
