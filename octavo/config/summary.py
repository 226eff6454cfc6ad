"""What a start, or a plan of one, tells: each value with its source."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from octavo.config.options import DECLARATIONS
from octavo.config.resolve import Config

_BYTES = ("kv_cache_memory", "weight_bytes", "max_body_bytes", "swap_space")


def render_summary(config: Config, *, with_defaults: bool = False) -> str:
    """A table "name value source"; plain defaults are left out unless asked for."""
    rows = [
        (entry.name.replace("_", "-"), _shown(entry.name, getattr(config, entry.name)), source)
        for entry in fields(config)
        if (source := config.sources.get(entry.name)) and (with_defaults or source != "default")
    ]
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows), default=0)
    return "\n".join(
        f"{name:<{name_width}}  {value:<{value_width}}  {source}" for name, value, source in rows
    )


def _shown(name: str, value: Any) -> str:
    if name in DECLARATIONS and DECLARATIONS[name].is_secret:
        return f"({len(value)} given)"
    if name in _BYTES:
        return f"{value / 2**20:,.1f} MiB"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ", ".join(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
