"""What this machine's cores can do."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import StartupError

LEVELS = ("generic", "avx2", "avx512", "amx")  # each includes the ones before it

# What a level needs, as /proc/cpuinfo names it.
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_AMX = _AVX512 | {"amx_tile", "amx_bf16", "avx512_bf16"}


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set level and what our kernels derive from it.

    ``lanes`` fp32 numbers a vector register; ``registers`` of them; ``bf16_dot``: pairs of bf16
    are multiplied and summed into fp32 by one instruction. ``native`` is false when the level
    was forced below the machine's own.
    """

    level: str
    lanes: int
    registers: int
    bf16_dot: bool
    native: bool = True

    def __str__(self) -> str:
        return f"{self.level} (bf16 dot products)" if self.bf16_dot else self.level


def detect_isa(forced: str = "auto", *, cpuinfo: Path = Path("/proc/cpuinfo")) -> Isa:
    """The machine's level, or ``forced`` (one of LEVELS) if the machine has it.

    Raises :class:`StartupError` for an unknown level and for one that this machine would answer
    with an illegal instruction.
    """
    flags = _cpu_flags(cpuinfo)
    best = _best_level(flags)
    if forced == "auto":
        return _make(best, flags, native=True)
    if forced not in LEVELS:
        raise StartupError(f"CPU ISA must be auto or one of {', '.join(LEVELS)}, not {forced!r}.")
    if LEVELS.index(forced) > LEVELS.index(best):
        raise StartupError(f"CPU ISA {forced} was asked for, but this machine has only {best}.")
    return _make(forced, flags, native=forced == best)


def _make(level: str, flags: frozenset[str], *, native: bool) -> Isa:
    if level in ("amx", "avx512"):
        return Isa(level, 16, 32, native and "avx512_bf16" in flags, native)
    if level == "avx2":
        return Isa(level, 8, 16, False, native)
    return Isa(level, 4, 16, False, native)


def _best_level(flags: frozenset[str]) -> str:
    if platform.machine() not in ("x86_64", "AMD64"):
        return "generic"
    for level, needed in (("amx", _AMX), ("avx512", _AVX512), ("avx2", _AVX2)):
        if needed <= flags:
            return level
    return "generic"


def _cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """Features that every core has; empty where there is no such file."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = [frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")]
    return frozenset.intersection(*found) if found else frozenset()
