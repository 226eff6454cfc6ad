"""What the sampler remembers of each slot. A slot that uses no feature has no entry for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.request import Sampling
from octavo.ops.sampling.reference import PROMPT_FLAG, DrawParams, PenaltyParams

BAN = -100.0  # a bias that means "never"


class DrawState:
    """Parameters of the draw: one number a slot each, gathered once a step."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._temperature = np.zeros(max_num_seqs, np.float64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._seed = np.zeros(max_num_seqs, np.uint64)

    def join(self, slot: int, sampling: Sampling) -> None:
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = max(sampling.top_k, 0)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = sampling.seed % 2**64

    def gather(self, slots: NDArray[np.int64], indices: Sequence[int]) -> DrawParams:
        temperature = self._temperature[slots]
        return DrawParams(
            temperature=self._put(temperature),
            top_k=self._put(self._top_k[slots]),
            top_p=self._put(self._top_p[slots]),
            min_p=self._put(self._min_p[slots]),
            seed=self._put(self._seed[slots].view(np.int64)),
            index=self._put(np.array(indices, np.int64)),
            all_greedy=not temperature.any(),
        )

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class SlotEdits:
    """Masks and biases of one request: which of its logits to change before anything else.

    Everything is made once, at the join: a step only strings the rows' arrays together. Ids that
    the model cannot produce are left out.
    """

    def __init__(
        self, tokens: Sequence[int], sampling: Sampling, vocab_size: int, device: torch.device
    ) -> None:
        bias = sampling.logit_bias
        self.forbidden = _mask(sampling.allowed_ids, vocab_size, device)
        self.bias_ids = _inside([i for i, value in bias.items() if value > BAN], vocab_size)
        self.bias_values = np.array([bias[i] for i in self.bias_ids.tolist()], np.float32)
        never = [i for i, value in bias.items() if value <= BAN]
        never += [word[0] for word in sampling.bad_words if len(word) == 1]
        self._never = _inside(never, vocab_size)
        self._min_tokens = sampling.min_tokens
        self._early = _inside([*never, *sampling.min_tokens_ids], vocab_size)
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # by what comes before, in bad words
        for word in sampling.bad_words:
            if len(word) > 1 and word[-1] < vocab_size:
                self._last_ids.setdefault(word[:-1], []).append(word[-1])
        self._lengths = sorted({len(prefix) for prefix in self._last_ids})
        self._keep = max(self._lengths, default=0)
        self._tail = tuple(tokens[-self._keep :]) if self._keep else ()

    @staticmethod
    def asked_for(sampling: Sampling) -> bool:
        """Whether there may be anything to change: most requests ask for nothing of the kind."""
        return bool(
            sampling.logit_bias
            or sampling.bad_words
            or sampling.min_tokens
            or sampling.allowed_ids is not None
        )

    @property
    def is_neutral(self) -> bool:
        """Nothing will ever be changed."""
        early = self._min_tokens and len(self._early)
        fixed = len(self.bias_ids) or len(self._never) or early
        return self.forbidden is None and not fixed and not self._last_ids

    def banned(self, index: int) -> NDArray[np.int64]:
        """Ids that may not be output number ``index`` (0-based)."""
        fixed = self._early if index < self._min_tokens else self._never
        found = [
            last
            for length in self._lengths
            for last in self._last_ids.get(self._tail[-length:], ())
        ]
        return np.append(fixed, np.array(found, np.int64)) if found else fixed

    @property
    def needs_ids(self) -> bool:
        """Whether :meth:`accept` must be told of new ids."""
        return self._keep > 0

    def accept(self, token: int) -> None:
        self._tail = (*self._tail, token)[-self._keep :]


def _inside(ids: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    """Distinct ids that the model can produce, ascending."""
    found = np.unique(np.array(ids, np.int64))
    return found[found < vocab_size]


def _mask(allowed: Sequence[int] | None, vocab_size: int, device: torch.device) -> Tensor | None:
    """True where an id is not allowed, bool [vocab]; None if all are."""
    if allowed is None:
        return None
    mask = np.ones(vocab_size, np.bool_)
    mask[_inside(allowed, vocab_size)] = False
    return torch.from_numpy(mask).to(device)


def _penalties(sampling: Sampling) -> tuple[float, float, float]:
    """Repetition, frequency, presence."""
    return (
        sampling.repetition_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    )


class Penalties:
    """How often each id was seen, for the slots that use penalties: a row of counts each.

    Rows are made when first needed and reused; ``counts`` int32 [rows, vocab] on the device.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_num_seqs
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._row_of: dict[int, int] = {}
        self._values = np.zeros((3, max_num_seqs), np.float32)  # repetition, frequency, presence

    @staticmethod
    def asked_for(sampling: Sampling) -> bool:
        return _penalties(sampling) != (1.0, 0.0, 0.0)

    @torch.inference_mode()
    def join(self, slot: int, tokens: list[int], prompt_len: int, sampling: Sampling) -> None:
        """Start counting for a request that asks for it."""
        self._values[:, slot] = _penalties(sampling)
        row = self._row_of[slot] = self._take_row()
        size = self.counts.shape[1]
        known = np.array(tokens, np.int64)
        counts = np.bincount(known[prompt_len:], minlength=size)[:size].astype(np.int32)
        prompt = np.unique(known[:prompt_len])
        counts[prompt[prompt < size]] |= PROMPT_FLAG
        self.counts[row] = torch.from_numpy(counts).to(self.counts.device)

    def leave(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def reset(self) -> None:
        self._row_of.clear()
        self._free = list(range(len(self.counts)))

    @property
    def in_use(self) -> bool:
        return bool(self._row_of)

    def rows(self, slots: Sequence[int]) -> list[int]:
        """Which entries of ``slots`` are penalised."""
        if not self._row_of:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._row_of]

    def gather(self, slots: NDArray[np.int64], rows: list[int]) -> PenaltyParams:
        chosen = slots[rows]
        repetition, frequency, presence = self._values[:, chosen]
        return PenaltyParams(
            rows=self._put(np.array(rows, np.int64)),
            count_rows=self._count_rows(chosen.tolist()),
            repetition=self._put(repetition),
            frequency=self._put(frequency),
            presence=self._put(presence),
        )

    def accept(self, slots: list[int], ids: Tensor) -> None:
        """Count new ids int64 [M], one for each of M penalised slots."""
        rows = self._count_rows(slots)
        one = torch.ones((), dtype=torch.int32, device=ids.device)
        self.counts.index_put_((rows, ids), one, accumulate=True)

    def _count_rows(self, slots: list[int]) -> Tensor:
        return self._put(np.array([self._row_of[slot] for slot in slots], np.int64))

    def _take_row(self) -> int:
        if not self._free:
            rows, size = self.counts.shape
            grown = min(max(4, 2 * rows), self._max_rows)
            more = self.counts.new_zeros(grown - rows, size)
            self.counts = torch.cat([self.counts, more])
            self._free = list(range(rows, grown))
        return self._free.pop()

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.counts.device)
