"""``layer_types`` of a config: one name a layer."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.spec import LayerSpec
from octavo.weights.reader import Reader


def typed_layers(
    config: Reader, count: int, kinds: Mapping[str, LayerSpec]
) -> tuple[LayerSpec, ...]:
    """Raises :class:`StartupError` unless ``layer_types`` holds ``count`` names of ``kinds``."""
    names = config.texts("layer_types")
    if len(names) != count:
        raise config.error("layer_types", f"must name {count} layers, not {len(names)}")
    for name in names:
        if name not in kinds:
            raise config.error("layer_types", f"may hold {', '.join(kinds)}, not {name!r}")
    return tuple(kinds[name] for name in names)
