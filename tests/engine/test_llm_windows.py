"""Sliding and full layers in one engine: a tiny Gemma 3 against transformers, past its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.capacity import cache_layout
from octavo.engine.outputs import RequestOutput
from octavo.weights.checkpoint import open_checkpoint
from tests.fakes.loop import AdmitAll
from tests.fakes.tiny import make_tiny

NEW_TOKENS, WINDOW = 24, 24
TIE = 1e-4  # where the reference's own two best logits are closer, either may be chosen
TIGHT = {"kv_cache_tokens": 288, "max_num_batched_tokens": 50}
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sliding layers to one full one: four groups of one layer."""
    made = make_tiny(
        tmp_path_factory.mktemp("llm") / "gemma",
        "gemma3_text",
        layers=4,
        sliding_window_pattern=4,
        sliding_window=WINDOW,
        vocab=300,
    )
    blocks = cache_layout(open_checkpoint(made).spec).blocks
    assert [(block.layers, block.window) for block in blocks] == [
        ((0,), WINDOW), ((1,), WINDOW), ((2,), WINDOW), ((3,), 0),
    ]  # fmt: skip
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def prompts() -> list[list[int]]:
    """Of 5 to 200 tokens; every other one begins as the one before it."""
    generator = torch.Generator().manual_seed(3)
    made: list[list[int]] = []
    for index, length in enumerate((5, 23, 24, 25, 60, 90, 130, 200)):
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        made.append(made[-1][: length // 2] + ids[length // 2 :] if index % 2 else ids)
    return made


@torch.inference_mode()
def assert_greedy(reference: Any, outputs: list[RequestOutput]) -> None:
    """One pass over prompt and answer gives the reference's choice after each of our ids."""
    for prompt, output in zip(prompts(), outputs, strict=True):
        ids = output.outputs[0].token_ids
        assert len(ids) == NEW_TOKENS
        logits = reference(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        for token, row in zip(ids, logits, strict=True):
            if token != int(row.argmax()):
                first, second = row.topk(2).values.tolist()
                assert first - second < TIE
                break


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},
        {"block_size": 32, "enable_prefix_caching": False},
        {**TIGHT, "preemption_mode": "recompute"},
        {**TIGHT, "preemption_mode": "swap", "swap_space": "8MiB"},
    ],
    ids=["whole prompts", "small chunks", "pages of 32", "recompute", "swap"],
)
def test_ids_are_those_of_transformers(
    folder: Path, reference: Any, options: dict[str, Any]
) -> None:
    given = {"kv_cache_tokens": 4096, "max_num_seqs": 8, "max_model_len": 256, "cpu_threads": 1}
    with LLM(str(folder), **{**given, **options}) as llm:
        if mode := options.get("preemption_mode"):
            llm._loop.scheduler._admission = AdmitAll()
        first = llm.generate(prompts(), PARAMS, use_tqdm=False)
        again = llm.generate(prompts(), PARAMS, use_tqdm=False)
        llm.audit()
        stats = llm._loop.stats()
        assert stats.pages_referenced == 0
        if mode is not None:
            assert getattr(stats, f"preemptions_{mode}") > 0
    assert_greedy(reference, first)
    assert_greedy(reference, again)
    hits = sum(output.num_cached_tokens or 0 for output in again)
    assert (hits > 0) == options.get("enable_prefix_caching", True)
