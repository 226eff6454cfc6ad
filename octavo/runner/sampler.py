"""Sampler: the logits of a step become its ids.

One call a step, vectorised over its rows. A batch of greedy requests costs one scan of the
logits; each feature costs only the rows that use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Fault, TokenLogprobs
from octavo.core.request import Sampling
from octavo.ops.sampling import select_sampling_ops
from octavo.ops.sampling.reference import NON_FINITE, OK, SamplingOps, TopLogprobs
from octavo.runner.sampling_state import DrawState, Penalties, SlotEdits

SORTED_ROWS = 64  # whose log-probabilities are found at once
LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot say

_FAULTS = {
    "non_finite_logits": "The model's logits are not finite for this request.",
    "no_token_allowed": "The request's masks and biases leave no token that may be generated.",
}


def non_finite(slot: int) -> Fault:
    code = "non_finite_logits"
    return Fault(slot, code, _FAULTS[code])


@dataclass(slots=True)
class SampleOutput:
    """``ids`` int64 [N] on the device, arbitrary in rows that have a fault."""

    ids: Tensor
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by slot
    faults: list[Fault] = field(default_factory=list)


class Sampler:
    """Samples for up to ``max_num_seqs`` slots.

    Log-probabilities are those of the model: of the logits as given, before any mask,
    penalty or temperature.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        ops: SamplingOps | None = None,
    ) -> None:
        """``ops``: how to sample; the fastest for the device unless given."""
        self._ops = ops or select_sampling_ops(device)
        self._vocab_size = vocab_size
        self._device = device
        self._draws = DrawState(max_num_seqs, device)
        self._penalties = Penalties(max_num_seqs, vocab_size, device)
        self._edits: dict[int, SlotEdits] = {}
        self._tops: dict[int, int] = {}  # log-probabilities to report, by slot

    @property
    def ops(self) -> SamplingOps:
        return self._ops

    def warm_up(self) -> None:
        self._ops.warm_up()

    def join(self, slot: int, tokens: list[int], prompt_len: int, sampling: Sampling) -> None:
        """A request takes a slot; ``tokens`` are its prompt and what it generated before."""
        self.leave(slot)
        self._draws.join(slot, sampling)
        if Penalties.asked_for(sampling):
            self._penalties.join(slot, tokens, prompt_len, sampling)
        if SlotEdits.asked_for(sampling):
            edits = SlotEdits(tokens, sampling, self._vocab_size, self._device)
            if not edits.is_neutral:
                self._edits[slot] = edits
        if sampling.logprobs is not None:
            self._tops[slot] = sampling.logprobs

    def leave(self, slot: int) -> None:
        self._penalties.leave(slot)
        self._edits.pop(slot, None)
        self._tops.pop(slot, None)

    def reset(self) -> None:
        """Every slot is empty again, whatever an interrupted call left."""
        self._penalties.reset()
        self._edits.clear()
        self._tops.clear()

    def is_plain(self, slots: NDArray[np.int64]) -> bool:
        """Whether these slots only draw: no masks, biases, penalties or log-probabilities."""
        if not (self._edits or self._tops or self._penalties.in_use):
            return True
        known = slots.tolist()
        return not (
            self._edited_rows(known)
            or self._penalties.rows(known)
            or any(slot in self._tops for slot in known)
        )

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: list[int], indices: list[int]) -> SampleOutput:
        """One id for each row; the slots' state moves on by it.

        ``logits`` fp32 [N, vocab] are overwritten where a request changes its own. ``indices``:
        how many ids the request of each row has generated before.
        """
        logits = logits.contiguous()
        slot_array = np.array(slots, np.int64)
        params = self._draws.gather(slot_array, indices)
        edited = self._edited_rows(slots)
        penalised = self._penalties.rows(slots)
        asked = [row for row, slot in enumerate(slots) if slot in self._tops] if self._tops else []
        raw = self._raw_rows(logits, asked, keep=bool(edited or penalised))
        broken = self._check(logits, edited)
        if edited:
            self._edit(logits, edited, [slots[r] for r in edited], [indices[r] for r in edited])
        if penalised:
            self._ops.penalise(
                logits, self._penalties.counts, self._penalties.gather(slot_array, penalised)
            )
        ids, status = self._ops.draw(logits, params)
        output = SampleOutput(ids)
        failed = self._faults(output, slots, status.numpy(force=True), edited, broken)
        if asked:
            self._report(output, raw, asked, slots, failed)
        self._accept(ids, slots, edited, penalised, failed)
        return output

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, targets: list[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of ``targets``, one a row of ``logits`` fp32 [N, vocab]."""
        return self._best(logits.contiguous(), targets, [top] * len(targets))

    # -- masks and biases -------------------------------------------------------------------

    def _edited_rows(self, slots: list[int]) -> list[int]:
        if not self._edits:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._edits]

    def _check(self, logits: Tensor, rows: list[int]) -> NDArray[np.bool_]:
        """Which rows are not finite already, for a mask may hide it."""
        if not rows:
            return np.zeros(0, np.bool_)
        at = torch.tensor(rows, dtype=torch.int64, device=self._device)
        return (self._ops.status(logits, at) != OK).numpy(force=True)

    def _edit(self, logits: Tensor, rows: list[int], slots: list[int], indices: list[int]) -> None:
        """Allowed ids, then biases, then bans, of all rows at once."""
        edits = [self._edits[slot] for slot in slots]
        for row, edit in zip(rows, edits, strict=True):
            if edit.forbidden is not None:
                logits[row].masked_fill_(edit.forbidden, -torch.inf)
        flat = logits.view(-1)
        biased = self._flat_ids(rows, [edit.bias_ids for edit in edits])
        if len(biased):
            values = np.concatenate([edit.bias_values for edit in edits])
            flat[biased] += torch.from_numpy(values).to(self._device)
        banned = [edit.banned(index) for edit, index in zip(edits, indices, strict=True)]
        flat[self._flat_ids(rows, banned)] = -torch.inf

    def _flat_ids(self, rows: list[int], ids: list[NDArray[np.int64]]) -> Tensor:
        """Positions in the flattened logits of some ids of each row."""
        starts = np.array(rows, np.int64) * self._vocab_size
        places = np.repeat(starts, [len(of_row) for of_row in ids]) + np.concatenate(ids)
        return torch.from_numpy(places).to(self._device)

    # -- results ----------------------------------------------------------------------------

    def _raw_rows(self, logits: Tensor, asked: list[int], *, keep: bool) -> Tensor:
        """The asked rows as the model gave them, copied if something may still change them."""
        if len(asked) == len(logits):
            return logits.clone() if keep else logits
        return logits[torch.tensor(asked, dtype=torch.int64, device=self._device)]

    def _faults(
        self,
        output: SampleOutput,
        slots: list[int],
        status: NDArray[np.int8],
        edited: list[int],
        broken: NDArray[np.bool_],
    ) -> set[int]:
        """Rows without an id."""
        if not status.any() and not broken.any():
            return set()
        hidden = {row for row, is_broken in zip(edited, broken, strict=True) if is_broken}
        failed = hidden | set(np.flatnonzero(status).tolist())
        for row in sorted(failed):
            masked = row in edited and row not in hidden and status[row] != NON_FINITE
            code = "no_token_allowed" if masked else "non_finite_logits"
            output.faults.append(Fault(slots[row], code, _FAULTS[code]))
        return failed

    def _report(
        self,
        output: SampleOutput,
        raw: Tensor,
        asked: list[int],
        slots: list[int],
        failed: set[int],
    ) -> None:
        tops = [self._tops[slots[row]] for row in asked]
        ids = output.ids[torch.tensor(asked, dtype=torch.int64, device=self._device)]
        entries = self._best(raw, ids.tolist(), tops)
        for row, entry in zip(asked, entries, strict=True):
            if row not in failed:
                output.logprobs[slots[row]] = [entry]

    def _best(self, logits: Tensor, targets: list[int], tops: list[int]) -> list[TokenLogprobs]:
        """Of each row its target's log-probability and those of the best ids, few rows at a time:
        sorting takes several times their memory."""
        entries: list[TokenLogprobs] = []
        for at in range(0, len(targets), SORTED_ROWS):
            part = slice(at, at + SORTED_ROWS)
            ids = torch.tensor(targets[part], dtype=torch.int64, device=self._device)
            found = self._ops.top_logprobs(logits[part], ids, max(tops[part]))
            entries += _token_logprobs(targets[part], found, tops[part])
        return entries

    def _accept(
        self,
        ids: Tensor,
        slots: list[int],
        edited: list[int],
        penalised: list[int],
        failed: set[int],
    ) -> None:
        """Move the state on by the new ids."""
        counted = [row for row in penalised if row not in failed]
        if counted:
            rows = torch.tensor(counted, dtype=torch.int64, device=self._device)
            self._penalties.accept([slots[row] for row in counted], ids[rows])
        curious = [row for row in edited if self._edits[slots[row]].needs_ids and row not in failed]
        if curious:
            known = ids.tolist()
            for row in curious:
                self._edits[slots[row]].accept(known[row])


def _token_logprobs(targets: list[int], found: TopLogprobs, tops: list[int]) -> list[TokenLogprobs]:
    own = np.fmax(found.target.numpy(force=True), LOWEST_LOGPROB).tolist()
    values = np.fmax(found.values.numpy(force=True), LOWEST_LOGPROB).tolist()
    ids, ranks = found.ids.tolist(), found.rank.tolist()
    return [
        TokenLogprobs([target, *ids[j][:top]], [own[j], *values[j][:top]], ranks[j])
        for j, (target, top) in enumerate(zip(targets, tops, strict=True))
    ]
