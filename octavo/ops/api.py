"""What a model may ask of a device: one class, one method an operation.

``Ops`` is both the interface and the slow torch reference, the oracle that each fast
backend is tested against. A backend overrides the methods it has something better for.
:func:`octavo.ops.select.select_ops` picks one backend once, at start, and the start log
prints it.

Shapes: T tokens of this step, R rows (requests) of this step, H query heads, K KV heads, D head
size, P pages, L layers of the group. KV pages are [P, L, 2, K, page_size, D] of a floating type, or
bytes with scales (:mod:`octavo.ops.fp8`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from octavo.ops import fp8


@dataclass(slots=True)
class GroupMeta:
    """Where the tokens of a step live in the paged KV cache of one layer group.

    ``query_start`` int32 [R+1]: rows' token ranges; ``context_len`` int32 [R]: tokens
    visible to the row's last query, itself included; ``page_table`` int32 [R, *]: the row's
    pages in order (entries past the context, or wholly left behind by the window, are
    arbitrary); ``page`` int64 [T] and ``offset`` int64 [T]: where each new token's K and V go.
    With ``table_row`` int32 [R], row r's pages are in that row of the table instead.
    ``window`` tokens are visible to a query, itself included; 0 = full attention.
    ``page_size`` tokens a page.
    ``max_query`` and ``max_context`` are host ints, upper bounds for launches and buffers.
    ``cache`` is the backend's own: what it worked out from the values above, for all layers of
    this step. So a GroupMeta is built for each step, and never changed once an op has seen it.
    """

    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    page: Tensor
    offset: Tensor
    page_size: int
    max_query: int
    max_context: int
    window: int = 0
    table_row: Tensor | None = None
    cache: dict[str, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tables(self) -> Tensor:
        """int32 [R, *]: each row's pages in its own row."""
        return self.page_table if self.table_row is None else self.page_table[self.table_row]


class Ops:
    """Reference operations in plain torch; every device can run them."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019) over the last dimension, in fp32 inside.

        A ``weight`` of x's dtype multiplies what was rounded to it (Llama), one in fp32 what was
        not yet (Gemma).
        """
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        inner = torch.promote_types(x.dtype, weight.dtype)
        return (weight * wide.to(inner)).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``residual + x`` and its RMSNorm: returns (normed, new residual). May work in place."""
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of a merged [T, 2·I] projection: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """The same with GELU in its tanh form (Hendrycks and Gimpel 2016)."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

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
        """QK-norm if weights are given, rotate q and k, write k and v to their pages.

        ``qkv`` [T, (H + 2K)·D]; ``positions`` int64 [T]; ``cos_sin`` fp32 [max_position, rope_dim]
        (cosines, then sines; half-split "neox" rotation). A backend may order the elements within
        a head of a page as its ``attend`` likes. Returns q [T, H, D].
        """
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
        q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        _write_pages(kv_pages, layer, meta, q, k, v)
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
        """Causal attention of each row's new tokens over its pages; writes ``out`` [T, H, D].

        ``q`` [T, H, D]; ``kv_pages`` are read in place. The reference gathers pages; fast backends
        do not. Rows may be empty, and tokens past the last row (padding) are left alone. Unwritten
        parts of a page may hold NaN.
        """
        starts, contexts, tables = (
            meta.query_start.tolist(), meta.context_len.tolist(), meta.tables
        )  # fmt: skip
        for row, context in enumerate(contexts):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            first = context - (end - begin)  # position of the row's first query
            low = max(0, first - meta.window + 1) if meta.window else 0
            start = low // meta.page_size * meta.page_size  # of the first page that a query sees
            pages = tables[row, start // meta.page_size : -(-context // meta.page_size)].long()
            span = _read_pages(kv_pages[pages, layer], meta.page_size)
            k, v = (
                span[:, i].transpose(1, 2).flatten(0, 1)[low - start : context - start]
                for i in (0, 1)
            )
            visible = _visible(first, context, low, meta.window, q.device)
            out[begin:end] = _dense_attention(
                q[begin:end].float(), k, v, visible, scale, soft_cap
            ).to(out.dtype)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> object:
        """Whatever :meth:`linear` wants instead of a [N, K] weight; called once after loading."""
        return weight, bias

    def linear(self, x: Tensor, packed: object) -> Tensor:
        """``x`` [T, K] times a packed [N, K] weight, plus its bias: [T, N]."""
        weight, bias = cast("tuple[Tensor, Tensor | None]", packed)
        return torch.nn.functional.linear(x, weight, bias)

    def logits(self, hidden: Tensor, packed: object) -> Tensor:
        """:meth:`linear` of the head, in fp32."""
        return self.linear(hidden, packed).float()

    def new_pages(
        self, num_pages: int, page_elements: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Zeroed memory for a pool of pages, [num_pages, page_elements]."""
        return torch.zeros(num_pages, page_elements, dtype=dtype, device=device)

    def describe(self) -> str:
        """What was chosen, for the start log."""
        return "reference kernels (plain torch)"

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, weight)


def _write_pages(
    kv_pages: Tensor, layer: int, meta: GroupMeta, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """``k`` and ``v`` [T, K, D] to the places of the step's tokens, whose queries are ``q``."""
    for index, x in enumerate((k, v)):
        if fp8.is_fp8(kv_pages):
            weights = None if index else fp8.key_weights(q, k.shape[1])
            codes, scales = fp8.page_views(kv_pages[:, layer, index], meta.page_size)
            place = meta.page, slice(None), meta.offset
            codes[place], scales[place] = fp8.quantize(x, weights)
        else:
            kv_pages[meta.page, layer, index, :, meta.offset] = x.to(kv_pages.dtype)


def _read_pages(pages: Tensor, page_size: int) -> Tensor:
    """fp32 [N, 2, K, page_size, D] of one layer's pages [N, 2, K, ...]."""
    if fp8.is_fp8(pages):
        return fp8.dequantize(*fp8.page_views(pages, page_size))
    return pages.float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2·F features of ``x`` [T, heads, D]; ``cos``, ``sin`` [T, 1, F]."""
    half = cos.shape[-1]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _visible(first: int, context: int, low: int, window: int, device: torch.device) -> Tensor:
    """Which keys [low, context) each query [first, context) sees: bool [queries, keys]."""
    query = torch.arange(first, context, device=device).unsqueeze(1)
    key = torch.arange(low, context, device=device)
    seen = key <= query
    return seen & (key > query - window) if window else seen


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, soft_cap: float
) -> Tensor:
    """fp32 softmax attention of ``q`` [Q, H, D] over ``k``, ``v`` [C, K, D]: [Q, H, D]."""
    group = q.shape[1] // k.shape[1]  # query heads that share a KV head
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,chd->hqc", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqc,chd->qhd", weights, v)
