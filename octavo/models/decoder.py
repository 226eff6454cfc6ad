"""One decoder for every family of the Llama kind, built from a ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.core.groups import layer_groups
from octavo.core.spec import ModelSpec
from octavo.distributed.comm import Communicator
from octavo.models.batch import Batch, Overlay, Wanted
from octavo.models.family import Names
from octavo.models.layers import Attention, Mlp, RmsNorm
from octavo.models.linear import Place, Slots
from octavo.models.rope import rope_table
from octavo.models.vocabulary import Embedding, Head, VocabularyTable
from octavo.ops.api import Ops
from octavo.weights.loader import WeightSlot

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. The norm before its attention is applied by whoever comes before.

    The output norms, if there are any, come before the sum with the residual.
    """

    attention: Attention
    attention_output_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    mlp_output_norm: RmsNorm | None

    def apply(
        self, x: Tensor, residual: Tensor, batch: Batch, wanted: Wanted | None
    ) -> tuple[Tensor, Tensor]:
        """Normed ``x`` to (what the next norm adds to the residual, residual); with ``wanted``, of
        these tokens only."""
        x = self.attention.apply(x, batch, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted.tokens)
        if self.attention_output_norm is not None:
            x = self.attention_output_norm.apply(x)
        x, residual = self.mlp_norm.add(x, residual)
        x = self.mlp.apply(x)
        if self.mlp_output_norm is not None:
            x = self.mlp_output_norm.apply(x)
        return x, residual

    def weight_slots(self) -> Slots:
        for part in (
            self.attention, self.attention_output_norm,
            self.mlp_norm, self.mlp, self.mlp_output_norm,
        ):  # fmt: skip
            if part is not None:
                yield from part.weight_slots()


class Decoder:
    """This rank's share of a decoder-only transformer, for contexts up to ``max_position``.

    Life: build, fill every one of :meth:`weight_slots`, :meth:`after_load`, then :meth:`forward`
    and :meth:`logits` on every rank alike. Raises :class:`StartupError` for a spec it cannot run.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: Ops,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        max_position: int,
        *,
        names: Names | None = None,
    ) -> None:
        _check(spec)
        names = names or Names()
        place = Place(ops, comm, dtype, torch.device(device))
        tables = [VocabularyTable(names.embedding, spec.vocab_size, spec.hidden_size, place)]
        if not spec.tie_embeddings:
            tables.append(VocabularyTable(names.head, spec.vocab_size, spec.hidden_size, place))
        self._tables = tables  # until loaded
        self._embedding = Embedding(tables[0], place, spec.embedding_scale)
        self._head = Head(tables[-1], place)
        self._layers = _layers(spec, names, place, max_position)
        self._norms = _norms(spec, names, place)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] after the final norm, or those that are wanted, [W, hidden];
        writes the step's keys and values. Nobody needs more of the last layer than that."""
        x = self._embedding.apply(batch.ids)
        if batch.overlay is not None:
            _lay_over(x, batch.overlay)
        first, *following = self._norms
        residual = x
        x = first.apply(x)
        for layer, next_norm in zip(self._layers, following, strict=True):
            wanted = batch.wanted if layer is self._layers[-1] else None
            x, residual = next_norm.add(*layer.apply(x, residual, batch, wanted))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, vocabulary] of hidden states [N, hidden]."""
        return self._head.apply(hidden)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Every checkpoint tensor that must be loaded, by name, before :meth:`after_load`."""
        slots: dict[str, WeightSlot] = {}
        for table in self._tables:
            slots.update(table.weight_slots())
        for norm in self._norms:
            slots.update(norm.weight_slots())
        for layer in self._layers:
            slots.update(layer.weight_slots())
        return slots

    def after_load(self) -> None:
        """Pack the weights as the backend likes them. Call once."""
        self._head.after_load()
        self._tables.clear()
        for layer in self._layers:
            layer.attention.after_load()
            layer.mlp.after_load()


def _check(spec: ModelSpec) -> None:
    if spec.activation not in ACTIVATIONS:
        raise StartupError(
            f"{spec.architecture}: activation must be {' or '.join(ACTIVATIONS)}, "
            f"not {spec.activation}."
        )
    for index, layer in enumerate(spec.layers):
        if layer.mixer not in ("full", "sliding") or layer.mlp != "dense":
            raise StartupError(
                f"{spec.architecture}: layer {index} is {layer.mixer} and {layer.mlp}; "
                "only full or sliding attention with a dense MLP is supported."
            )


def _layers(spec: ModelSpec, names: Names, place: Place, max_position: int) -> tuple[Layer, ...]:
    rope = rope_table(spec.rope, max_position, place.device)
    local_rope = rope
    if spec.local_rope is not None:
        local_rope = rope_table(spec.local_rope, max_position, place.device)
    where = {
        layer: (group, index)
        for group, members in enumerate(layer_groups(spec))
        for index, layer in enumerate(members.layers)
    }
    layers = []
    for number in range(spec.num_layers):
        prefix = names.layer.format(number)
        table = local_rope if spec.layers[number].mixer == "sliding" else rope
        output_norms: list[RmsNorm | None] = [None, None]
        if spec.output_norms:
            titles = (names.attention_output_norm, names.mlp_output_norm)
            output_norms = [RmsNorm(prefix + t, spec.hidden_size, spec, place) for t in titles]
        layers.append(
            Layer(
                attention=Attention(spec, names, prefix, *where[number], table, place),
                attention_output_norm=output_norms[0],
                mlp_norm=RmsNorm(prefix + names.mlp_norm, spec.hidden_size, spec, place),
                mlp=Mlp(spec, names, prefix, place),
                mlp_output_norm=output_norms[1],
            )
        )
    return tuple(layers)


def _norms(spec: ModelSpec, names: Names, place: Place) -> tuple[RmsNorm, ...]:
    """The norm before each layer, and the final one."""
    titles = [names.layer.format(i) + names.input_norm for i in range(spec.num_layers)]
    return tuple(RmsNorm(title, spec.hidden_size, spec, place) for title in (*titles, names.norm))


def _lay_over(x: Tensor, overlay: Overlay) -> None:
    if overlay.positions is not None:
        raise ValueError("This model has one position axis; overlay.positions must be None.")
    x[overlay.index] = overlay.embeddings.to(x.dtype)
