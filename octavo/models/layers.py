"""What a decoder layer is made of: norm, attention, MLP. No layer knows requests or globals."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.core.spec import ModelSpec
from octavo.models.batch import Batch, Wanted
from octavo.models.family import Names
from octavo.models.linear import (
    ColumnLinear,
    Part,
    Place,
    RowLinear,
    Slots,
    rank_share,
    scaled,
    whole_slot,
)


class RmsNorm:
    """RMSNorm, whole on every rank."""

    def __init__(self, name: str, size: int, spec: ModelSpec, place: Place) -> None:
        self._name, self._ops = name, place.ops
        self._eps, self._offset = spec.norm_eps, spec.norm_offset
        dtype = torch.float32 if spec.norm_offset else place.dtype  # 1 + w would lose bits of w
        self.weight = torch.empty(size, dtype=dtype, device=place.device)

    def apply(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the new residual, new residual); both arguments may be overwritten."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def weight_slots(self) -> Slots:
        yield self._name, whole_slot(self.weight, self._offset)


class Attention:
    """Merged q, k, v; rotation and cache write; paged attention; output projection.

    ``group`` and ``index`` say where the layer's keys and values are:
    ``batch.kv[group][:, index]``. ``rope`` is :func:`octavo.models.rope.rope_table`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: Names,
        prefix: str,
        group: int,
        index: int,
        rope: Tensor,
        place: Place,
    ) -> None:
        heads = rank_share("num_heads", spec.num_heads, place.comm)
        kv_heads = rank_share("num_kv_heads", spec.num_kv_heads, place.comm, replicate=True)
        q_rows, kv_rows = scaled(heads, spec.head_dim), scaled(kv_heads, spec.head_dim)
        self._group, self._index, self._rope, self._ops = group, index, rope, place.ops
        self._heads, self._kv_heads = len(heads), len(kv_heads)
        self._eps = spec.norm_eps
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._qkv = ColumnLinear(
            (
                Part(prefix + names.q, spec.q_size, q_rows),
                Part(prefix + names.k, spec.kv_size, kv_rows),
                Part(prefix + names.v, spec.kv_size, kv_rows),
            ),
            spec.hidden_size,
            place,
            bias=spec.qkv_bias,
        )
        self._o = RowLinear(
            prefix + names.o, spec.hidden_size, spec.q_size, q_rows, place, bias=spec.o_bias
        )
        self._q_norm: RmsNorm | None = None
        self._k_norm: RmsNorm | None = None
        if spec.qk_norm:
            self._q_norm = RmsNorm(prefix + names.q_norm, spec.head_dim, spec, place)
            self._k_norm = RmsNorm(prefix + names.k_norm, spec.head_dim, spec, place)

    def apply(self, x: Tensor, batch: Batch, wanted: Wanted | None = None) -> Tensor:
        """``x`` [T, hidden] to [T, hidden], or to the ``wanted`` tokens' [W, hidden]."""
        meta, kv = batch.groups[self._group], batch.kv[self._group]
        q = self._ops.rope_and_write(
            self._qkv.apply(x),
            batch.positions,
            self._rope,
            kv,
            self._index,
            meta,
            self._heads,
            self._kv_heads,
            None if self._q_norm is None else self._q_norm.weight,
            None if self._k_norm is None else self._k_norm.weight,
            self._eps,
        )
        if wanted is not None:
            q, meta = q.index_select(0, wanted.tokens), wanted.groups[self._group]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._ops.attend(q, kv, self._index, meta, out, self._scale)
        return self._o.apply(out.flatten(1))

    def weight_slots(self) -> Slots:
        yield from self._qkv.weight_slots()
        yield from self._o.weight_slots()
        for norm in (self._q_norm, self._k_norm):
            if norm is not None:
                yield from norm.weight_slots()

    def after_load(self) -> None:
        self._qkv.after_load()
        self._o.after_load()


class Mlp:
    """A gated MLP (Shazeer 2020), by SiLU or GELU, with gate and up merged."""

    def __init__(self, spec: ModelSpec, names: Names, prefix: str, place: Place) -> None:
        size = spec.intermediate_size
        mine = rank_share("intermediate_size", size, place.comm)
        self._gated = place.ops.gelu_mul if spec.activation == "gelu_tanh" else place.ops.silu_mul
        self._gate_up = ColumnLinear(
            (Part(prefix + names.gate, size, mine), Part(prefix + names.up, size, mine)),
            spec.hidden_size,
            place,
            bias=spec.mlp_bias,
        )
        self._down = RowLinear(
            prefix + names.down, spec.hidden_size, size, mine, place, bias=spec.mlp_bias
        )

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [T, hidden] to [T, hidden]."""
        return self._down.apply(self._gated(self._gate_up.apply(x)))

    def weight_slots(self) -> Slots:
        yield from self._gate_up.weight_slots()
        yield from self._down.weight_slots()

    def after_load(self) -> None:
        self._gate_up.after_load()
        self._down.after_load()
