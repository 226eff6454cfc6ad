"""The same ids on a GPU as on a CPU, in fp32, whatever the loop.

A difference is forgiven where the reference's two best scores (perturbed ones, for a sample) are
less than ``TIE`` apart: rounding decides there.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from octavo.core.validation import choice_seed
from octavo.tools.bench.named import lengths_w1

TIE = 1e-4
TINY: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.0, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 0.9, "min_p": 0.02},
)

Ids = list[list[int]]
Gaps = dict[tuple[int, int], float]
"""By a row's seed and the index of its output token: by how much the best score leads."""


def compare_ids(device: str, count: int = 8) -> dict[str, Any]:
    """Share of ``count`` requests of W1's lengths whose ids are equal or forgiven: overlapped with
    graphs, in the plain loop, by the CPU reference. And how many were forgiven."""
    ins, outs = lengths_w1(count)
    draw = random.Random(1)
    prompts = [[draw.randrange(TINY["vocab_size"]) for _ in range(n)] for n in ins]
    gaps: Gaps = {}
    with noted_gaps(gaps):
        reference = _generate(prompts, outs, device="cpu", ops_backend="reference")
    overlapped = _generate(prompts, outs, device=device)
    plain = _generate(prompts, outs, device=device, enforce_eager=True, async_scheduling=False)
    report: dict[str, Any] = {}
    for name, ids in (("overlapped = cpu", reference), ("overlapped = plain", plain)):
        verdicts = [
            judge(i, a, b, gaps) for i, (a, b) in enumerate(zip(overlapped, ids, strict=True))
        ]
        report[name] = sum(verdict != "differ" for verdict in verdicts) / count
        report[f"{name}, forgiven"] = verdicts.count("forgiven")
    return report


def _generate(prompts: Ids, outs: Sequence[int], **options: Any) -> Ids:
    from octavo import LLM, SamplingParams

    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, seed=i, **KINDS[i % len(KINDS)])
        for i, n in enumerate(outs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        with LLM(
            folder, load_format="dummy:normal", skip_tokenizer_init=True, dtype="float32",
            kv_cache_tokens=32768, max_num_batched_tokens=512, max_num_seqs=16, **options,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm.audit()
    return [output.outputs[0].token_ids for output in outputs]


def noted_gaps(gaps: Gaps) -> Any:
    """Inside the block, the reference's draws note their gaps."""
    from octavo.ops.sampling.reference import SamplingOps, score_gap

    draw = SamplingOps.draw

    def noting(self: Any, logits: Any, params: Any) -> Any:
        keys = zip(params.seed.tolist(), params.index.tolist(), strict=True)
        gaps.update(zip(keys, score_gap(logits, params).tolist(), strict=True))
        return draw(self, logits, params)

    return mock.patch.object(SamplingOps, "draw", noting)


def judge(
    seed: int, a: Sequence[int], b: Sequence[int], gaps: Mapping[tuple[int, int], float]
) -> str:
    """ "equal", "forgiven" or "differ": of two outputs of the request with that seed."""
    if a == b:
        return "equal"
    index = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
    row = choice_seed(seed, 0)
    signed = row - 2**64 if row >= 2**63 else row  # as a tensor keeps it
    return "forgiven" if gaps[signed, index] < TIE else "differ"
