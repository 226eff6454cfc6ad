"""OverlappedRunner: the runner of a GPU, whose steps are started before earlier ones have ended.

A step is two graphs: the trunk up to the hidden states that sample, of decodes alone or of mixed
rows, then head and sampler. Steps of more tokens, whose launches cost nothing beside their work,
run the same code launch by launch. Sampled ids stay on the device for the next step and come back
behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import StepPlan, StepResult
from octavo.runner.device import ON_DEVICE, DeviceState, StepInputs
from octavo.runner.graphs import Graphs, distinct_sizes, graph_sizes, token_sizes
from octavo.runner.inputs import Rows, Samples, plan_rows
from octavo.runner.runner import Model, Runner, add_ids
from octavo.runner.sampler import Sampler, non_finite
from octavo.runner.slots import NewPages, Slots
from octavo.runner.swap import HostPages


class OverlappedRunner(Runner):
    """Up to ``depth`` launched plans may wait for their results. Steps that compute prompts are
    captured up to ``max_graph_tokens``; if that is None, no step is.

    Requests that bias, penalise or report log-probabilities are sampled by ``sampler``, which waits
    for the device; all others by the device alone.
    """

    overlaps = True

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        kv: tuple[Tensor, ...],
        windows: Sequence[int],
        slots: Slots,
        *,
        hidden: tuple[int, torch.dtype],
        max_tokens: int,
        depth: int = 2,
        max_graph_tokens: int | None = 0,
        host_pages: HostPages | None = None,
        prompt_logprobs_chunk: int = 256,
    ) -> None:
        """``hidden``: size and type of a hidden state; ``max_tokens`` of a step."""
        super().__init__(
            model, sampler, kv, windows, slots,
            host_pages=host_pages, prompt_logprobs_chunk=prompt_logprobs_chunk,
        )  # fmt: skip
        device = kv[0].device
        max_num_seqs, max_pages = slots.tables[0].shape
        self._draw = sampler.ops.draw
        self._state = DeviceState(max_num_seqs, len(windows), max_pages, device)
        self._steps = StepInputs(
            self._state, kv, list(windows), slots.page_size, max_num_seqs,
            max(max_tokens, max_num_seqs), depth=depth, device=device,
        )  # fmt: skip
        self._last_hidden = torch.zeros(max_num_seqs, hidden[0], dtype=hidden[1], device=device)
        self._graphs = Graphs(device)
        self._max_num_seqs = max_num_seqs
        self._decode_sizes: list[int] = []
        self._mixed_sizes: list[int] = []
        if max_graph_tokens is not None:
            self._decode_sizes = graph_sizes(max_num_seqs)
            self._mixed_sizes = token_sizes(min(max_graph_tokens, max_tokens))

    def captures(self) -> list[Callable[[], None]]:
        """One of each family at a time, so that all but the first take about as much memory."""
        pairs = zip_longest(reversed(self._decode_sizes), reversed(self._mixed_sizes))
        return [partial(self._capture, decode, mixed) for decode, mixed in pairs]

    @torch.inference_mode()
    def rehearse(self) -> None:
        for size in distinct_sizes(self._decode_sizes):
            self._stage_padding(size)
            self._head(size)
            self._decode(size)
        for size in distinct_sizes(self._mixed_sizes):
            self._stage_padding(size)
            self._mixed(size)

    @torch.inference_mode()
    def _capture(self, decode: int | None, mixed: int | None) -> None:
        if decode is not None:
            self._stage_padding(decode)
            self._graphs.capture("head", decode, partial(self._head, decode))
            self._graphs.capture("decode", decode, partial(self._decode, decode))
        if mixed is not None:
            self._stage_padding(mixed)
            self._graphs.capture("mixed", mixed, partial(self._mixed, mixed))

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a plan; what is returned waits for its result."""
        self._update(plan)
        if plan.is_empty:
            return lambda: StepResult(plan.step)
        rows = plan_rows(plan)
        samples = Samples.of(rows)
        result = StepResult(plan.step)
        if not self._replay(rows, samples):
            hidden = self._forward(rows, samples)
            if self._wants_prompt(rows):
                result.prompt_logprobs = self._prompt_logprobs(rows, hidden)
        if not len(samples.slots):
            return self._pending(result, None)
        # Only the device knows them, for now.
        self._slots.put_ids(samples.slots, samples.positions, ON_DEVICE)
        if self._sampler.is_plain(samples.slots):
            return self._sample_plain(result, samples)
        return self._sample_any(result, samples)

    def reset(self) -> None:
        if self._last_hidden.is_cuda:  # steps that nobody waits for still read what was staged
            torch.cuda.synchronize(self._last_hidden.device)
        super().reset()

    def close(self) -> None:
        for name in ("_graphs", "_steps", "_state", "_last_hidden", "_draw"):
            self.__dict__.pop(name, None)
        super().close()

    # -- the trunk ----------------------------------------------------------------------------

    def _replay(self, rows: Rows, samples: Samples) -> bool:
        """Run the graph of these rows; False: they have none."""
        num_tokens = int(rows.ends[-1])
        name = "decode" if num_tokens == len(samples.slots) else "mixed"
        size = self._graphs.size_for(name, num_tokens)
        if size is None or self._wants_prompt(rows):
            return False
        self._stage(rows, samples, self._num_rows(size), size)
        self._graphs.run(name, size)
        return True

    def _num_rows(self, num_tokens: int) -> int:
        """Rows of a graph of so many tokens."""
        return min(num_tokens, self._max_num_seqs)

    def _wants_prompt(self, rows: Rows) -> bool:
        if not self._prompt_top:
            return False
        asked = np.isin(rows.slots, list(self._prompt_top))
        return bool((asked & (rows.starts < self._slots.prompt_len[rows.slots] - 1)).any())

    def _stage(self, rows: Rows, samples: Samples, num_rows: int, num_tokens: int) -> None:
        row_slots, positions = self._inputs.expand(rows)
        self._steps.stage(
            (samples.slots, samples.positions, samples.tokens),
            (rows.slots, rows.starts + rows.counts, rows.ends),
            self._slots.tokens[row_slots, positions],
            num_rows,
            num_tokens,
        )

    def _stage_padding(self, size: int) -> None:
        none = np.zeros(0, np.int64)
        triple = (none, none, none)
        self._steps.stage(triple, triple, np.zeros(0, np.int32), self._num_rows(size), size)

    def _decode(self, size: int) -> None:
        hidden = self._model.forward(self._steps.batch(size, size, 1))
        self._last_hidden[:size].copy_(hidden)

    def _mixed(self, size: int) -> None:
        num_rows = self._num_rows(size)
        hidden = self._model.forward(self._steps.batch(num_rows, size, size))
        chosen = hidden.index_select(0, self._steps.sample_tokens[:num_rows])
        self._last_hidden[:num_rows].copy_(chosen)

    def _forward(self, rows: Rows, samples: Samples) -> Tensor:
        """Hidden states of all tokens if some of a prompt are asked for, else those that sample."""
        num_rows, num_tokens = len(rows.slots), int(rows.ends[-1])
        self._stage(rows, samples, num_rows, num_tokens)
        batch = self._steps.batch(num_rows, num_tokens, int(rows.counts.max()))
        count = len(samples.slots)
        if self._wants_prompt(rows):
            hidden = self._model.forward(batch)
            chosen = hidden.index_select(0, self._steps.sample_tokens[:count])
        else:
            # Padded to a graph's size: a product of another size may be a kernel that is yet to be
            # loaded, and loading waits for the device.
            count = self._graphs.size_for("head", count) or count
            batch.wanted = self._steps.wanted(batch, count)
            hidden = chosen = self._model.forward(batch)
        self._last_hidden[:count].copy_(chosen)
        return hidden

    # -- head and sampler ---------------------------------------------------------------------

    def _head(self, size: int) -> None:
        params = self._steps.draw_params(size)
        logits = self._model.logits(self._last_hidden[:size]).contiguous()
        ids, status = self._draw(logits, params)
        self._steps.keep(ids, status)

    def _sample_plain(self, result: StepResult, samples: Samples) -> Callable[[], StepResult]:
        count = len(samples.slots)
        size = self._graphs.size_for("head", count)
        if size is None:
            self._head(count)
        else:
            self._graphs.run("head", size)
        return self._pending(result, self._steps.returned(count), samples.slots)

    def _sample_any(self, result: StepResult, samples: Samples) -> Callable[[], StepResult]:
        logits = self._model.logits(self._last_hidden[: len(samples.slots)])
        ids = self._sample(result, logits, samples)
        self._steps.keep(ids, torch.zeros_like(ids, dtype=torch.int8))
        return self._pending(result, None)

    def _pending(
        self,
        result: StepResult,
        returned: tuple[NDArray[np.int32], NDArray[np.int32]] | None,
        slots: NDArray[np.int64] | None = None,
    ) -> Callable[[], StepResult]:
        """Waits for all that was launched so far, then reads what came back: ids and status."""
        event: Any = None
        if self._last_hidden.is_cuda:
            event = torch.cuda.Event()
            event.record()

        def wait() -> StepResult:
            if event is not None:
                event.synchronize()
            if returned is not None and slots is not None:
                ids, status = returned
                if status.any():
                    result.faults = [non_finite(slot) for slot in slots[status != 0].tolist()]
                add_ids(result, slots.tolist(), ids.tolist())
            return result

        return wait

    def _update(self, plan: StepPlan) -> list[NewPages]:
        self._state.join(plan.joins)
        new_pages = super()._update(plan)
        for new in new_pages:
            self._state.add_pages(new)
        return new_pages
