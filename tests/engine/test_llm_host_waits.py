"""No step makes the host wait for the GPU: the next one is planned while it computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_engine import TINY
from benchmarks.gpu_probes import SyncCounter, probed
from octavo import LLM, SamplingParams


@pytest.mark.gpu
def test_no_step_waits_for_the_device(tmp_path: Path) -> None:
    """Joins, mixed steps and decodes, greedy and drawn, while others arrive and leave."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    kinds = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 20, "seed": 3}]
    params = [SamplingParams(max_tokens=4 + i, ignore_eos=True, **kinds[i % 3]) for i in range(24)]
    prompts = [[7 * i + j for j in range(5 + 20 * i)] for i in range(24)]
    with LLM(
        str(tmp_path), load_format="dummy", skip_tokenizer_init=True, device="cuda",
        kv_cache_tokens=16384, max_num_batched_tokens=256, max_num_seqs=8,
    ) as llm:  # fmt: skip
        counter = SyncCounter(llm._loop.executor)
        with probed(llm._loop, counter):
            llm.generate(prompts, params, use_tqdm=False)
    assert len(counter.counts) > 20
    assert max(counter.counts) == 0, counter.first
