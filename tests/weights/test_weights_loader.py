"""Slots and streams: everything filled, nothing left over, heads tied as the config says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.distributed.comm import SingleCommunicator
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.api import Ops
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.loader import EMBEDDING, HEAD, WeightSlot, load_weights
from tests.fakes.tiny import ARCHITECTURES, make_tiny, make_tiny_gguf, tiny_config, tiny_shapes


def slots_of(tensors: dict[str, Tensor], into: dict[str, Tensor]) -> dict[str, WeightSlot]:
    def slot(name: str, shape: tuple[int, ...]) -> WeightSlot:
        return WeightSlot(shape, lambda tensor: into.__setitem__(name, tensor))

    return {name: slot(name, tuple(tensor.shape)) for name, tensor in tensors.items()}


def decoder(folder: Path, **overrides: Any) -> Decoder:
    spec = open_checkpoint(folder, overrides=overrides).spec
    return build_model(
        spec, Ops(), SingleCommunicator(), torch.float32, torch.device("cpu"), spec.max_position
    )


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(StartupError) as caught:
        open_checkpoint(folder, overrides=overrides).load(
            decoder(folder, **overrides).weight_slots()
        )
    return str(caught.value)


def edit(folder: Path, drop: str | None = None, **added: Tensor) -> None:
    """Change the weights of a tiny checkpoint; ``__`` in a keyword stands for a dot."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    if drop is not None:
        del tensors[drop]
    tensors |= {name.replace("__", "."): tensor for name, tensor in added.items()}
    save_file(tensors, file)


def test_every_slot_gets_its_tensor_once() -> None:
    tensors = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16)}
    into: dict[str, Tensor] = {}
    report = load_weights(slots_of(tensors, into), tensors.items())
    assert into == tensors
    assert (report.num_bytes, report.num_tensors) == (24 + 8, 2)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_models_want_exactly_what_checkpoints_hold(tmp_path: Path, family: str, tie: bool) -> None:
    """Both ways, for biases and norms of each family, from a folder and from GGUF."""
    folder = make_tiny(tmp_path / "m", family, tie=tie)
    slots = decoder(folder).weight_slots()
    assert {n: s.shape for n, s in slots.items()} == tiny_shapes(tiny_config(family, tie=tie))
    assert open_checkpoint(folder).load(slots).num_tensors == len(slots)
    make_tiny_gguf(tmp_path / "m.gguf", family, tie=tie)
    slots = decoder(tmp_path / "m.gguf").weight_slots()
    assert open_checkpoint(tmp_path / "m.gguf").load(slots).num_tensors == len(slots)


def test_llama_with_all_biases(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, attention_bias=True, mlp_bias=True)
    slots = decoder(folder).weight_slots()
    assert "model.layers.1.mlp.down_proj.bias" in slots
    assert open_checkpoint(folder).load(slots).num_tensors == len(slots)


def test_missing_tensor(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit(make_tiny(tmp_path), drop=name)
    message = refusal(tmp_path)
    assert name in message
    assert str(tmp_path / "model.safetensors") in message


def test_nothing_is_loaded_before_all_is_checked(tmp_path: Path) -> None:
    edit(make_tiny(tmp_path), drop="model.norm.weight")
    touched: list[str] = []
    slots = {
        name: WeightSlot(slot.shape, lambda tensor, name=name: touched.append(name))
        for name, slot in decoder(tmp_path).weight_slots().items()
    }
    with pytest.raises(StartupError, match=r"model\.norm\.weight is missing"):
        open_checkpoint(tmp_path).load(slots)
    assert touched == []


def test_extra_tensor(tmp_path: Path) -> None:
    edit(make_tiny(tmp_path), model__layers__2__mlp__up_proj__weight=torch.zeros(2))
    message = refusal(tmp_path)
    assert "model.layers.2.mlp.up_proj.weight is in the checkpoint but not in the model" in message
    assert str(tmp_path / "model.safetensors") in message


def test_many_names_are_cut_short(tmp_path: Path) -> None:
    make_tiny(tmp_path, layers=3)
    message = refusal(tmp_path, num_hidden_layers=2)
    assert "model.layers.2." in message
    assert "and 4 more are" in message


def test_mis_shaped_tensor(tmp_path: Path) -> None:
    edit(make_tiny(tmp_path), model__norm__weight=torch.zeros(63))
    message = refusal(tmp_path)
    for word in ("model.norm.weight", "[63]", "[64]", str(tmp_path / "model.safetensors")):
        assert word in message


def test_old_frequencies_are_ignored(tmp_path: Path) -> None:
    name = "model__layers__0__self_attn__rotary_emb__inv_freq"
    edit(make_tiny(tmp_path), **{name: torch.zeros(8)})
    assert open_checkpoint(tmp_path).load(decoder(tmp_path).weight_slots()).num_tensors > 0


def test_bin_is_checked_too(tmp_path: Path) -> None:
    tensors = load_file(make_tiny(tmp_path) / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    del tensors["model.norm.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "model.norm.weight is missing" in refusal(tmp_path)


# -- tied and doubled heads


def test_tied_without_a_head(tmp_path: Path) -> None:
    make_tiny(tmp_path, tie=True)
    slots = decoder(tmp_path).weight_slots()
    assert HEAD not in slots
    assert open_checkpoint(tmp_path).load(slots).num_tensors == len(slots)


@pytest.mark.parametrize("head_first", [True, False])
def test_equal_head_of_a_tied_model_is_left_out(
    caplog: pytest.LogCaptureFixture, head_first: bool
) -> None:
    weight = torch.arange(6.0).view(2, 3)
    order = [(EMBEDDING, weight), (HEAD, weight.clone())]
    into: dict[str, Tensor] = {}
    with caplog.at_level(logging.INFO, "octavo.weights.loader"):
        tensors = order[::-1] if head_first else order
        load_weights(slots_of({EMBEDDING: weight}, into), tensors, tied_head=True)
    assert list(into) == [EMBEDDING]
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert HEAD in record.getMessage()


def test_different_head_of_a_tied_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The config wins, as in transformers; it is never silent, and it can be overridden."""
    make_tiny(tmp_path, tie=True)
    edit(tmp_path, lm_head__weight=torch.ones(512, 64))
    open_checkpoint(tmp_path).load(decoder(tmp_path).weight_slots())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "lm_head.weight differs from the embedding" in record.getMessage()

    model = decoder(tmp_path, tie_word_embeddings=False)
    assert HEAD in model.weight_slots()
    open_checkpoint(tmp_path, overrides={"tie_word_embeddings": False}).load(model.weight_slots())


def test_head_missing_from_an_untied_model(tmp_path: Path) -> None:
    make_tiny(tmp_path, tie=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lm_head.weight is missing from the checkpoint (set tie_word_emb" in refusal(tmp_path)
