"""Which backend a machine gets, and how its kernels come to be there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.ops.api import Ops
from octavo.ops.cpu import isa as isa_module
from octavo.ops.cpu import jit
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.isa import detect_isa
from octavo.ops.cpu.memory import load_int64, take
from octavo.ops.cpu.warm import warm_kernels
from octavo.ops.select import select_ops

AVX2 = "fpu avx avx2 fma f16c bmi1 bmi2"
AVX512 = AVX2 + " avx512f avx512bw avx512dq avx512vl avx512cd"
AMX = AVX512 + " avx512_bf16 amx_tile amx_bf16"


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def cpuinfo(folder: Path, *flags: str) -> Path:
    path = folder / "cpuinfo"
    path.write_text("".join(f"processor : {i}\nflags\t\t: {f}\n\n" for i, f in enumerate(flags)))
    return path


@pytest.mark.parametrize(
    ("flags", "level", "lanes", "bf16_dot"),
    [
        ([AMX], "amx", 16, True),
        ([AVX512], "avx512", 16, False),
        ([AVX512 + " avx512_bf16"], "avx512", 16, True),
        ([AVX2], "avx2", 8, False),
        (["fpu sse2"], "generic", 4, False),
        ([AVX512, AVX2], "avx2", 8, False),  # what every core has counts
        ([], "generic", 4, False),
    ],
)
def test_isa_is_what_the_machine_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], level: str, lanes: int,
    bf16_dot: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(isa_module.platform, "machine", lambda: "x86_64")
    isa = detect_isa(cpuinfo=cpuinfo(tmp_path, *flags))
    assert (isa.level, isa.lanes, isa.bf16_dot, isa.native) == (level, lanes, bf16_dot, True)
    assert str(isa).startswith(level)


def test_isa_may_be_forced_down_but_not_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa_module.platform, "machine", lambda: "x86_64")
    path = cpuinfo(tmp_path, AVX512 + " avx512_bf16")
    assert detect_isa("avx2", cpuinfo=path).native is False
    assert detect_isa("avx512", cpuinfo=path).bf16_dot
    with pytest.raises(StartupError, match=r"amx was asked for.*only avx512"):
        detect_isa("amx", cpuinfo=path)
    with pytest.raises(StartupError, match="auto or one of generic, avx2, avx512, amx, not 'sse9'"):
        detect_isa("sse9", cpuinfo=path)
    assert detect_isa(cpuinfo=tmp_path / "missing").level == "generic"


def test_select() -> None:
    assert isinstance(select_ops("cpu", torch.bfloat16), CpuOps)
    assert type(select_ops("cpu", torch.float32, backend="reference")) is Ops
    assert type(select_ops("cpu", torch.float16)) is Ops
    ops = select_ops("cpu", torch.float32, threads=1)
    assert torch.get_num_threads() == 1
    assert ops.describe().startswith(f"attention numba {detect_isa()}, 1 thread; linear oneDNN")
    select_ops("cpu", torch.float32)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "cuda9"}, "not 'cuda9'"),
        ({"threads": 0}, "at least 1, not 0"),
        ({"dtype": torch.float16, "backend": "cpu"}, "not torch.float16"),
        ({"device": "meta", "backend": "cpu"}, "not run on device meta"),
        ({"cpu_isa": "mmx"}, "not 'mmx'"),
    ],
)
def test_select_refuses(arguments: dict[str, object], message: str) -> None:
    given = {"device": "cpu", "dtype": torch.float32, **arguments}
    device, dtype = given.pop("device"), given.pop("dtype")
    with pytest.raises(StartupError, match=message):
        select_ops(device, dtype, **given)  # type: ignore[arg-type]


def spec() -> ModelSpec:
    return ModelSpec(
        family="qwen3", architecture="", num_layers=1, hidden_size=32, intermediate_size=48,
        num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=10, max_position=64, norm_eps=1e-5,
        rope=RopeSpec(1e4, 16), layers=(LayerSpec(),), qk_norm=True,
    )  # fmt: skip


def test_warm_kernels_come_from_the_cache_the_second_time(tmp_path: Path) -> None:
    def warm() -> CpuOps:
        seen: list[tuple[int, int]] = []
        ops = CpuOps(isa=detect_isa(), threads=1, cache_dir=tmp_path)
        made = warm_kernels(
            ops, spec(), dtype=torch.bfloat16, page_size=16,
            progress=lambda done, total: seen.append((done, total)),
        )  # fmt: skip
        assert seen == [(done, made) for done in range(made + 1)]
        return ops

    first, second = warm(), warm()
    assert {kernel.from_cache for kernel in first.kernels} == {False}
    assert {kernel.from_cache for kernel in second.kernels} == {True}


def test_a_warm_backend_compiles_nothing_more() -> None:
    ops = CpuOps(isa=detect_isa(), threads=1, cache_dir=None)
    warm_kernels(ops, spec(), dtype=torch.float32, page_size=16)
    before = len(ops.kernels)
    ops.rms_norm(torch.ones(2, 32), torch.ones(32), 1e-5)
    ops.silu_mul(torch.ones(2, 96))
    assert len(ops.kernels) == before
    assert warm_kernels(Ops(), spec(), dtype=torch.float32, page_size=16) == 0


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    def kernel(block):  # type: ignore[no-untyped-def]
        take(block, 0)

    compiled = jit.compile_kernel(kernel, "unwritable", cache_dir=tmp_path / "file" / "below")
    assert compiled.address
    assert "not kept" in caplog.text


def test_kernels_run_alone_where_no_openmp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_gomp_parallel", lambda: None)
    team = jit.Team(4)
    assert team.threads == 1

    def kernel(block):  # type: ignore[no-untyped-def]
        take(load_int64(block, jit.FIRST_ARGUMENT), 0)

    calls = torch.zeros(1, dtype=torch.int64)
    launcher = jit.Launcher(jit.compile_kernel(kernel, "alone", cache_dir=None), team, "q")
    launcher(1, True, calls.data_ptr())
    assert calls.item() == 1
