"""Steps of a start: the worst one asks for everything, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from octavo.core.groups import layer_groups
from octavo.core.sampling import MAX_LOGPROBS
from octavo.ops.api import Ops
from octavo.ops.sampling.reference import SamplingOps
from octavo.runner.graphs import distinct_sizes, graph_sizes
from octavo.runner.kv import allocate_kv
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler
from octavo.runner.slots import Slots
from octavo.runner.warmup import StepLimits, plain_plans, worst_plans
from tests.fakes.tiny_models import tiny_model, tiny_spec

CPU = torch.device("cpu")
SPEC = tiny_spec("qwen3")
PAGE = 16


def runner(limits: StepLimits) -> tuple[Runner, Sampler]:
    groups = layer_groups(SPEC)
    kv = allocate_kv(
        2, [len(group.layers) for group in groups], SPEC.num_kv_heads, PAGE, SPEC.head_dim,
        torch.float32, CPU, Ops(),
    )  # fmt: skip
    sampler = Sampler(
        max_num_seqs=limits.max_num_seqs, vocab_size=SPEC.vocab_size, device=CPU, ops=SamplingOps()
    )
    slots = Slots(limits.max_num_seqs, limits.max_model_len, PAGE, len(groups))
    return Runner(tiny_model(SPEC, ops=Ops()), sampler, kv, [0] * len(groups), slots), sampler


@pytest.mark.parametrize(
    ("limits", "each"),
    [
        (StepLimits(3, 24, 64, prompt_logprobs_chunk=8), 8),
        (StepLimits(3, 400, 64), 64),  # no more than a context
        (StepLimits(5, 5, 64), 1),
    ],
)
def test_the_worst_step_asks_for_all_there_is_of_every_row(limits: StepLimits, each: int) -> None:
    made, sampler = runner(limits)
    step, leave, prompt, last = worst_plans(limits)
    assert step.counts == [each] * limits.max_num_seqs
    assert step.num_tokens <= max(limits.max_num_batched_tokens, limits.max_num_seqs)
    result = made.execute(step)
    assert not result.faults
    assert result.slots == list(range(limits.max_num_seqs))
    assert {len(entries[0].ids) for entries in result.logprobs.values()} == {MAX_LOGPROBS + 1}
    assert len(result.logprobs) == limits.max_num_seqs
    assert sampler._penalties.in_use
    made.execute(leave)
    assert not sampler._penalties.in_use
    (found,) = made.execute(prompt).prompt_logprobs
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    assert len(found.entries) == min(limits.prompt_logprobs_chunk, longest - 1)
    made.execute(last)
    assert not sampler._penalties.in_use


def test_plain_steps_keep_within_the_limits() -> None:
    limits = StepLimits(8, 24, 16)
    made, _ = runner(limits)
    made.overlaps = True  # as if a device worked beside the host
    plans = plain_plans(made, limits)
    assert max(plan.num_tokens for plan in plans) == 16  # one prompt, no longer than a context
    results = [made.execute(plan) for plan in plans]
    assert [bool(result.ids) for result in results] == [not plan.is_empty for plan in plans]


def test_sizes_that_kernels_may_differ_in() -> None:
    assert distinct_sizes([]) == []
    assert distinct_sizes([1]) == [1]
    assert distinct_sizes(graph_sizes(20)) == [1, 2, 4, 8, 16, 20]
    sizes = distinct_sizes(graph_sizes(512))
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 40, 64, 72, 128, 136, 256, 288, 512]
