"""Octavo serves large language models to many users at once.

>>> from octavo import LLM, SamplingParams
>>> LLM().generate("The capital of France is", SamplingParams(max_tokens=5))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.core.sampling import SamplingParams
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.engine.aio import AsyncLLM
    from octavo.engine.llm import LLM

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engines (and with them torch) only when someone asks for one."""
    if name == "LLM":
        from octavo.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from octavo.engine.aio import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
