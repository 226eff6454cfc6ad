"""Facts about this machine that resolving needs: cores, memory, instruction sets, GPUs.

No torch: reading them takes milliseconds. All paths are Linux's; elsewhere the answers fall back
to what the standard library knows.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.core.capacity import MemoryUse

CGROUP_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"
NVIDIA_SMI_SECONDS = 20
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """``use`` is known once an engine has measured what it takes."""

    name: str
    total_bytes: int
    free_bytes: int
    use: MemoryUse | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """``cpu_count``: cores this process may use (affinity and cgroup quota). ``isa``: flags of
    the CPU as the kernel names them. ``available_bytes``: what can be allocated without swapping,
    within the cgroup's limit."""

    cpu_count: int
    total_bytes: int
    available_bytes: int
    cpu_name: str = ""
    isa: frozenset[str] = frozenset()
    gpus: tuple[Gpu, ...] = ()


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Facts of the machine whose ``/proc`` and ``/sys`` lie under ``root``."""
    meminfo = _fields(root / "proc/meminfo")
    total = _kib(meminfo.get("MemTotal"))
    available = _kib(meminfo.get("MemAvailable")) or total
    limit, used = _cgroup_memory(root)
    if limit is not None:
        total, available = min(total, limit), min(available, max(limit - used, 0))
    cpuinfo = _fields(root / "proc/cpuinfo")
    return HostFacts(
        cpu_count=_cpu_count(root),
        total_bytes=total,
        available_bytes=available,
        cpu_name=cpuinfo.get("model name", platform.machine()),
        isa=frozenset((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()),
        gpus=_gpus(root),
    )


def _cpu_count(root: Path) -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [quota for quota in _cpu_quotas(root) if quota > 0]
    return max(1, int(min([allowed or 1, *quotas])))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Cores that the cgroups above this process allow."""
    for folder in _cgroup_folders(root, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _cgroup_memory(root: Path) -> tuple[int | None, int]:
    """The tightest memory limit above this process, and what is used under it (without page
    cache that the kernel would give back)."""
    best: tuple[int | None, int] = (None, 0)
    for folder in _cgroup_folders(root, "memory"):
        for limit_file, used_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read(folder / limit_file), _read(folder / used_file)
            if not limit.isdigit() or not used.isdigit() or int(limit) > CGROUP_UNLIMITED:
                continue
            cache = _fields(folder / "memory.stat", separator=" ").get(cache_key, "0")
            found = int(limit), int(used) - int(cache)
            if best[0] is None or found[0] - found[1] < best[0] - best[1]:
                best = found
    return best


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders, from this process's cgroup up to the root, of cgroup v2 and of a v1 controller."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mount / controller if controllers else mount
        folder = top / path.lstrip("/")
        # In a container the path may be the host's: then only the mount itself exists.
        yield from (here for here in (folder, *folder.parents) if here.is_relative_to(top))


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """NVIDIA GPUs that the driver shows to this process; none without a driver."""
    if not (root / "proc/driver/nvidia").exists():
        return ()
    program, first = shutil.which("nvidia-smi"), _first_visible()
    if program is None or first == "":
        return ()
    command = [program, "--query-gpu=name,memory.total,memory.free"]
    command += ["--format=csv,noheader,nounits", *([f"--id={first}"] if first else [])]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(parse_gpus(answer.stdout))


def _first_visible() -> str | None:
    """The GPU that CUDA calls number 0, which nvidia-smi knows nothing of; None: as it comes;
    "": none may be used. Parts of a MIG device have no figures of their own here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    first = visible.partition(",")[0].strip()
    if first.startswith("MIG"):
        return None
    return "" if first == "-1" else first


def parse_gpus(table: str) -> Iterator[Gpu]:
    """Lines of "name, total MiB, free MiB"; lines without numbers (MIG parents) are left out."""
    for line in table.splitlines():
        name, _, rest = line.partition(",")
        total, _, free = (part.strip() for part in rest.partition(","))
        if total.isdigit() and free.isdigit():
            yield Gpu(name.strip(), int(total) * MIB, int(free) * MIB)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _fields(path: Path, separator: str = ":") -> dict[str, str]:
    """ "key: value" lines; the first of a key counts (``/proc/cpuinfo`` repeats them a core)."""
    fields: dict[str, str] = {}
    for line in _read(path).splitlines():
        key, _, value = line.partition(separator)
        fields.setdefault(key.strip(), value.strip())
    return fields


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0
