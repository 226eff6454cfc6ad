"""Linear layers split over ranks, and the shard rules that fill them.

A layer declares which rows (outputs) and columns (inputs) of each checkpoint tensor this rank
holds; a weight slot has the checkpoint's full shape and keeps its own part of what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.distributed.comm import Communicator
from octavo.ops.api import Ops
from octavo.quant.base import LinearMethod, Parameter
from octavo.quant.plain import PlainLinear
from octavo.weights.loader import WeightSlot

Slots = Iterator[tuple[str, WeightSlot]]


@dataclass(frozen=True, slots=True)
class Place:
    """What every layer is built with: backend, ranks, dtype, device, and how linears store."""

    ops: Ops
    comm: Communicator
    dtype: torch.dtype
    device: torch.device
    linear: Callable[[], LinearMethod] = PlainLinear

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def rank_share(what: str, count: int, comm: Communicator, *, replicate: bool = False) -> range:
    """This rank's units of ``count``; with ``replicate``, ranks share units if there are fewer.

    Raises :class:`StartupError` when the units do not divide evenly.
    """
    if count % comm.size == 0:
        each = count // comm.size
        return range(comm.rank * each, (comm.rank + 1) * each)
    if replicate and comm.size % count == 0:
        unit = comm.rank * count // comm.size
        return range(unit, unit + 1)
    raise StartupError(f"{what} is {count} and cannot be split evenly over {comm.size} ranks.")


def scaled(units: range, size: int) -> range:
    """The elements of consecutive units of ``size`` elements each."""
    return range(units.start * size, units.stop * size)


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint linear of ``size`` outputs, of which this rank holds ``rows``."""

    name: str
    size: int
    rows: range


class ColumnLinear:
    """One or more checkpoint linears over the same input, merged; outputs split over ranks."""

    def __init__(
        self, parts: Sequence[Part], in_size: int, place: Place, *, bias: bool = False
    ) -> None:
        self._parts, self._in_size, self._ops = parts, in_size, place.ops
        self._method = place.linear()
        rows = sum(len(part.rows) for part in parts)
        self._method.create(rows, in_size, bias=bias, dtype=place.dtype, device=place.device)

    def apply(self, x: Tensor) -> Tensor:
        return self._method.apply(x)

    def weight_slots(self) -> Slots:
        at = 0
        columns = range(self._in_size)
        for part in self._parts:
            yield from _part_slots(self._method, part, at, self._in_size, columns)
            at += len(part.rows)

    def after_load(self) -> None:
        self._method.after_load(self._ops)


class RowLinear:
    """A checkpoint linear whose inputs are split over ranks; its outputs are their sum.

    The bias is on rank 0 alone, so that the sum holds it once.
    """

    def __init__(
        self,
        name: str,
        out_size: int,
        in_size: int,
        columns: range,
        place: Place,
        *,
        bias: bool = False,
    ) -> None:
        self._part = Part(name, out_size, range(out_size))
        self._in_size, self._columns = in_size, columns
        self._ops, self._comm = place.ops, place.comm
        self._skips_bias = bias and place.comm.rank != 0
        self._method = place.linear()
        bias = bias and not self._skips_bias
        self._method.create(
            out_size, len(columns), bias=bias, dtype=place.dtype, device=place.device
        )

    def apply(self, x: Tensor) -> Tensor:
        return self._comm.all_reduce(self._method.apply(x))

    def weight_slots(self) -> Slots:
        yield from _part_slots(self._method, self._part, 0, self._in_size, self._columns)
        if self._skips_bias:
            yield f"{self._part.name}.bias", WeightSlot((self._part.size,), lambda tensor: None)

    def after_load(self) -> None:
        self._method.after_load(self._ops)


def whole_slot(target: Tensor, offset: float = 0.0) -> WeightSlot:
    """A checkpoint tensor that every rank keeps whole, plus ``offset``."""

    def load(tensor: Tensor) -> None:
        target.copy_(tensor)
        if offset:
            target.add_(offset)

    return WeightSlot(tuple(target.shape), load)


def _part_slots(method: LinearMethod, part: Part, at: int, in_size: int, columns: range) -> Slots:
    """Slots of one part, whose rows lie from row ``at`` on in the method's parameters."""
    here = range(at, at + len(part.rows))
    for suffix, parameter in method.parameters.items():
        yield f"{part.name}.{suffix}", _part_slot(parameter, part, here, in_size, columns)


def _part_slot(
    parameter: Parameter, part: Part, here: range, in_size: int, columns: range
) -> WeightSlot:
    out_axis, in_axis = parameter.out_axis, parameter.in_axis
    target = _cut(parameter.tensor, out_axis, here)
    shape = list(target.shape)
    if out_axis is not None:
        shape[out_axis] = part.size
    if in_axis is not None:
        shape[in_axis] = in_size

    def load(tensor: Tensor) -> None:
        target.copy_(_cut(_cut(tensor, out_axis, part.rows), in_axis, columns))

    return WeightSlot(tuple(shape), load)


def _cut(tensor: Tensor, axis: int | None, span: range) -> Tensor:
    return tensor if axis is None else tensor.narrow(axis, span.start, len(span))
