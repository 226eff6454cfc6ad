"""Tiny models with random weights: specs, and fillers that give every rank the same tensors."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.distributed.comm import Communicator, SingleCommunicator
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops.api import Ops

FIXED: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "gemma3_text": {
        "qk_norm": True,
        "norm_offset": 1.0,
        "output_norms": True,
        "activation": "gelu_tanh",
        "embedding_scale": 48**0.5,
        "attention_scale": 20**-0.5,
        "rope": RopeSpec(theta=1e6, dim=16),
        "local_rope": RopeSpec(theta=10_000.0, dim=16),
    },
}


def tiny_spec(family: str = "llama", **changes: Any) -> ModelSpec:
    """2 layers, 4 query heads on 2 KV heads of 16, odd vocabulary; ``changes`` are spec fields."""
    spec = ModelSpec(
        family=family,
        architecture=f"{family.capitalize()}ForCausalLM",
        num_layers=2,
        hidden_size=48,
        intermediate_size=104,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=131,
        max_position=512,
        norm_eps=1e-5,
        rope=RopeSpec(theta=10_000.0, dim=16),
        layers=(LayerSpec(), LayerSpec()),
        dtype="float32",
    )
    return replace(spec, **{**FIXED.get(family, {}), **changes})


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A function of name, shape and seed: norms around 1, biases around 0, the rest scaled so
    that activations keep their size and logits are of order 1 to 5."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    if len(shape) == 1 and name.endswith("weight"):
        return 0.5 + torch.rand(shape, generator=generator)
    scale = 0.3 if len(shape) == 1 else 1.5 * shape[1] ** -0.5
    return torch.randn(shape, generator=generator) * scale


def tiny_model(
    spec: ModelSpec,
    *,
    seed: int = 0,
    comm: Communicator | None = None,
    ops: Ops | None = None,
    dtype: torch.dtype = torch.float32,
    max_position: int = 512,
) -> Decoder:
    """A loaded model of random weights, the same ones whatever the number of ranks."""
    model = build_model(
        spec,
        ops or Ops(),
        comm or SingleCommunicator(),
        dtype,
        torch.device("cpu"),
        max_position,
    )
    for name, slot in model.weight_slots().items():
        slot.load(random_tensor(name, slot.shape, seed))
    model.after_load()
    return model
