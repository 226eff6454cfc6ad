"""TritonOps: the reference's operations as fused kernels, one launch each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
from torch import Tensor

from octavo.ops.api import GroupMeta, Ops
from octavo.ops.fp8 import is_fp8
from octavo.ops.triton import attention, fp8, rope, rows, vector
from octavo.ops.triton.plan import Cut, Work, plan
from octavo.ops.triton.tiles import Card, CardTiles, Tile, pick, tiles_for

_MMA_ROWS = 16  # the fewest rows of a tensor core product
_ADDED_ROWS = 32  # rows of parts that a program adds up at a time
_LEAST_COLUMNS = 128  # inputs at a time, in a product of a few rows
_ANY = 1 << 30  # more queries than any row has


@dataclass(frozen=True, slots=True)
class _Launch:
    """One attention kernel of a step, for all layers. Shares have room for ``parts``: fp32 sums
    [2 · shares, kept rows, width] and states [2 · shares, 2, kept rows]."""

    programs: int
    work: Work
    parts: tuple[Tensor, Tensor] | None
    constants: dict[str, Any]


class TritonOps(Ops):
    """Kernels for fp16, bf16 and fp32 on any GPU that Triton knows.

    A captured graph must hold the step's first ``attend`` of each group too: it launches the
    kernel that plans the step (so capture with a fresh GroupMeta). A step's launches depend
    on shapes and on ``max_query`` alone.
    """

    name = "triton"

    def __init__(
        self, card: Card, *, tiles: CardTiles | None = None, early: bool | None = None
    ) -> None:
        """``early``: kernels may start before their predecessor ends; None: where the card can."""
        self.card = card
        self.tiles = tiles or tiles_for(card)
        if early is None:
            early = card.starts_early
        self._early: dict[str, Any] = {"EARLY": early}
        if early:
            self._early["launch_pdl"] = True

    def describe(self) -> str:
        return (
            f"attention, norms, activation, rope triton ({self.card.name}, "
            f"tiles of capability {self.tiles.capability / 10:.1f}); linear torch"
        )

    # -- rows ---------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x if _rows_dense(x) else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(x, None, weight, out, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """In place: the norm takes the place of ``x``, the sum that of ``residual``."""
        if not (x.is_contiguous() and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        self._norm(x, residual, weight, x, eps)
        return x, residual

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float
    ) -> None:
        size = x.shape[-1]
        width = triton.next_power_of_2(size)
        count = x.numel() // size
        if not count:
            return
        stride = x.stride(-2) if x.dim() > 1 else size
        rows.norm_kernel[(count,)](
            x, x if residual is None else residual, weight, out, stride, eps,
            SIZE=size, WIDTH=width, ADD=residual is not None,
            num_warps=min(16, max(1, width // self.tiles.rows.norm)), **self._early,
        )  # fmt: skip

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        gate_up = gate_up if _rows_dense(gate_up) else gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        count = out.numel() // size
        if count:
            stride = gate_up.stride(-2) if gate_up.dim() > 1 else 2 * size
            block = min(self.tiles.rows.activation, triton.next_power_of_2(size))
            rows.gate_kernel[(count, triton.cdiv(size, block))](
                gate_up, out, stride, SIZE=size, BLOCK=block, GELU=gelu, num_warps=4, **self._early
            )
        return out

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        size = weight.shape[1]
        out = weight.new_empty((*ids.shape, size))
        if ids.numel():
            block = min(self.tiles.rows.embedding, triton.next_power_of_2(size))
            rows.embedding_kernel[(ids.numel(), triton.cdiv(size, block))](
                ids.contiguous(), weight, out, weight.stride(0),
                SIZE=size, BLOCK=block, num_warps=4, **self._early,
            )  # fmt: skip
        return out

    # -- products -----------------------------------------------------------------------------

    def linear(self, x: Tensor, packed: object) -> Tensor:
        weight, bias = cast("tuple[Tensor, Tensor | None]", packed)
        if self._is_vector(x, weight):
            return self._vector(x, weight, bias)
        return super().linear(x, packed)

    def _is_vector(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the kernel for a few rows takes the product."""
        count, size = x.shape
        tile = self.tiles.rows.vector
        return (
            count <= tile.count
            and count in (1, 2, 4)
            and x.dtype is not torch.float32
            and size % _LEAST_COLUMNS == 0
            and x.stride(1) == 1
            and weight.is_contiguous()
        )

    def _vector(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        count, size = x.shape
        tile = self.tiles.rows.vector
        first = math.gcd(tile.first, size)
        columns = math.gcd(tile.columns, size - first) or first
        out = x.new_empty(count, len(weight))
        vector.vector_kernel[(triton.cdiv(len(weight), tile.rows),)](
            x, weight, weight if bias is None else bias, out, len(weight), x.stride(0),
            COUNT=count, SIZE=size, ROWS=tile.rows, FIRST=first, COLUMNS=columns,
            UNROLL=tile.unroll, BIAS=bias is not None, num_warps=tile.warps, **self._early,
        )  # fmt: skip
        return out

    def logits(self, hidden: Tensor, packed: object) -> Tensor:
        weight, bias = cast("tuple[Tensor, Tensor | None]", packed)
        if bias is not None or not hidden.is_cuda or hidden.dtype is torch.float32:
            return super().logits(hidden, packed)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32)

    # -- attention ----------------------------------------------------------------------------

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_pages: Tensor,
        layer: int,
        meta: GroupMeta,
        num_heads: int,
        num_kv_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        qkv = qkv if _rows_dense(qkv) else qkv.contiguous()
        dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        width = triton.next_power_of_2(dim)
        q = qkv.new_empty((qkv.shape[0], num_heads, dim))
        if not qkv.shape[0]:
            return q
        heads = num_heads + 2 * num_kv_heads
        elements, warps = self.tiles.rows.rope(qkv.shape[0], is_fp8(kv_pages))
        block = max(1, min(triton.next_power_of_2(heads), elements // width))
        page, layers, values, head, offset = _strides(kv_pages, dim)
        rope.rope_kernel[(qkv.shape[0], triton.cdiv(heads, block))](
            qkv, positions.contiguous(), cos_sin, qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm, meta.page.contiguous(), meta.offset.contiguous(),
            q, kv_pages, layer,
            qkv.stride(0), page, layers, values, head, offset, eps,
            Q_HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, WIDTH=width,
            HALF=cos_sin.shape[-1] // 2, BLOCK=block, NORM_Q=q_norm is not None,
            NORM_K=k_norm is not None, PAGE=meta.page_size, FP8=self._decoding(kv_pages),
            num_warps=warps, **self._early,
        )  # fmt: skip
        return q

    def attend(
        self,
        q: Tensor,
        kv_pages: Tensor,
        layer: int,
        meta: GroupMeta,
        out: Tensor,
        scale: float,
        soft_cap: float = 0.0,
    ) -> None:
        if not q.shape[0] or not meta.context_len.shape[0]:
            return
        if not (q.stride(2) == 1 and q.stride(1) == q.shape[2]):
            q = q.contiguous()
        launches = meta.cache.get(self.name)
        if launches is None:
            launches = meta.cache[self.name] = self._plan(q, kv_pages, meta)
        for launch in cast("tuple[_Launch, ...]", launches):
            self._attend(launch, q, kv_pages, layer, meta, out, scale, soft_cap)

    def _plan(self, q: Tensor, kv_pages: Tensor, meta: GroupMeta) -> tuple[_Launch, ...]:
        """Rows of few queries go to one launch, rows of many to another."""
        kv_heads, dim = kv_pages.shape[3], q.shape[2]
        group = q.shape[1] // kv_heads
        tables = self.tiles.fp8 if is_fp8(kv_pages) else self.tiles.plain
        tile = self._fitted(pick(tables.few, dim, group), q, kv_pages)
        tokens = 1 if meta.max_query == 1 else tile.rows // group
        cut = Cut(0, tokens, tokens, tile.tokens, self._programs(tile), tile.least)
        launches = [self._launch(tile, cut, True, q, kv_pages, meta)]
        if meta.max_query > tokens:
            most = q.shape[0] // (pick(tables.split, dim, group).rows // group)
            split = (most + 1) * kv_heads <= self.card.multiprocessors
            table = tables.split if split else tables.many
            tile = self._fitted(pick(table, dim, group), q, kv_pages)
            programs = self._programs(tile)
            cut = Cut(tokens, _ANY, tile.rows // group, tile.tokens, programs, tile.least)
            launches.append(self._launch(tile, cut, split, q, kv_pages, meta))
        return tuple(launches)

    def _decoding(self, kv_pages: Tensor) -> int:
        return fp8.decoding(self.card) if is_fp8(kv_pages) else fp8.PLAIN

    def _fitted(self, tile: Tile, q: Tensor, kv_pages: Tensor) -> Tile:
        dim, shared_bytes = q.shape[2], self.card.shared_bytes
        if is_fp8(kv_pages):  # a tile of codes takes half of one of numbers, and is both for a time
            return tile.fitted(dim, q.element_size(), shared_bytes, fp8.CODES * _MMA_ROWS)
        return tile.fitted(dim, kv_pages.element_size(), shared_bytes)

    def _programs(self, tile: Tile) -> int:
        return self.card.multiprocessors * tile.programs

    def _launch(
        self, tile: Tile, cut: Cut, split: bool, q: Tensor, kv_pages: Tensor, meta: GroupMeta
    ) -> _Launch:
        kv_heads, dim = kv_pages.shape[3], q.shape[2]
        group = q.shape[1] // kv_heads
        least = fp8.CODES * _MMA_ROWS if is_fp8(kv_pages) else _MMA_ROWS
        width = max(least, triton.next_power_of_2(dim))
        page, layer, values, head, token = _strides(kv_pages, dim)
        constants = {
            "PAGE_STRIDE": page, "LAYER_STRIDE": layer, "VALUES_STRIDE": values,
            "HEAD_STRIDE": head, "TOKEN_STRIDE": token, "HEADS": kv_heads, "GROUP": group,
            "TOKENS": cut.tokens, "ROWS": tile.rows, "TILE": tile.tokens, "PAGE": meta.page_size,
            "DIM": dim, "WIDTH": width, "WINDOW": meta.window > 0,
            "num_warps": tile.warps, "num_stages": tile.stages,
            "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
            "FP8": self._decoding(kv_pages), **self._early,
        }  # fmt: skip
        if tile.registers:
            constants["maxnreg"] = tile.registers
        parts = None
        if split:
            kept = triton.next_power_of_2(cut.tokens * group)
            constants |= {"KEPT": kept, "PARTS": max(1, _ADDED_ROWS // kept)}
            sums = torch.empty((2 * cut.shares, kept, width), device=q.device)
            parts = sums, torch.empty((2 * cut.shares, 2, kept), device=q.device)
        work = plan(meta, cut, q.shape[0], kv_heads)
        programs = cut.shares if split else min(cut.shares, work.max_units * kv_heads)
        return _Launch(programs, work, parts, constants)

    def _attend(
        self,
        launch: _Launch,
        q: Tensor,
        kv_pages: Tensor,
        layer: int,
        meta: GroupMeta,
        out: Tensor,
        scale: float,
        soft_cap: float,
    ) -> None:
        work, table = launch.work, meta.page_table
        places = (
            layer, q.stride(0), out.stride(0), out.stride(1), table.stride(0), work.max_units,
            meta.window, scale, soft_cap,
        )  # fmt: skip
        grid = (launch.programs,)
        constants = {**launch.constants, "SOFT_CAP": soft_cap > 0}
        if launch.parts is None:
            attention.unit_kernel[grid](
                q, kv_pages, table, out, work.units, work.totals, *places, **constants
            )
        else:
            attention.share_kernel[grid](
                q, kv_pages, table, out, work.units, work.tiles_before, work.totals,
                work.starts, work.arrived, *launch.parts, *places, **constants,
            )  # fmt: skip


def _strides(kv_pages: Tensor, dim: int) -> tuple[int, ...]:
    """Elements from page to page, layer to layer, K to V, head to head and token to token."""
    return *kv_pages.stride()[:4], dim if is_fp8(kv_pages) else kv_pages.stride(4)


def _rows_dense(x: Tensor) -> bool:
    """All but the last two dimensions flatten into rows, and a row is dense."""
    return x.stride(-1) == 1 and (x.dim() <= 2 or x.is_contiguous())
