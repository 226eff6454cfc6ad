"""Compiles variants into the cache on disk, in processes beside each other.

``python -m octavo.ops.triton.compiler`` is the other side: it reads variants as a JSON list,
imports once, forks, and prints a line for each variant that is done. Neither touches a device.
"""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from octavo.ops.triton.variants import Variant, collect, settle_keys

log = logging.getLogger("octavo.engine")


def compile_variants(
    variants: Sequence[Variant], processes: int, progress: Callable[[float], None]
) -> None:
    """Fill the cache with ``variants``. What cannot be compiled is told; a launch will raise it."""
    processes = max(1, min(processes, len(variants)))
    progress(0.0)
    with subprocess.Popen(
        _command(processes), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: told below
            json.dump([asdict(variant) for variant in variants], child.stdin)
            child.stdin.close()
        done = 0
        for line in child.stdout:
            answer = json.loads(line)
            done += 1
            if answer["error"]:
                log.warning("Kernel %s was not compiled: %s", answer["name"], answer["error"])
            progress(done / len(variants))
    if done < len(variants):
        log.warning(
            "%d kernels compile one after the other: the compiler ended with status %d.",
            len(variants) - done, child.returncode,
        )  # fmt: skip


def ensure_compiled(
    work: Callable[[], object], processes: int, progress: Callable[[float], None]
) -> tuple[int, int]:
    """Compile what ``work`` will load and the cache does not have; how many it loads, and how many
    were compiled. Does the host's part of ``work``: see :func:`octavo.ops.triton.variants.collect`.
    """
    variants = collect(work)
    missing = [variant for variant in variants if not variant.is_compiled]
    if missing:
        compile_variants(missing, processes, progress)
    return len(variants), len(missing)


def _command(processes: int) -> list[str]:
    return [sys.executable, "-m", __name__, str(processes)]


class _Elsewhere:
    """A driver for the target of another process. The real one is asked only for what it builds."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self._real = next(
            entry.driver for entry in backends.values() if entry.compiler.supports_target(target)
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    @property
    def can_launch(self) -> bool:
        return bool(self._real.is_active())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)


def compile_variant(variant: Variant) -> None:
    """Compile one, and the C code that launches it where there is a device for it."""
    place = _Elsewhere(GPUTarget(*variant.target))
    driver.set_active(place)
    function: Any = importlib.import_module(variant.module)
    settle_keys(function)
    for part in variant.name.split("."):
        function = getattr(function, part)
    kernel = function.preload(variant.data)
    if place.can_launch:
        place.launcher_cls(kernel.src, kernel.metadata)
    variant.mark_compiled()


def _main(processes: int) -> None:
    variants = [
        Variant(**{**fields, "target": tuple(fields["target"])}) for fields in json.load(sys.stdin)
    ]
    for module in {variant.module for variant in variants}:
        importlib.import_module(module)
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        futures = {pool.submit(compile_variant, variant): variant for variant in variants}
        for future in as_completed(futures):
            error = future.exception()
            text = "" if error is None else f"{type(error).__name__}: {error}"
            print(json.dumps({"name": futures[future].name, "error": text}), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
