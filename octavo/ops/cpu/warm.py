"""Compiles or loads every kernel that a model will call, before it says it is ready."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from octavo.core.spec import ModelSpec
from octavo.ops.api import Ops
from octavo.ops.cpu.attention import AttentionShape, has_order, kv_kind
from octavo.ops.cpu.backend import CpuOps
from octavo.ops.cpu.rope import RopeShape

log = logging.getLogger(__name__)


def warm_kernels(
    ops: Ops,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    page_size: int,
    kv_dtype: torch.dtype | None = None,
    world_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Make ``ops`` ready for ``spec`` on one of ``world_size`` ranks; returns the kernels made.

    ``progress(done, total)`` is called before the first kernel and after each one. Other backends
    than CpuOps have nothing to do here.
    """
    if not isinstance(ops, CpuOps):
        return 0
    bf16 = dtype is torch.bfloat16
    kv_dtype = kv_dtype or dtype
    heads, kv_heads = spec.num_heads // world_size, max(1, spec.num_kv_heads // world_size)
    fp32_norms = bf16 and spec.norm_offset != 0
    rope = RopeShape(
        spec.head_dim, spec.rope.dim, page_size, bf16, kv_kind(kv_dtype), spec.qk_norm,
        fp32_norms=fp32_norms and spec.qk_norm,
    )  # fmt: skip
    attention = AttentionShape(heads // kv_heads, spec.head_dim, page_size, bf16, kv_kind(kv_dtype))
    gelu = spec.activation == "gelu_tanh"
    steps: list[Callable[[], object]] = [
        lambda: ops.norm_kernel(spec.hidden_size, bf16, False, fp32_norms),
        lambda: ops.norm_kernel(spec.hidden_size, bf16, True, fp32_norms),
        lambda: ops.gate_kernel(spec.intermediate_size // world_size, bf16, gelu),
    ]
    if has_order(kv_dtype, page_size, spec.head_dim):
        steps += [
            lambda: ops.rope_kernel(rope),
            lambda: ops.attention_kernel(attention, decode=True),
            lambda: ops.attention_kernel(attention, decode=False),
        ]
    else:
        log.warning(
            "Attention runs on slow reference operations: kernels know no heads of %d in %s.",
            spec.head_dim,
            kv_dtype,
        )
    report = progress or (lambda done, total: None)
    report(0, len(steps))
    for done, step in enumerate(steps, start=1):
        step()
        report(done, len(steps))
    return len(steps)
