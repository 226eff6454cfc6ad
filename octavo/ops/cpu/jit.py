"""Compiles kernels once per machine and calls them on torch's own threads.

A kernel is a function of one address, that of its argument block. It is compiled as a C callback
and called without numba's dispatcher.

Threads: a decode step alternates oneDNN's products and our kernels some ten times a layer, so both
must run on the same threads; a second pool would spin against the first for the cores. So a kernel
is handed to ``GOMP_parallel`` of the very libgomp that torch has loaded: one pool, still awake
from the product before. Measured on 2 cores, what an empty kernel adds to a product of 112 µs: 3 µs
so, the same on numba's omp layer (which meets the same libgomp, but cuts work statically and
unboxes every argument), 32 to 60 µs on numba's workqueue.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite
import numba
import torch
from numba import cfunc, types
from numba.core import config
from numba.core.registry import cpu_target

from octavo.config.folders import user_cache
from octavo.ops.cpu.isa import Isa

log = logging.getLogger(__name__)
numba_config: Any = config

# Every argument block starts so: thread tickets, work tickets, scratch, work items.
TICKET, NEXT, SCRATCH, ITEMS, FIRST_ARGUMENT = 0, 1, 2, 3, 4

_LLVM_NAMES = {"generic": "x86-64", "avx2": "x86-64-v3", "avx512": "x86-64-v4", "amx": "x86-64-v4"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel: where it is, and the scratch bytes each thread needs."""

    name: str
    address: int
    scratch_bytes: int
    library: Any  # keeps the machine code alive
    from_cache: bool


def set_target(isa: Isa) -> None:
    """Make numba compile for ``isa``. Only a forced, lower level changes its default.

    Raises RuntimeError if numba has already compiled for another target in this process.
    """
    if isa.native:
        return
    name = _LLVM_NAMES[isa.level]
    numba_config.CPU_NAME, numba_config.CPU_FEATURES = name, ""
    target = cpu_target.target_context.codegen().magic_tuple()
    if name not in target:
        raise RuntimeError(f"numba already compiles for {target[1]}; a lower ISA needs a restart.")


def compile_kernel(
    function: Callable[[int], None], name: str, *, scratch_bytes: int = 0, cache_dir: Path | None
) -> Kernel:
    """Compile ``function`` or load it from ``cache_dir`` (None: no cache).

    ``name`` must tell apart all specialisations: it names the symbol and the cache file.
    """
    function.__name__ = function.__qualname__ = name
    folder = _usable(cache_dir)
    before = numba_config.CACHE_DIR
    numba_config.CACHE_DIR = str(folder) if folder else before
    try:
        compiled: Any = cfunc(
            types.void(types.int64), error_model="numpy", cache=folder is not None
        )(function)
    finally:
        numba_config.CACHE_DIR = before
    scratch = -(-scratch_bytes // 4096) * 4096
    return Kernel(name, compiled.address, scratch, compiled, compiled.cache_hits > 0)


def default_cache_dir() -> Path:
    return user_cache() / "numba"


@functools.cache
def _usable(cache_dir: Path | None) -> Path | None:
    """The folder for this version of kernels and compiler, or None if it cannot be written.

    numba itself compares only the kernel's own file, so the name covers all of them.
    """
    if cache_dir is None:
        return None
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = cache_dir / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
    except OSError as error:
        log.warning("Compiled kernels are not kept: %s.", error)
        return None
    return folder


class Team:
    """torch's OpenMP threads, lent to kernels."""

    def __init__(self, threads: int) -> None:
        self._parallel = _gomp_parallel() if threads > 1 else None
        self.threads = threads if self._parallel else 1

    def run(self, kernel: Callable[[int], None], address: int, block: int, parallel: bool) -> None:
        if parallel and self._parallel is not None:
            self._parallel(address, block, self.threads, 0)
        else:
            kernel(block)


def _gomp_parallel() -> Callable[..., None] | None:
    """``GOMP_parallel`` of this process's OpenMP library (GNU's; LLVM's has it too)."""
    torch.get_num_threads()  # loads the library
    try:
        with open("/proc/self/maps") as maps:
            mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return None
    for path in sorted(mapped):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            function = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
            if function is not None:
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                function.restype = None
                return function
    log.warning("No OpenMP library to share threads with: kernels run on one thread.")
    return None


class Launcher:
    """A kernel with an argument block of its own. Not for two threads at once."""

    def __init__(self, kernel: Kernel, team: Team, arguments: str) -> None:
        """``arguments`` are struct codes, q (integers, addresses) or d (numbers)."""
        layout = struct.Struct("=4q" + arguments)
        self._pack = layout.pack_into
        self._block = ctypes.create_string_buffer(layout.size)
        self._block_address = ctypes.addressof(self._block)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(kernel.address)
        self.kernel = kernel
        self._team = team
        self._memory = ctypes.create_string_buffer(kernel.scratch_bytes * team.threads + 64)
        self._scratch = -(-ctypes.addressof(self._memory) // 64) * 64

    def __call__(self, items: int, parallel: bool, *arguments: float) -> None:
        """Work through ``items`` work items, alone or on all threads."""
        self._pack(self._block, 0, 0, 0, self._scratch, items, *arguments)
        self._team.run(self._call, self.kernel.address, self._block_address, parallel)
