"""The two ends of a decoder: token ids to vectors, vectors to logits, split by vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.linear import Place, Slots
from octavo.weights.loader import WeightSlot


class VocabularyTable:
    """This rank's rows of a [vocabulary, hidden] weight, padded to a multiple of the ranks.

    Rank r holds ids [r·n, (r + 1)·n); rows past the vocabulary are zeros.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, place: Place) -> None:
        self.vocab_size = vocab_size
        self._name, self._shape = name, (vocab_size, hidden_size)
        count = -(-vocab_size // place.comm.size)
        self.ids = range(place.comm.rank * count, (place.comm.rank + 1) * count)
        self.weight = place.empty(count, hidden_size)

    def weight_slots(self) -> Slots:
        yield self._name, WeightSlot(self._shape, self._load)

    def _load(self, tensor: Tensor) -> None:
        mine = tensor[self.ids.start : self.ids.stop]
        self.weight[: len(mine)].copy_(mine)
        self.weight[len(mine) :].zero_()


class Embedding:
    """Vectors of token ids. Ids that another rank holds are zero here and summed."""

    def __init__(self, table: VocabularyTable, place: Place, scale: float = 1.0) -> None:
        """``scale`` is rounded to the model's dtype, as the families that have one do."""
        self._ops, self._comm = place.ops, place.comm
        self._ids, self._weight = table.ids, table.weight
        self._scale = torch.tensor(scale, dtype=place.dtype).item()

    def apply(self, ids: Tensor) -> Tensor:
        """``ids`` int64 [T] to [T, hidden]."""
        vectors = self._look_up(ids)
        return vectors if self._scale == 1 else vectors.mul_(self._scale)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._comm.size == 1:
            return self._ops.embedding(ids, self._weight)
        local = ids - self._ids.start
        mine = (local >= 0) & (local < len(self._ids))
        vectors = self._ops.embedding(torch.where(mine, local, 0), self._weight)
        return self._comm.all_reduce(vectors * mine.unsqueeze(-1))


class Head:
    """Logits of hidden states. A tied head is given the embedding's table."""

    def __init__(self, table: VocabularyTable, place: Place) -> None:
        self._ops, self._comm = place.ops, place.comm
        self._vocab_size = table.vocab_size
        self._table: VocabularyTable | None = table

    def apply(self, hidden: Tensor) -> Tensor:
        """``hidden`` [N, hidden] to fp32 [N, vocabulary], on every rank."""
        logits = self._ops.logits(hidden, self._packed)
        return self._comm.all_gather(logits, dim=-1)[:, : self._vocab_size]

    def after_load(self) -> None:
        """Packs the weight and lets go of the table (a tied embedding still holds it)."""
        if self._table is not None:
            self._packed = self._ops.pack_linear(self._table.weight, None)
            self._table = None
