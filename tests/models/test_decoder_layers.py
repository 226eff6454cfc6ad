"""Shard rules, names, and what a spec may not ask for. No checkpoint, one process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.core.spec import LayerSpec
from octavo.distributed.comm import SingleCommunicator
from octavo.models.batch import Overlay, Wanted
from octavo.models.linear import ColumnLinear, Part, Place, RowLinear, rank_share
from octavo.models.registry import FAMILIES, build_model
from octavo.models.vocabulary import VocabularyTable
from octavo.ops.api import Ops
from tests.fakes.paged import Row, model_kv, paged_batch
from tests.fakes.tiny_models import random_tensor, tiny_model, tiny_spec

CPU = torch.device("cpu")


@dataclass
class PretendCommunicator(SingleCommunicator):
    """A rank among several whose collectives nobody answers: enough to build and load."""

    rank: int = 0
    size: int = 1


def place(rank: int = 0, size: int = 1) -> Place:
    return Place(Ops(), PretendCommunicator(rank, size), torch.float32, CPU)


@pytest.mark.parametrize(
    ("count", "size", "shares"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_rank_share(count: int, size: int, shares: list[tuple[int, int]]) -> None:
    found = [
        rank_share("num_kv_heads", count, PretendCommunicator(rank, size), replicate=True)
        for rank in range(size)
    ]
    assert [(share.start, share.stop) for share in found] == shares


def test_an_uneven_split_is_refused_with_the_number() -> None:
    with pytest.raises(StartupError, match=r"num_heads is 9 and cannot .* over 2 ranks"):
        rank_share("num_heads", 9, PretendCommunicator(0, 2))
    with pytest.raises(StartupError, match="num_kv_heads is 3"):
        rank_share("num_kv_heads", 3, PretendCommunicator(0, 4), replicate=True)


def test_merged_columns_of_all_ranks_are_the_whole() -> None:
    first, second = random_tensor("a", (4, 3)), random_tensor("b", (2, 3))
    x = torch.randn(5, 3)
    parts = []
    for rank in range(2):
        here = place(rank, 2)
        shares = [rank_share("rows", size, here.comm) for size in (4, 2)]
        layer = ColumnLinear((Part("a", 4, shares[0]), Part("b", 2, shares[1])), 3, here)
        slots = dict(layer.weight_slots())
        assert {name: slot.shape for name, slot in slots.items()} == {
            "a.weight": (4, 3),
            "b.weight": (2, 3),
        }
        slots["a.weight"].load(first)
        slots["b.weight"].load(second)
        layer.after_load()
        parts.append(layer.apply(x).split([2, 1], dim=-1))
    torch.testing.assert_close(torch.cat([a for a, _ in parts], -1), x @ first.t())
    torch.testing.assert_close(torch.cat([b for _, b in parts], -1), x @ second.t())


def test_rows_of_all_ranks_sum_to_the_whole_with_the_bias_once() -> None:
    weight, bias = random_tensor("o", (3, 4)), torch.randn(3)
    x = torch.randn(5, 4)
    total = torch.zeros(5, 3)
    for rank in range(2):
        here = place(rank, 2)
        columns = rank_share("columns", 4, here.comm)
        layer = RowLinear("o", 3, 4, columns, here, bias=True)
        slots = dict(layer.weight_slots())
        assert {name: slot.shape for name, slot in slots.items()} == {
            "o.weight": (3, 4),
            "o.bias": (3,),
        }
        slots["o.weight"].load(weight)
        slots["o.bias"].load(bias)
        layer.after_load()
        total += layer.apply(x[:, columns.start : columns.stop].contiguous())
    torch.testing.assert_close(total, x @ weight.t() + bias)


@pytest.mark.parametrize(("vocab", "size"), [(7, 2), (7, 3), (2, 4)])
def test_vocabulary_is_padded_with_zeros(vocab: int, size: int) -> None:
    weight = random_tensor("table", (vocab, 3))
    tables = [VocabularyTable("table", vocab, 3, place(rank, size)) for rank in range(size)]
    for table in tables:
        [(name, slot)] = table.weight_slots()
        assert (name, slot.shape) == ("table", (vocab, 3))
        slot.load(weight)
    whole = torch.cat([table.weight for table in tables])
    assert torch.equal(whole[:vocab], weight)
    assert not whole[vocab:].any()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_slots_have_checkpoint_names_and_full_shapes_on_every_rank(family: str) -> None:
    spec = tiny_spec(family)
    whole, half = (
        build_model(spec, Ops(), PretendCommunicator(size - 1, size), torch.float32, CPU, 64)
        for size in (1, 2)
    )
    shapes = {name: slot.shape for name, slot in whole.weight_slots().items()}
    assert shapes == {name: slot.shape for name, slot in half.weight_slots().items()}
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (32, 48)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (48, 104)
    assert shapes["lm_head.weight"] == (131, 48)
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) == (family == "qwen2")
    normed = family in ("qwen3", "gemma3_text")
    assert ("model.layers.0.self_attn.q_norm.weight" in shapes) == normed
    output_norm = "model.layers.0.post_feedforward_layernorm.weight"
    assert (output_norm in shapes) == (family == "gemma3_text")


def test_a_tied_head_asks_for_no_tensor() -> None:
    spec = tiny_spec(tie_embeddings=True)
    model = build_model(spec, Ops(), SingleCommunicator(), torch.float32, CPU, 64)
    assert "lm_head.weight" not in model.weight_slots()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "mamba", "architecture": "MambaForCausalLM"}, "MambaForCausalLM is not supp"),
        ({"activation": "gelu"}, "activation must be silu or gelu_tanh, not gelu"),
        ({"layers": (LayerSpec(), LayerSpec(mlp="moe"))}, "layer 1 is full and moe"),
        ({"layers": (LayerSpec("mla"), LayerSpec())}, "layer 0 is mla and dense"),
        ({"family": "qwen2"}, "qkv_bias = True, not False"),
    ],
)
def test_a_spec_that_cannot_run_is_refused(changes: dict, message: str) -> None:
    spec = replace(tiny_spec(), **changes)
    with pytest.raises(StartupError, match=message):
        build_model(spec, Ops(), SingleCommunicator(), torch.float32, CPU, 64)


def test_a_family_that_overflows_float16_is_not_run_in_it() -> None:
    def build(family: str) -> None:
        spec = tiny_spec(family)
        build_model(spec, Ops(), SingleCommunicator(), torch.float16, CPU, 64)

    build("llama")
    with pytest.raises(StartupError, match="overflows float16; use --dtype bfloat16"):
        build("gemma3_text")


def one_row(tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states of the tokens, and of tokens whose last embedding is laid over."""
    spec = tiny_spec()
    model = tiny_model(spec)
    found = []
    for ids, overlaid in ((tokens, False), ([*tokens[:-1], 0], True)):
        kv = model_kv(spec, num_pages=2, page_size=16)
        batch = paged_batch([Row(ids, 0, [1])], spec, kv, page_size=16)
        if overlaid:
            table = random_tensor("model.embed_tokens.weight", (spec.vocab_size, 48))
            batch.overlay = Overlay(table[tokens[-1:]], torch.tensor([len(tokens) - 1]))
        found.append(model.forward(batch))
    return found[0], found[1]


def test_an_overlay_replaces_embeddings() -> None:
    plain, overlaid = one_row([5, 77, 130, 9])
    torch.testing.assert_close(plain, overlaid)


def test_bf16_stays_bf16_until_the_logits() -> None:
    spec = tiny_spec("qwen3")
    wide, narrow = tiny_model(spec), tiny_model(spec, dtype=torch.bfloat16)
    logits = []
    for model, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        kv = model_kv(spec, num_pages=3, page_size=16, dtype=dtype)
        hidden = model.forward(paged_batch([Row(range(20), 0, [2, 1])], spec, kv, page_size=16))
        assert hidden.dtype == dtype
        logits.append(model.logits(hidden))
    assert logits[1].dtype == torch.float32
    assert (logits[0] - logits[1]).abs().mean() < 0.1


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_wanted_tokens_have_the_hidden_states_they_have_among_all(family: str) -> None:
    spec = tiny_spec(family, layers=(LayerSpec(mixer="sliding", window=5), LayerSpec()))
    model = tiny_model(spec)
    rows = [Row([3, 9, 27, 81, 4, 12], 0, [1, 2]), Row([5], 0, [3]), Row([6, 7], 0, [4])]
    whole, part = (
        paged_batch(rows, spec, model_kv(spec, num_pages=5, page_size=4), page_size=4)
        for _ in range(2)
    )
    lasts = [replace(row, tokens=row.tokens[-1:], start=row.context - 1) for row in rows[::2]]
    groups = paged_batch(lasts, spec, part.kv, page_size=4).groups
    part.wanted = Wanted(torch.tensor([5, 8], dtype=torch.int32), groups)
    with torch.inference_mode():
        torch.testing.assert_close(model.forward(part), model.forward(whole)[[5, 8]])
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(part.kv, whole.kv, strict=True)
    )
