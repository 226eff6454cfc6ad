"""Batch throughput in bf16 against transformers' static batch of 16, interleaved in one run.

Both run in one process, and so under the bound that Octavo sets on OpenMP's spinning; on a quiet
machine that costs transformers a few per cent (docs/log.md), little beside the bound of 1.5.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch

from benchmarks.check import Check
from benchmarks.checks._reference import load_transformers

REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 64, 128, 128
STATIC_BATCH = 16
REPETITIONS = 3


def measure(check: Check) -> None:
    from octavo import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    model = load_transformers(torch.bfloat16)
    ours, theirs = [], []
    with LLM(dtype="bfloat16") as llm:
        llm.generate(_prompts(4, 99), SamplingParams(max_tokens=4), use_tqdm=False)
        _static(model, _prompts(2, 99), 4)
        for repetition in range(REPETITIONS):
            prompts = _prompts(REQUESTS, repetition)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            ours.append(REQUESTS * NEW_TOKENS / (time.perf_counter() - start))
            assert all(len(o.outputs[0].token_ids) == NEW_TOKENS for o in outputs)
            start = time.perf_counter()
            _static(model, prompts[:STATIC_BATCH], NEW_TOKENS)
            theirs.append(STATIC_BATCH * NEW_TOKENS / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    check.note(octavo_output_tok_s=ours, transformers_output_tok_s=theirs)
    check.line("throughput_ratio_to_static_16", statistics.median(ratios), ">=", 1.5, raw=ratios)


def _prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 49_000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


@torch.inference_mode()
def _static(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    ids = torch.tensor(prompts)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
        min_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert made.shape == (len(prompts), PROMPT_TOKENS + new_tokens)
