"""CpuOps: the reference's operations on compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo.ops.api import GroupMeta, Ops
from octavo.ops.cpu import attention, rope, rows
from octavo.ops.cpu.isa import Isa
from octavo.ops.cpu.jit import Kernel, Launcher, Team, compile_kernel, set_target
from octavo.ops.cpu.linear import PackedLinear, apply_linear, pack_linear, packing_works
from octavo.ops.cpu.pool import map_zeros

_FAST = (torch.float32, torch.bfloat16)
# Below this many elements a kernel runs on the caller's thread: waking the other costs more.
_PARALLEL_ELEMENTS = 16384
_SHARES = 4  # pieces of work a thread, so that a disturbed one delays little


class CpuOps(Ops):
    """Kernels for fp32 and bf16 on CPU; whatever they do not cover falls to the reference.

    K and V lie in their pages in pair order (:mod:`octavo.ops.cpu.tiles`), so pages written
    by one backend are not for another's ``attend``. One instance serves one thread.
    """

    name = "cpu"

    def __init__(self, *, isa: Isa, threads: int, cache_dir: Path | None) -> None:
        set_target(isa)
        self.isa = isa
        self._team = Team(threads)
        self.cache_dir = cache_dir
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    @property
    def threads(self) -> int:
        return self._team.threads

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All that were compiled or loaded so far."""
        return tuple(launcher.kernel for launcher in self._launchers.values())

    def describe(self) -> str:
        packed = [str(d).removeprefix("torch.") for d in _FAST if packing_works(d)]
        linear = f"oneDNN packed ({', '.join(packed)})" if packed else "torch"
        plural = "s" if self.threads > 1 else ""
        return f"attention numba {self.isa}, {self.threads} thread{plural}; linear {linear}"

    def new_pages(
        self, num_pages: int, page_elements: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return map_zeros(num_pages, page_elements, dtype)

    # -- kernels ----------------------------------------------------------------------------

    def _launcher(self, key: tuple[Any, ...], arguments: str) -> Launcher:
        """The compiled kernel for ``key``: (factory, its positional arguments…)."""
        function, name, *scratch = key[0](*key[1:])
        kernel = compile_kernel(
            function, name, scratch_bytes=scratch[0] if scratch else 0, cache_dir=self.cache_dir
        )
        return self._launchers.setdefault(key, Launcher(kernel, self._team, arguments))

    def norm_kernel(self, size: int, bf16: bool, adds: bool, fp32_weight: bool = False) -> Launcher:
        key = (rows.make_norm, size, self.isa.lanes, bf16, adds, fp32_weight)
        return self._launchers.get(key) or self._launcher(key, rows.NORM_ARGUMENTS)

    def gate_kernel(self, size: int, bf16: bool, gelu: bool = False) -> Launcher:
        key = (rows.make_gate, size, self.isa.lanes, bf16, gelu)
        return self._launchers.get(key) or self._launcher(key, rows.GATE_ARGUMENTS)

    def rope_kernel(self, shape: rope.RopeShape) -> Launcher:
        key = (rope.make_rope, shape, self.isa.lanes)
        return self._launchers.get(key) or self._launcher(key, rope.ARGUMENTS)

    def attention_kernel(self, shape: attention.AttentionShape, decode: bool) -> Launcher:
        key = (attention.make_attention, shape, self.isa, decode)
        return self._launchers.get(key) or self._launcher(key, attention.ARGUMENTS)

    def _split(self, count: int, elements: int) -> tuple[bool, int]:
        """Whether to use all threads for ``count`` rows, and how many rows to take at a time."""
        if elements < _PARALLEL_ELEMENTS or count == 1:
            return False, count
        return True, -(-count // (self._team.threads * _SHARES))

    # -- operations -------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _fast(x, weight=weight):
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(x, None, weight, out, eps)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """In place: the norm takes the place of ``x``, the sum that of ``residual``."""
        if not (
            _fast(x, residual, weight=weight) and x.is_contiguous() and residual.is_contiguous()
        ):
            return super().add_rms_norm(x, residual, weight, eps)
        self._norm(x, residual, weight, x, eps)
        return x, residual

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, eps: float
    ) -> None:
        size, elements = weight.shape[0], x.numel()
        count = elements // size
        parallel, grain = self._split(count, elements)
        sums = 0 if residual is None else residual.data_ptr()
        bf16 = x.dtype is torch.bfloat16
        wide = weight.dtype is not x.dtype
        kernel = self.norm_kernel(size, bf16, residual is not None, wide)
        kernel(count, parallel, x.data_ptr(), sums, weight.data_ptr(), out.data_ptr(), grain, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=False)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, gelu=True)

    def _gated(self, gate_up: Tensor, gelu: bool) -> Tensor:
        if not (_fast(gate_up) and gate_up.is_contiguous()):
            return super().gelu_mul(gate_up) if gelu else super().silu_mul(gate_up)
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        elements = out.numel()
        count = elements // size
        parallel, grain = self._split(count, elements)
        kernel = self.gate_kernel(size, gate_up.dtype is torch.bfloat16, gelu)
        kernel(count, parallel, gate_up.data_ptr(), out.data_ptr(), grain)
        return out

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
        dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
        if not attention.has_order(kv_pages.dtype, meta.page_size, dim):
            return super().rope_and_write(
                qkv, positions, cos_sin, kv_pages, layer, meta, num_heads, num_kv_heads,
                q_norm, k_norm, eps,
            )  # fmt: skip
        step = _Step.of(meta)
        qkv = qkv.contiguous()
        count = qkv.shape[0]
        shape = rope.RopeShape(
            head_dim=dim,
            rotated=cos_sin.shape[-1],
            page_size=meta.page_size,
            bf16=qkv.dtype is torch.bfloat16,
            kv=attention.kv_kind(kv_pages.dtype),
            norms=q_norm is not None,
            fp32_norms=q_norm is not None and q_norm.dtype is not qkv.dtype,  # then fp32
        )
        out = qkv.new_empty((count, num_heads, dim))
        parallel, grain = self._split(count, qkv.numel())
        self.rope_kernel(shape)(
            count, parallel, qkv.data_ptr(), out.data_ptr(), positions.data_ptr(),
            cos_sin.data_ptr(), *_layer_place(kv_pages, layer), step.page, step.offset,
            num_heads, num_kv_heads, q_norm.data_ptr() if q_norm is not None else 0,
            k_norm.data_ptr() if k_norm is not None else 0, grain, eps,
        )  # fmt: skip
        return out

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
        heads, kv_heads, dim = q.shape[1], kv_pages.shape[3], q.shape[2]
        if not attention.has_order(kv_pages.dtype, meta.page_size, dim):
            super().attend(q, kv_pages, layer, meta, out, scale, soft_cap)
            return
        if not _rows_of_heads(out):
            dense = torch.empty(out.shape, dtype=out.dtype)
            self.attend(q, kv_pages, layer, meta, dense, scale, soft_cap)
            out.copy_(dense)
            return
        q = q if _rows_of_heads(q) else q.contiguous()
        step = _Step.of(meta)
        shape = attention.AttentionShape(
            group=heads // kv_heads,
            head_dim=dim,
            page_size=meta.page_size,
            bf16=q.dtype is torch.bfloat16,
            kv=attention.kv_kind(kv_pages.dtype),
        )
        for decode, tiles, address in step.work(shape.tile_tokens(decode=False)):
            items = tiles * kv_heads
            self.attention_kernel(shape, decode)(
                items, items > 1, q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0),
                *_layer_place(kv_pages, layer), step.table, step.table_row, address, kv_heads,
                meta.window, scale, soft_cap,
            )  # fmt: skip

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> object:
        return pack_linear(weight, bias)

    def linear(self, x: Tensor, packed: object) -> Tensor:
        return apply_linear(x, cast(PackedLinear, packed))


class _Step:
    """A step's paging as addresses and work lists, worked out once for all layers of a group."""

    __slots__ = (
        "_context_len",
        "_kept",
        "_query_start",
        "_work",
        "offset",
        "page",
        "table",
        "table_row",
    )

    def __init__(self, meta: GroupMeta) -> None:
        page, offset = (t.to(torch.int64).contiguous() for t in (meta.page, meta.offset))
        table = meta.tables.to(torch.int32)
        table = table if table.stride(-1) == 1 else table.contiguous()
        self._kept: list[object] = [page, offset, table]  # what the addresses point to
        self.page, self.offset = page.data_ptr(), offset.data_ptr()
        self.table, self.table_row = table.data_ptr(), table.stride(0)
        self._query_start = meta.query_start.numpy().astype(np.int64)
        self._context_len = meta.context_len.numpy().astype(np.int64)
        self._work: dict[int, list[tuple[bool, int, int]]] = {}

    @classmethod
    def of(cls, meta: GroupMeta) -> _Step:
        step = meta.cache.get("cpu")
        if step is None:
            step = meta.cache["cpu"] = cls(meta)
        return cast(_Step, step)

    def work(self, tile_tokens: int) -> list[tuple[bool, int, int]]:
        """Work lists that are not empty: whether for decoding, number of tiles, address."""
        if tile_tokens not in self._work:
            lists = attention.plan_tiles(self._query_start, self._context_len, tile_tokens)
            self._kept.extend(lists)
            self._work[tile_tokens] = [
                (decode, len(tiles), tiles.ctypes.data)
                for decode, tiles in zip((True, False), lists, strict=True)
                if tiles.size
            ]
        return self._work[tile_tokens]


def _fast(*tensors: Tensor, weight: Tensor | None = None) -> bool:
    """All of one dtype that kernels know, and not empty; ``weight`` may be fp32 as well."""
    dtype = tensors[0].dtype
    if weight is not None and weight.dtype not in (dtype, torch.float32):
        return False
    return dtype in _FAST and all(t.dtype is dtype and t.numel() for t in tensors)


def _rows_of_heads(x: Tensor) -> bool:
    """``x`` [T, H, D] is dense but for a stride between tokens."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _layer_place(kv_pages: Tensor, layer: int) -> tuple[int, int, int, int]:
    """Address of the layer's K in page 0; bytes from page to page, K to V, head to head."""
    size = kv_pages.element_size()
    page, layers, values, head = kv_pages.stride()[:4]
    return kv_pages.data_ptr() + layer * layers * size, page * size, values * size, head * size
