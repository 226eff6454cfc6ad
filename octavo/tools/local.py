"""An engine in this process, set up by the flags of ``octavo serve``."""

from __future__ import annotations

from typing import Any

from octavo.config.options import DECLARATIONS, Options

# The groups of options that an engine without a server has.
ENGINE_GROUPS = (
    "Model", "Device and memory", "Scheduling", "Limits of a request", "File of options",
)  # fmt: skip


def engine_arguments(options: Options) -> dict[str, Any]:
    """``options`` as keyword arguments of :class:`octavo.LLM` and :class:`octavo.AsyncLLM`."""
    return {
        name: getattr(options, name)
        for name in DECLARATIONS
        if options.sources.get(name, "default") != "default"
    }
