"""Random weights: a function of seed and name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.errors import StartupError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.dummy import MAX_DRAWS, DummySource
from octavo.weights.loader import WeightSlot
from tests.fakes.tiny import make_tiny, make_tiny_gguf, tiny_config, tiny_shapes

SHAPES = {"a.weight": (64, 32), "b.weight": (64, 32), "model.norm.weight": (32,)}


def draw(load_format: str = "dummy", seed: int = 0, names: tuple[str, ...] = tuple(SHAPES)):
    return dict(DummySource({n: SHAPES[n] for n in names}, load_format, seed).tensors())


def test_uniform() -> None:
    for tensor in draw().values():
        assert tensor.abs().max() <= 1e-3
    assert draw()["a.weight"].std() == pytest.approx(1e-3 / 3**0.5, rel=0.05)


def test_normal_with_norms_of_one() -> None:
    tensors = draw("dummy:normal")
    assert tensors["a.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert (tensors["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("load_format", ["dummy", "dummy:normal"])
def test_a_tensor_depends_on_seed_and_name_only(load_format: str) -> None:
    all_three = draw(load_format, 7)
    alone = draw(load_format, 7, names=("b.weight",))
    assert torch.equal(all_three["b.weight"], alone["b.weight"])
    assert not torch.equal(all_three["a.weight"], all_three["b.weight"])
    assert not torch.equal(draw(load_format, 8)["b.weight"], alone["b.weight"])


def test_large_tensors_repeat_without_equal_rows() -> None:
    (tensor,) = (t for _, t in DummySource({"w": (1200, 1000)}, "dummy", 0).tensors())
    flat = tensor.view(-1)
    assert torch.equal(flat[MAX_DRAWS:], flat[: len(flat) - MAX_DRAWS])
    assert len(torch.unique(tensor, dim=0)) == 1200


def test_only_a_config_is_needed(tmp_path: Path) -> None:
    make_tiny(tmp_path, dtype="bfloat16")
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path, "dummy:normal", seed=3)
    assert checkpoint.total_bytes == checkpoint.spec.num_params * 2
    got: dict[str, torch.Tensor] = {}
    slots = {
        name: WeightSlot(shape, lambda tensor, name=name: got.__setitem__(name, tensor))
        for name, shape in tiny_shapes(tiny_config()).items()
    }
    checkpoint.load(slots, torch.bfloat16)
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    assert {n: tuple(t.shape) for n, t in got.items()} == tiny_shapes(tiny_config())


def test_a_gguf_files_shape_without_its_weights(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(tmp_path / "m.gguf", "dummy")
    ((name, tensor),) = checkpoint.tensors(shapes={"x": (2, 2)})
    assert (name, tuple(tensor.shape)) == ("x", (2, 2))


def test_unknown_load_format(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    with pytest.raises(StartupError, match="dummy:normal, not 'bitsandbytes'"):
        open_checkpoint(tmp_path, "bitsandbytes")
    with pytest.raises(StartupError, match=r"load_format is gguf, but .* is safetensors"):
        open_checkpoint(tmp_path, "gguf")
