"""On a card: a step that finds no memory costs its own requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.core.errors import EngineFault
from tests.fakes.tiny import make_tiny

pytestmark = pytest.mark.gpu
MIB = 2**20
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = [7] * 4000


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny(tmp_path_factory.mktemp("memory") / "tiny", max_position=8192)
    options = {"kv_cache_memory": "256MiB", "swap_space": "64MiB", "max_num_seqs": 64}
    with LLM(str(folder), skip_tokenizer_init=True, device="cuda", **options) as llm:
        yield llm


def take_all() -> list[Tensor]:
    """All of the device's memory, but for pieces of less than 1 MiB."""
    held, size = [], torch.cuda.mem_get_info()[0]
    while size >= MIB:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def test_a_step_without_memory_ends_its_request_and_the_next_one_runs(llm: LLM) -> None:
    (before,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    torch.cuda.empty_cache()
    llm._loop.scheduler.reset_prefix_cache()
    held = take_all()
    with pytest.raises(EngineFault, match="ran out of memory") as caught:
        llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert caught.value.code == "out_of_memory"
    held.clear()
    (after,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.audit()
