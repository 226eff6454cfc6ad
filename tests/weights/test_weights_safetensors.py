"""Weight files of a folder: whole or refused, and read from the map."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.weights.checkpoint import open_checkpoint
from tests.fakes.tiny import make_tiny, make_tiny_shards

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4831938\n"
)


def refusal(folder: Path) -> str:
    """The one sentence that opening ``folder`` ends with, before any tensor is read."""
    with pytest.raises(StartupError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def loaded(folder: Path) -> dict[str, Tensor]:
    return dict(open_checkpoint(folder).tensors())


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_file(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny(tmp_path / "m", dtype=dtype)
    assert equal(loaded(folder), load_file(folder / "model.safetensors"))


def test_shards_are_the_single_file(tmp_path: Path) -> None:
    single, sharded = make_tiny(tmp_path / "a"), make_tiny_shards(tmp_path / "b")
    assert not (sharded / "model.safetensors").exists()
    assert equal(loaded(sharded), loaded(single))
    (sharded / "model.safetensors.index.json").unlink()
    assert equal(loaded(sharded), loaded(single)), "numbered shards do without their index"


def test_mistrals_second_copy_is_not_read(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", "mistral")
    names = set(loaded(folder))
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert set(loaded(folder)) == names


def test_tensors_lie_in_the_memory_map(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    tensors = loaded(folder)
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [
        line.split()[0].split("-")
        for line in lines
        if line.endswith(str(folder / "model.safetensors"))
    ]
    spans = [(int(low, 16), int(high, 16)) for low, high in ranges]
    assert all(any(low <= t.data_ptr() < high for low, high in spans) for t in tensors.values())


def test_dtype_comes_from_the_file_when_the_config_has_none(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", dtype="bfloat16")
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).spec.dtype == "bfloat16"
    assert open_checkpoint(folder, overrides={"dtype": "float32"}).spec.dtype == "float32"


# -- broken shards


def shard(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def test_cut_shard(tmp_path: Path) -> None:
    file = shard(make_tiny_shards(tmp_path))
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    message = refusal(tmp_path)
    assert file.name in message
    assert f"{len(data)} bytes expected, {len(data) - 100} found" in message


@pytest.mark.parametrize("kept", [0, 7, 8, 60])
def test_shard_cut_in_its_header(tmp_path: Path, kept: int) -> None:
    file = shard(make_tiny_shards(tmp_path))
    file.write_bytes(file.read_bytes()[:kept])
    message = refusal(tmp_path)
    assert f"{file} is cut off" in message
    assert f"{kept} found" in message


def test_shard_with_bytes_left_over(tmp_path: Path) -> None:
    file = shard(make_tiny_shards(tmp_path))
    size = file.stat().st_size
    with file.open("ab") as opened:
        opened.write(b"12345")
    assert f"{file} is too long: {size} bytes expected, {size + 5} found" in refusal(tmp_path)


@pytest.mark.parametrize("with_index", [True, False])
def test_missing_shard(tmp_path: Path, with_index: bool) -> None:
    file = shard(make_tiny_shards(tmp_path))
    file.unlink()
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    assert f"{file} is missing (file 2 of 3)" in refusal(tmp_path)


def test_lfs_pointer(tmp_path: Path) -> None:
    file = shard(make_tiny_shards(tmp_path))
    file.write_bytes(LFS_POINTER)
    message = refusal(tmp_path)
    assert f"{file} is a Git LFS pointer" in message
    assert f"4831938 bytes expected, {len(LFS_POINTER)} found" in message


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    make_tiny_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = shard(tmp_path).name
    path.write_text(json.dumps(index))
    assert f"tensor model.extra.weight is not in {shard(tmp_path).name}" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 3, ""])
def test_index_may_not_leave_the_folder(tmp_path: Path, name: object) -> None:
    make_tiny_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert repr(name) in refusal(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (make_tiny(tmp_path) / "model.safetensors").unlink()
    assert "holds no weights" in refusal(tmp_path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 300), byte=st.integers(0, 255), cut=st.integers(0, 300))
def test_any_damage_to_a_header_is_one_sentence(
    tmp_path: Path, at: int, byte: int, cut: int
) -> None:
    """Flip a byte and drop some: what opens still loads, what does not names the file."""
    file = tmp_path / "model.safetensors"
    if not (tmp_path / "config.json").exists():
        make_tiny(tmp_path, layers=1)
        file.rename(tmp_path / "whole")
    data = bytearray((tmp_path / "whole").read_bytes())
    data[at] = byte
    file.write_bytes(data[:-cut] if cut % 3 == 0 and cut else data)
    try:
        loaded(tmp_path)
    except StartupError as error:
        message = str(error)
    else:
        return
    assert str(file) in message


# -- pytorch_model.bin


def make_bin(folder: Path, **options: bool) -> dict[str, Tensor]:
    make_tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)
    return tensors


@pytest.mark.parametrize("zipped", [True, False])
def test_bin(tmp_path: Path, zipped: bool) -> None:
    tensors = make_bin(tmp_path, _use_new_zipfile_serialization=zipped)
    assert equal(loaded(tmp_path), tensors)


class Attack:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("attacked"),))


def test_bin_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bin(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Attack()}, 2))
    with pytest.raises(StartupError, match=r"pytorch_model\.bin"):
        loaded(tmp_path)
    assert not (tmp_path / "attacked").exists()


def test_cut_bin(tmp_path: Path) -> None:
    make_bin(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupError, match=rf"{file.name} \({file.stat().st_size} bytes\)"):
        loaded(tmp_path)


def test_safetensors_are_preferred_to_bin(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert "model.norm.weight" in loaded(tmp_path)
