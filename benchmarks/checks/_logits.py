"""Logits of tiny random models of each family, through pages, odd chunks and prefix hits."""

from __future__ import annotations

import torch

from benchmarks.check import Check
from octavo.ops.select import select_ops
from tests.fakes.paged import Row, model_kv, paged_batch, paged_logits
from tests.fakes.tiny_models import tiny_model
from tests.models.test_logits_equal_transformers import (
    CASES,
    CHUNKS,
    PROMPTS,
    largest_error,
    transformers_logits,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
BOUND = 1e-4


def measure(check: Check) -> None:
    ops = select_ops("cpu", torch.float32)
    for family in FAMILIES:
        errors = []
        for name, case in CASES.items():
            if case.spec.family == family:
                model = tiny_model(case.spec, ops=ops)
                found = paged_logits(model, case.spec, PROMPTS, CHUNKS)
                expected = transformers_logits(case.spec, PROMPTS, **case.config)
                errors.append(largest_error(found, expected))
                errors.append(_prefix_hit(name))
        check.line(f"max_abs_logit_error_{family}", max(errors), "<=", BOUND, raw=errors)


@torch.inference_mode()
def _prefix_hit(name: str) -> float:
    """Error of a request that reads two pages which another request wrote."""
    spec, config = CASES[name].spec, CASES[name].config
    first = PROMPTS[0]
    second = first[:32] + PROMPTS[2][:9]
    model = tiny_model(spec, ops=select_ops("cpu", torch.float32))
    kv = model_kv(spec, num_pages=6, page_size=16)
    model.forward(paged_batch([Row(first, 0, [5, 2, 3])], spec, kv, page_size=16))
    batch = paged_batch([Row(second[32:], 32, [5, 2, 4])], spec, kv, page_size=16)
    logits = model.logits(model.forward(batch))
    return largest_error([logits], [transformers_logits(spec, [second], **config)[0][32:]])
