"""Collectives, and whole models, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.core.spec import LayerSpec, ModelSpec
from octavo.distributed.comm import Communicator, SingleCommunicator
from tests.fakes.paged import paged_logits
from tests.fakes.ranks import run_ranks
from tests.fakes.tiny_models import tiny_model, tiny_spec

PROMPTS = [[3, 99, 130, 41, 5, 77, 8, 64, 2, 17, 90, 1, 33, 7, 58, 21, 11, 4, 101], [130, 0, 66]]
CHUNKS = [[13, 5, 1], [1, 1, 1]]
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
SPECS: dict[str, ModelSpec] = {
    # The vocabulary of 131 is padded to 132 in each.
    "llama": tiny_spec("llama"),
    "llama-replicated-kv": tiny_spec("llama", num_kv_heads=1, **BIASES),
    "qwen2": tiny_spec("qwen2", tie_embeddings=True),
    "qwen2-replicated-kv": tiny_spec("qwen2", num_kv_heads=1),
    "gemma3": tiny_spec(
        "gemma3_text", tie_embeddings=True, layers=(LayerSpec("sliding", window=8), LayerSpec())
    ),
}


def logits(spec: ModelSpec, comm: Communicator) -> Tensor:
    heads = max(1, spec.num_kv_heads // comm.size)
    model = tiny_model(spec, comm=comm)
    return torch.cat(paged_logits(model, spec, PROMPTS, CHUNKS, num_kv_heads=heads))


def collectives(comm: Communicator) -> dict[str, Tensor]:
    """A few results, by the name of the collective; rank r contributes r + 1 and its like."""
    mine = torch.arange(6.0).view(2, 3) + 10 * comm.rank
    return {
        "sum": comm.all_reduce(mine.clone()),
        "sum_bf16": comm.all_reduce(mine.to(torch.bfloat16)),
        "rows": comm.all_gather(mine, dim=0),
        "columns": comm.all_gather(mine, dim=-1),
        "transposed": comm.all_gather(mine.t(), dim=1),
        "from_1": comm.broadcast(mine.clone(), source=1),
    }


def rank_work(comm: Communicator, folder: Path) -> None:
    found = {name: logits(spec, comm) for name, spec in SPECS.items()}
    save_file(found | collectives(comm), folder / f"{comm.rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What each of the two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, rank_work, folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_those_of_one_rank(ranks: list[dict[str, Tensor]], name: str) -> None:
    alone = logits(SPECS[name], SingleCommunicator())
    largest = float(alone.abs().max())
    assert largest > 1
    for found in ranks:  # sums in another order: the error is one of the size of the terms
        torch.testing.assert_close(found[name], alone, rtol=0, atol=1e-5 * largest)


def test_collectives(ranks: list[dict[str, Tensor]]) -> None:
    first = torch.arange(6.0).view(2, 3)
    second = first + 10
    for found in ranks:
        assert torch.equal(found["sum"], first + second)
        assert torch.equal(found["sum_bf16"], (first + second).to(torch.bfloat16))
        assert torch.equal(found["rows"], torch.cat((first, second)))
        assert torch.equal(found["columns"], torch.cat((first, second), dim=1))
        assert torch.equal(found["transposed"], torch.cat((first.t(), second.t()), dim=1))
        assert torch.equal(found["from_1"], second)


def test_one_rank_costs_nothing() -> None:
    comm, x = SingleCommunicator(), torch.ones(2)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm.all_reduce(x) is x
    assert comm.all_gather(x) is x
    assert comm.broadcast(x) is x
