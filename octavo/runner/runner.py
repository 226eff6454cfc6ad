"""Runner: one rank's worker. A StepPlan in, tokens out.

Knows slots and positions; knows neither requests nor policies.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import PromptLogprobs, StepPlan, StepResult, TokenLogprobs
from octavo.models.batch import Batch
from octavo.runner.inputs import InputBuilder, Rows, Samples, plan_rows
from octavo.runner.sampler import Sampler
from octavo.runner.slots import NewPages, Slots
from octavo.runner.swap import HostPages


class Model(Protocol):
    """What a runner needs of a model."""

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden], final norm applied."""

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, vocab] of hidden rows [N, hidden]."""


class Runner:
    """Executes plans in order. ``execute`` is forward, then sample.

    ``prompt_logprobs_chunk`` bounds the rows of prompt logits that exist at once, whatever
    the length of a prompt.
    """

    overlaps = False  # whether a launched plan runs beside the host

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        kv: tuple[Tensor, ...],
        windows: Sequence[int],
        slots: Slots,
        *,
        host_pages: HostPages | None = None,
        prompt_logprobs_chunk: int = 256,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._slots = slots
        self._inputs = InputBuilder(slots, windows, kv, kv[0].device)
        self._host_pages = host_pages
        self._prompt_top: dict[int, int] = {}  # slot -> top-k of prompt log-probabilities
        self._chunk = prompt_logprobs_chunk

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._update(plan)
        if plan.is_empty:
            return StepResult(plan.step)
        rows = plan_rows(plan)
        hidden = self.forward(rows)
        return self.sample(plan.step, rows, hidden)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan; what is returned waits for its result."""
        result = self.execute(plan)
        return lambda: result

    def captures(self) -> list[Callable[[], None]]:
        """What captures a graph each, the largest first. Only while no slot is in use."""
        return []

    def capture(self, progress: Callable[[float], None]) -> None:
        """Prepare for steps of every size, if there is anything to prepare."""
        captures = self.captures()
        for done, capture in enumerate(captures):
            progress(done / len(captures))
            capture()

    def rehearse(self) -> None:
        """Run once, uncaptured, each kind of graph whose kernels are not those of the others."""

    def control(self, name: str, args: Mapping[str, Any]) -> Any:
        raise KeyError(name)

    def reset(self) -> None:
        self._prompt_top.clear()
        self._sampler.reset()

    def close(self) -> None:
        """Give weights and KV cache back to the device; nothing can be executed afterwards."""
        for name in ("_model", "_sampler", "_inputs", "_host_pages"):
            self.__dict__.pop(name, None)
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()

    def forward(self, rows: Rows) -> Tensor:
        """Compute the rows' tokens: hidden states [T, hidden], keys and values to their pages."""
        return self._model.forward(self._inputs.build(rows))

    def sample(self, step: int, rows: Rows, hidden: Tensor) -> StepResult:
        """New ids for the rows that reach the end of their known tokens."""
        result = StepResult(step, prompt_logprobs=self._prompt_logprobs(rows, hidden))
        samples = Samples.of(rows)
        if len(samples.slots):
            logits = self._model.logits(hidden[torch.from_numpy(samples.tokens)])
            ids = self._sample(result, logits, samples)
            self._slots.put_ids(samples.slots, samples.positions, ids.numpy(force=True))
        return result

    def _sample(self, result: StepResult, logits: Tensor, samples: Samples) -> Tensor:
        """New ids int64 [N], on the device, and told in ``result``."""
        slots = samples.slots.tolist()
        indices = samples.positions - self._slots.prompt_len[samples.slots]
        output = self._sampler.sample(logits, slots, indices.tolist())
        result.faults = output.faults
        result.logprobs = output.logprobs
        add_ids(result, slots, output.ids.tolist())
        return output.ids

    def _update(self, plan: StepPlan) -> list[NewPages]:
        if self._host_pages is not None:
            self._host_pages.swap(plan)
        for slot in plan.leaves:
            self._sampler.leave(slot)
            self._prompt_top.pop(slot, None)
        for join in plan.joins:
            self._slots.join(join)
            self._sampler.join(join.slot, join.tokens, join.prompt_len, join.sampling)
            if join.sampling.prompt_logprobs is not None:
                self._prompt_top[join.slot] = join.sampling.prompt_logprobs
        return self._slots.append_pages(plan)

    def _prompt_logprobs(self, rows: Rows, hidden: Tensor) -> list[PromptLogprobs]:
        if not self._prompt_top:
            return []
        found = []
        for slot, start, count, end in zip(
            rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist(), rows.ends.tolist(),
            strict=True,
        ):  # fmt: skip
            top = self._prompt_top.get(slot)
            # The last prompt position predicts a new id, not a prompt token.
            wanted = min(start + count, int(self._slots.prompt_len[slot]) - 1) - start
            if top is not None and wanted > 0:
                first = end - count
                entries = self._chunked(slot, start, hidden[first : first + wanted], top)
                found.append(PromptLogprobs(slot, start + 1, entries))
        return found

    def _chunked(self, slot: int, start: int, hidden: Tensor, top: int) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        for at in range(0, len(hidden), self._chunk):
            part = hidden[at : at + self._chunk]
            first = start + at + 1
            targets = self._slots.tokens[slot, first : first + len(part)]
            logits = self._model.logits(part)
            entries += self._sampler.prompt_logprobs(logits, np.asarray(targets).tolist(), top)
        return entries


def add_ids(result: StepResult, slots: list[int], ids: list[int]) -> None:
    """One new id for each slot without a fault."""
    if result.faults:
        failed = {fault.slot for fault in result.faults}
        kept = [slot not in failed for slot in slots]
        slots, ids = list(compress(slots, kept)), list(compress(ids, kept))
    result.slots, result.ids = slots, ids
    result.num_ids = [1] * len(slots)
