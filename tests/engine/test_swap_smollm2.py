"""The embedded model under swap: the same answers in a small pool, and nothing computed twice."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.stats import SchedulerStats
from octavo.engine.outputs import CompletionOutput
from tests.fakes.loop import AdmitAll

pytestmark = pytest.mark.slow

TIE = 1e-4  # where the reference's two best logits are closer, either may be chosen
TOPICS = ("bread", "rivers", "glaciers", "chess", "bees", "the moon", "violins", "salt", "maps")
PROMPTS = [f"Write a short letter to a friend about {topic}. Dear friend," for topic in TOPICS]
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)


def answers(**options: Any) -> tuple[list[CompletionOutput], SchedulerStats, str]:
    with LLM(dtype="float32", cpu_threads=1, enable_prefix_caching=False, **options) as llm:
        llm._loop.scheduler._admission = AdmitAll()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        llm.audit()
        note = llm.info.notes["scheduling"]
        return [output.outputs[0] for output in outputs], llm._loop.stats(), note


def decided_by(answer: CompletionOutput, index: int) -> float:
    """How far the two best log-probabilities were apart."""
    assert answer.logprobs is not None
    best, second, *_ = sorted((e.logprob for e in answer.logprobs[index].values()), reverse=True)
    return best - second


def test_smollm2_answers_the_same_while_its_pages_come_and_go() -> None:
    reference, ample, _ = answers(kv_cache_tokens=2048, max_model_len=256)
    found, tight, note = answers(
        kv_cache_tokens=256, max_model_len=256, preemption_mode="swap", swap_space="64MiB"
    )
    assert ample.preemptions == 0
    assert tight.preemptions == tight.preemptions_swap > 0
    assert tight.recomputed_tokens == 0
    assert tight.computed_tokens == ample.computed_tokens
    assert tight.host_pages_free == tight.host_pages_total == (64 * 2**20) // (16 * 46080)
    assert "preemption by swap, 91 host pages (0.06 GiB)" in note
    for ours, theirs in zip(found, reference, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        index = next((i for i, (a, b) in pairs if a != b), None)
        assert index is None or decided_by(theirs, index) < TIE
