"""Where a step's time goes on this CPU, from ops alone, beside what else could do each op.

    python benchmarks/cpu_ops.py [--rows 64] [--context 256] [--prompt 2048] [--dtype bfloat16]
                               [--kv-cache-dtype fp8]

Weights are random, shapes those of SmolLM2-135M. The alternatives to an op are timed in turns, and
the best of all turns counts: the machine may be shared. With ``--threads 1`` the clock is the
thread's own CPU time, so that other programs hardly matter.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops import fp8
from octavo.ops.api import GroupMeta, Ops
from octavo.ops.select import select_ops

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * DIM
PAGE_SIZE = 16
Result = TypeVar("Result")
clock = time.perf_counter
SCALE = DIM**-0.5
EPS = 1e-5


@dataclass
class Step:
    """The inputs of one step: ``rows`` requests with ``new`` tokens each, of ``context`` in all."""

    rows: int
    new: int
    context: int
    dtype: torch.dtype
    fp8: bool = False
    positions: Tensor = field(init=False)
    kv: Tensor = field(init=False)
    _parts: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        pages_a_row = -(-self.context // PAGE_SIZE)
        order = torch.randperm(self.rows * pages_a_row, generator=generator) + 1
        table = order.view(self.rows, pages_a_row)
        self.kv = torch.zeros(
            len(order) + 1, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM, dtype=self.dtype
        ).normal_(generator=generator)
        if self.fp8:
            codes, scales = fp8.quantize(self.kv)
            self.kv = torch.cat((codes.flatten(-2), scales.view(torch.uint8)), -1)
        places = torch.arange(self.context - self.new, self.context)
        self.positions = places.repeat(self.rows)
        self._parts = (
            torch.arange(0, self.rows * self.new + 1, self.new, dtype=torch.int32),
            torch.full((self.rows,), self.context, dtype=torch.int32),
            table.to(torch.int32),
            table[:, places // PAGE_SIZE].flatten(),
            (places % PAGE_SIZE).repeat(self.rows),
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    def meta(self) -> GroupMeta:
        return GroupMeta(
            *self._parts, page_size=PAGE_SIZE, max_query=self.new, max_context=self.context
        )


class Trunk:
    """30 layers and a head of random weights, run through ``ops`` with a clock around each op."""

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self.ops = ops
        self.cos_sin = torch.rand(8192, DIM)
        self.norm = torch.ones(HIDDEN, dtype=dtype)

        def packed(n: int, k: int) -> object:
            return ops.pack_linear(torch.randn(n, k, dtype=dtype) * k**-0.5, None)

        shapes = ((QKV, HIDDEN), (HIDDEN, HEADS * DIM), (2 * MLP, HIDDEN), (HIDDEN, MLP))
        self.layers = [[packed(n, k) for n, k in shapes] for _ in range(LAYERS)]
        self.head = packed(VOCAB, HIDDEN)
        self.calls: list[tuple[str, float]] = []  # of the last step: op, seconds

    def _timed(self, name: str, call: Callable[[], Result]) -> Result:
        begin = clock()
        result = call()
        self.calls.append((name, clock() - begin))
        return result

    def run(self, step: Step, x: Tensor) -> float:
        """Seconds of a whole step; ``self.calls`` has its parts."""
        self.calls.clear()
        begin = clock()
        meta, residual = step.meta(), x
        ops, timed = self.ops, self._timed
        hidden = timed("norms", lambda: ops.rms_norm(x, self.norm, EPS))
        for layer, weights in enumerate(self.layers):
            hidden, residual = self._layer(step, meta, layer, weights, hidden, residual)
        last = hidden[step.new - 1 :: step.new]
        timed("head", lambda: ops.linear(last, self.head))
        return clock() - begin

    def _layer(
        self,
        step: Step,
        meta: GroupMeta,
        layer: int,
        weights: list,
        hidden: Tensor,
        residual: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ops, timed, norm = self.ops, self._timed, self.norm
        qkv, o, gate_up, down = weights
        mixed = timed("linear qkv", lambda: ops.linear(hidden, qkv))
        q = timed("rope + write", lambda: ops.rope_and_write(
            mixed, step.positions, self.cos_sin, step.kv, layer, meta, HEADS, KV_HEADS
        ))  # fmt: skip
        out = torch.empty_like(q)

        def attend() -> Tensor:
            ops.attend(q, step.kv, layer, meta, out, SCALE)
            return out

        out = timed("attend", attend).view(step.tokens, -1)
        x = timed("linear o", lambda: ops.linear(out, o))
        hidden, residual = timed("norms", lambda: ops.add_rms_norm(x, residual, norm, EPS))
        wide = timed("linear gate_up", lambda: ops.linear(hidden, gate_up))
        act = timed("silu", lambda: ops.silu_mul(wide))
        y = timed("linear down", lambda: ops.linear(act, down))
        return timed("norms", lambda: ops.add_rms_norm(y, residual, norm, EPS))


def best_of(candidates: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Best seconds of each, taken in turns after one warm-up."""
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(turns + 1):
        for name, call in candidates.items():
            begin = clock()
            call()
            if turn:
                best[name] = min(best[name], clock() - begin)
    return best


def show_step(title: str, step: Step, trunks: dict[str, Trunk], turns: int) -> None:
    """Each call's best over all turns, summed by op: what a quiet machine would do."""
    whole = dict.fromkeys(trunks, float("inf"))
    best: dict[str, list[float]] = {}
    for _ in range(turns + 1):
        for name, trunk in trunks.items():
            x = torch.randn(step.tokens, HIDDEN, dtype=step.dtype)
            whole[name] = min(whole[name], trunk.run(step, x))
            seconds = [s for _, s in trunk.calls]
            best[name] = [min(pair) for pair in zip(best.get(name, seconds), seconds, strict=True)]
    parts: dict[str, dict[str, float]] = {name: defaultdict(float) for name in trunks}
    for name, trunk in trunks.items():
        for (op, _), seconds in zip(trunk.calls, best[name], strict=True):
            parts[name][op] += seconds
    print(f"\n{title}: ms in all {LAYERS} layers, each call at its best")
    print(f"{'':16}" + "".join(f"{name:>12}" for name in trunks))
    for op in next(iter(parts.values())):
        print(f"{op:16}" + "".join(f"{parts[name][op] * 1e3:12.2f}" for name in trunks))
    total = {name: sum(parts[name].values()) for name in trunks}
    print(f"{'sum':16}" + "".join(f"{total[name] * 1e3:12.2f}" for name in trunks))
    print(f"{'tokens/s':16}" + "".join(f"{step.tokens / total[name]:12.0f}" for name in trunks))
    print(f"{'best whole step':16}" + "".join(f"{whole[name] * 1e3:12.2f}" for name in trunks))


def show_ops(ops: Ops, step: Step, turns: int) -> None:
    """One layer's ops at decode size, each against its alternatives."""
    reference = Ops()
    rows, context, dtype = step.rows, step.context, step.dtype
    meta = step.meta()
    x, residual = (torch.randn(rows, HIDDEN, dtype=dtype) for _ in range(2))
    weight, norm = torch.randn(2 * MLP, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    packed, wide = ops.pack_linear(weight, None), torch.randn(rows, 2 * MLP, dtype=dtype)
    qkv, cos_sin = torch.randn(rows, QKV, dtype=dtype), torch.rand(8192, DIM)
    q, out = torch.randn(rows, HEADS, DIM, dtype=dtype), torch.empty(rows, HEADS, DIM, dtype=dtype)
    k, v = (torch.randn(rows, KV_HEADS, context, DIM, dtype=dtype) for _ in range(2))

    def both(call: Callable[[Ops], object]) -> dict[str, Callable[[], object]]:
        return {ops.name: lambda: call(ops), "reference": lambda: call(reference)}

    def padded() -> Tensor:
        return functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    cases: dict[str, dict[str, Callable[[], object]]] = {
        "rms_norm": both(lambda o: o.rms_norm(x, norm, EPS)),
        "add_rms_norm": both(lambda o: o.add_rms_norm(x, residual, norm, EPS)),
        "silu_mul": both(lambda o: o.silu_mul(wide)),
        "rope_and_write": both(
            lambda o: o.rope_and_write(
                qkv, step.positions, cos_sin, step.kv, 0, meta, HEADS, KV_HEADS
            )
        ),
        "attend": both(lambda o: o.attend(q, step.kv, 0, meta, out, SCALE))
        | {"padded SDPA without the gather": padded},
        "linear gate_up": {
            ops.name: lambda: ops.linear(x, packed),
            "F.linear": lambda: functional.linear(x, weight),
        },
    }
    print(f"\none layer, {rows} rows at context {context}: µs")
    for case, candidates in cases.items():
        best = best_of(candidates, turns)
        print(f"{case:16}" + "".join(f"{name:>32} {best[name] * 1e6:8.1f}" for name in best))


def show_prompt_attention(ops: Ops, step: Step, turns: int) -> None:
    prompt, dtype = step.context, step.dtype
    meta = step.meta()
    q = torch.randn(prompt, HEADS, DIM, dtype=dtype)
    k, v = (torch.randn(1, KV_HEADS, prompt, DIM, dtype=dtype) for _ in range(2))
    out, dense = torch.empty_like(q), q.transpose(0, 1).unsqueeze(0).contiguous()
    candidates: dict[str, Callable[[], object]] = {
        ops.name: lambda: ops.attend(q, step.kv, 0, meta, out, SCALE),
        "SDPA": lambda: functional.scaled_dot_product_attention(
            dense, k, v, is_causal=True, enable_gqa=True
        ),
    }
    best = best_of(candidates, turns)
    flops = 2 * HEADS * DIM * prompt * (prompt + 1)
    print(f"\nattention of one prompt of {prompt}, one layer: ms (GFLOP/s)")
    for name, seconds in best.items():
        print(f"{name:16}{seconds * 1e3:8.2f} ({flops / seconds / 1e9:.0f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--threads", type=int, help="default: all that may be used")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--reference", action="store_true", help="whole steps on the reference too")
    args = parser.parse_args()
    if args.threads == 1:
        global clock
        clock = time.thread_time
    dtype = getattr(torch, args.dtype)
    ops = select_ops("cpu", dtype, threads=args.threads)
    print(ops.describe() if hasattr(ops, "describe") else ops.name)
    small = args.kv_cache_dtype == "fp8"
    decode = Step(args.rows, 1, args.context, dtype, small)
    prompt = Step(1, args.prompt, args.prompt, dtype, small)
    show_ops(ops, decode, args.turns * 5)
    show_prompt_attention(ops, prompt, args.turns)
    trunks = {ops.name: Trunk(ops, dtype)}
    if args.reference:
        trunks["reference"] = Trunk(Ops(), dtype)
    show_step(
        f"decode, {args.rows} rows at context {args.context}",
        decode,
        trunks,
        args.turns,
    )
    show_step("decode, 1 row", Step(1, 1, args.context, dtype, small), trunks, args.turns)
    show_step(f"one prompt of {args.prompt}", prompt, trunks, max(2, args.turns // 4))


if __name__ == "__main__":
    main()
