"""Warm-up: run every kind of step once, so that no request pays for a compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.core.plan import Join, StepPlan
from octavo.core.request import Sampling
from octavo.core.sampling import MAX_LOGPROBS
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler

WARM_ROWS = 4


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may be asked for: sequences, tokens, tokens of one sequence; and prompt positions
    whose logits exist at once."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prompt_logprobs_chunk: int = 256

    def __str__(self) -> str:
        return f"{self.max_num_batched_tokens} tokens of {self.max_num_seqs} sequences"


def warm_up(
    runner: Runner,
    sampler: Sampler,
    limits: StepLimits,
    *,
    progress: Callable[[str, float], None],
) -> None:
    """Run every kind of step that a request may meet, plain ones and the worst."""
    progress("Warming up", 0.0)
    sampler.warm_up()
    plans = plain_plans(runner, limits)
    if runner.overlaps:
        plans += worst_plans(limits)
    for done, plan in enumerate(plans, 1):
        runner.execute(plan)
        progress("Warming up", done / len(plans))


def rehearse(runner: Runner, limits: StepLimits) -> None:
    """Launch what plain steps and graphs launch, of every kind, without regard to results."""
    for plan in (*plain_plans(runner, limits), *full_plans(limits, Sampling())):
        runner.execute(plan)
    runner.rehearse()
    runner.reset()


def plain_plans(runner: Runner, limits: StepLimits) -> list[StepPlan]:
    """Steps whose rows do nothing but draw. KV pages are only touched where the null page is."""
    plans = _plans(min(WARM_ROWS, limits.max_num_seqs), _longest(limits))
    if runner.overlaps:  # the kernels of long prompts are others than those of short ones
        plans += _one_prompt(len(plans), _longest(limits), Sampling(temperature=0.0))
    return plans


def worst_plans(limits: StepLimits) -> list[StepPlan]:
    """Full steps whose requests ask for all that sampling can do: nothing takes more memory. Then
    one that finds a whole chunk of a prompt's log-probabilities."""
    sampling = Sampling(top_p=0.9, top_k=50, presence_penalty=0.5, logprobs=MAX_LOGPROBS)
    prompt = replace(sampling, prompt_logprobs=MAX_LOGPROBS)
    tokens = min(limits.prompt_logprobs_chunk + 1, _longest(limits))
    return [*full_plans(limits, sampling), *_one_prompt(2, tokens, prompt)]


def full_plans(limits: StepLimits, sampling: Sampling) -> list[StepPlan]:
    """A step of as many sequences, and as many tokens, as there may be; then all leave."""
    rows = limits.max_num_seqs
    each = min(max(1, limits.max_num_batched_tokens // rows), limits.max_model_len)
    slots = list(range(rows))
    joins = [Join(slot, [0] * each, each, sampling) for slot in slots]
    return [
        StepPlan(0, slots, [0] * rows, [each] * rows, [True] * rows, joins=joins),
        StepPlan(1, leaves=slots),
    ]


def _plans(rows: int, max_tokens: int) -> list[StepPlan]:
    """A prompt a row, a mixed step, decodes, then everybody leaves.

    All pages are the null page: its contents are never read by a request.
    """
    slots = list(range(rows))
    prompt = max(1, min(16, max_tokens // rows))
    samplings = [Sampling(temperature=0.0), Sampling(top_p=0.9, top_k=20), Sampling(), Sampling()]
    joins = [Join(slot, [0] * prompt, prompt, samplings[slot % len(samplings)]) for slot in slots]

    def decode(step: int, start: int) -> StepPlan:
        return StepPlan(step, slots, [start] * rows, [1] * rows, [True] * rows)

    return [
        StepPlan(0, slots, [0] * rows, [prompt] * rows, [True] * rows, joins=joins),
        StepPlan(1, slots, [prompt] * rows, [1] * rows, [True] * rows),
        decode(2, prompt + 1),
        StepPlan(3, leaves=slots),
    ]


def _longest(limits: StepLimits) -> int:
    """Tokens of one prompt that a step may have."""
    return min(limits.max_num_batched_tokens, limits.max_model_len)


def _one_prompt(step: int, tokens: int, sampling: Sampling) -> list[StepPlan]:
    join = Join(0, [0] * tokens, tokens, sampling)
    return [
        StepPlan(step, [0], [0], [tokens], [True], joins=[join]),
        StepPlan(step + 1, leaves=[0]),
    ]
