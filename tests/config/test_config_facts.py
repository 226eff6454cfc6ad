"""Host facts, read from a made-up machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.config.facts import Gpu, parse_gpus, read_host_facts

GIB = 2**30
MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 12582912 kB\n",
            "proc/cpuinfo": "processor: 0\nmodel name: Fast\nflags: avx2 fma\n\n"
            "processor: 1\nmodel name: Other\nflags: sse\n",
        },
    )


def test_a_machine_without_limits(machine: Path) -> None:
    facts = read_host_facts(machine)
    assert (facts.total_bytes, facts.available_bytes) == (16 * GIB, 12 * GIB)
    assert facts.cpu_name == "Fast"
    assert facts.isa == {"avx2", "fma"}
    assert facts.cpu_count == len(os.sched_getaffinity(0))
    assert facts.gpus == ()


def test_cgroup_v2_limits_of_a_parent_count(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        },
    )
    facts = read_host_facts(machine)
    assert (facts.total_bytes, facts.available_bytes) == (4 * GIB, 2 * GIB)
    assert facts.cpu_count == 1


def test_cgroup_v1_limits_count_and_no_limit_is_none(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n0::/\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
    )
    facts = read_host_facts(machine)
    assert (facts.total_bytes, facts.available_bytes) == (2 * GIB, GIB)
    assert facts.cpu_count == len(os.sched_getaffinity(0))


def test_a_path_of_the_host_inside_a_container_falls_back_to_the_mount(machine: Path) -> None:
    write(
        machine,
        {
            "proc/self/cgroup": "0::/docker/abc\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": "0\n",
        },
    )
    assert read_host_facts(machine).available_bytes == GIB


def test_gpus_come_from_nvidia_smi(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = machine / "bin/nvidia-smi"
    write(machine, {"bin/nvidia-smi": "#!/bin/sh\necho 'NVIDIA H200, 143771, 143000'\n"})
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert read_host_facts(machine).gpus == ()  # no driver
    (machine / "proc/driver/nvidia").mkdir(parents=True)
    assert read_host_facts(machine).gpus == (Gpu("NVIDIA H200", 143771 * MIB, 143000 * MIB),)
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert read_host_facts(machine).gpus == ()


@pytest.mark.parametrize(
    ("visible", "shown"),
    [(None, ""), ("2,0", "--id=2"), ("GPU-8a,GPU-9", "--id=GPU-8a"), ("MIG-7", "")],
)
def test_the_first_gpu_is_the_first_that_is_visible(
    visible: str | None, shown: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = '#!/bin/sh\ncase "$*" in *--id=*) id=${*##* };; esac\necho "$id, 100, 90"\n'
    tool = machine / "bin/nvidia-smi"
    write(machine, {"bin/nvidia-smi": script, "proc/driver/nvidia/version": ""})
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in read_host_facts(machine).gpus] == [shown]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_gpu_is_visible(visible: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = machine / "bin/nvidia-smi"
    write(
        machine,
        {"bin/nvidia-smi": "#!/bin/sh\necho 'L4, 100, 90'\n", "proc/driver/nvidia/version": ""},
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read_host_facts(machine).gpus == ()


def test_lines_without_numbers_are_left_out() -> None:
    table = "A100, [N/A], [N/A]\n\nL4, 100, 90\n"
    assert list(parse_gpus(table)) == [Gpu("L4", 100 * MIB, 90 * MIB)]


def test_this_machine_has_cores_and_memory() -> None:
    facts = read_host_facts()
    assert facts.cpu_count >= 1
    assert 0 < facts.available_bytes <= facts.total_bytes
