"""Which compiled kernels a piece of work needs, and whether they are on disk already.

A *variant* is a kernel for one choice of constants, argument types and alignments.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction

_OURS = "octavo."
_DONE = "octavo.done"  # beside Triton's own files, in a folder for each variant


@dataclass(frozen=True, slots=True)
class Variant:
    """``data`` is what Triton's ``preload`` takes; ``target``: backend, architecture, warp size."""

    module: str
    name: str
    data: str
    target: tuple[str, int | str, int]
    digest: str

    @property
    def is_compiled(self) -> bool:
        """Whether the cache on disk has it (its folder is Triton's, ``TRITON_CACHE_DIR``)."""
        return bool(get_cache_manager(self.digest).has_file(_DONE))

    def mark_compiled(self) -> None:
        get_cache_manager(self.digest).put(b"", _DONE)


@contextmanager
def collecting() -> Iterator[dict[str, Variant]]:
    """Launches inside launch nothing: variants that this process has not loaded are noted.

    What kernels would have written stays as it was, so nothing inside may read it as an index.
    """
    found: dict[str, Variant] = {}
    noted: list[tuple[dict[Any, Any], Any]] = []  # where one launch after another would look
    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def rehearsed(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        variant = _variant(fn.jit_function, compile["specialization_data"])
        found[variant.digest] = variant
        loaded = fn.jit_function.device_caches[compile["device"]][0]
        loaded[compile["key"]] = variant
        noted.append((loaded, compile["key"]))
        return True  # compiled elsewhere

    JITFunction.run = rehearsed
    knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook
        for loaded, key in noted:
            del loaded[key]


def collect(work: Callable[[], object]) -> list[Variant]:
    """The variants that ``work`` would have to load."""
    with collecting() as found:
        work()
    return list(found.values())


def settle_keys(module: ModuleType) -> None:
    """Give each function of ``module`` its key, callees first.

    In Triton 3.6 a key depends on which callees had theirs before: without a fixed order, two
    processes would not find what the other one compiled.
    """
    _settle(module, set())


def _settle(module: ModuleType, seen: set[str]) -> None:
    """In the order in which names were bound: what a function calls comes before it."""
    seen.add(module.__name__)
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, ModuleType) else _home(value)
        if home == module.__name__:
            value.cache_key  # noqa: B018  (computed when first read)
        elif home.startswith(_OURS) and home not in seen:
            _settle(sys.modules[home], seen)


def _home(value: object) -> str:
    """The module of a function that Triton compiles; of anything else, none."""
    return str(value.__module__) if isinstance(value, JITCallable) else ""


def _variant(function: Any, data: str) -> Variant:
    settle_keys(sys.modules[function.module])
    target = driver.active.get_current_target()
    place = (target.backend, target.arch, target.warp_size)
    text = f"{triton.__version__} {place} {function.cache_key} {data}"
    return Variant(
        function.module,
        function.fn.__qualname__,
        data,
        place,
        hashlib.sha256(text.encode()).hexdigest(),
    )
