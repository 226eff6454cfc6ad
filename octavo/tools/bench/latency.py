"""``octavo bench latency``: one batch at a time in this process, prefill and decode apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from octavo.config.kinds import real
from octavo.config.options import Options
from octavo.tools.bench.arguments import (
    NUMBER,
    add_output_flags,
)
from octavo.tools.bench.report import (
    build_report,
    device_name,
    numbers,
    rule,
    spread_labels,
    write_report,
)
from octavo.tools.bench.summary import spread
from octavo.tools.bench.workload import Workload
from octavo.tools.flags import Parser, add_options, options_of
from octavo.tools.local import ENGINE_GROUPS
from octavo.tools.values import value_of

if TYPE_CHECKING:
    from octavo.tools.bench.offline import OfflineEngine, Run

LABELS = (
    ("Latency of the batch (s):", "seconds", "{:.3f}"),
    ("Prefill (s):", "prefill_s", "{:.3f}"),
    ("Prefill throughput (tok/s):", "prefill_tok_s", "{:.2f}"),
    ("Prefill, share of measured FLOP/s:", "prefill_flops_share", "{:.1%}"),
    ("Decode throughput (tok/s):", "decode_tok_s", "{:.2f}"),
    ("Decode, share of measured bandwidth:", "bandwidth_share", "{:.1%}"),
    ("Decode, share of measured FLOP/s:", "flops_share", "{:.1%}"),
    ("Time outside the model (s):", "host_s", "{:.3f}"),
    ("Time on the GPU (s):", "gpu_s", "{:.3f}"),
    ("Idle share of the device:", "idle_share", "{:.1%}"),
)


def main(argv: Sequence[str]) -> int:
    args, options = _read(argv)
    from octavo.tools.bench.offline import OfflineEngine

    with closing(OfflineEngine(options)) as engine:
        workload = Workload(
            num_prompts=args.batch_size,
            input_len=args.input_len,
            output_len=args.output_len,
            vocab_size=engine.spec.vocab_size,
            seed=options.seed,
        )
        how = {"temperature": args.temperature, "ignore_eos": True}
        engine.run(workload.tasks(args.reps), show=False, **how)  # what runs first runs slower
        reps = []
        for repetition in range(args.reps):
            run = engine.run(workload.tasks(repetition), show=False, **how)
            reps.append(split_run(engine, run, args.input_len))
    print("\n".join(result_lines(reps, engine.peak.text)))
    if args.json is not None:
        described = workload.described() | how | engine.described()
        report = build_report(args.name, reps, described, device_name(engine.device))
        write_report(args.json, report)
    return 0


def split_run(engine: OfflineEngine, run: Run, input_len: int) -> dict[str, Any]:
    """A repetition. Prefill ends with the last step that computed a prompt's token; ``itl_ms`` is
    the time from the end of one later step to the next. ``bandwidth_share``: of these."""
    from octavo.tools.bench.offline import summarise_run

    is_prefill = [step.computes_prompt(input_len) for step in run.steps]
    num_prefill = len(is_prefill) - is_prefill[::-1].index(True)
    prefill, decode = run.steps[:num_prefill], run.steps[num_prefill:]
    ends = [step.ended_at for step in run.steps[num_prefill - 1 :]]
    prefill_s = ends[0] - run.start_at
    rep = summarise_run(run) | {
        "prefill_s": prefill_s,
        "prefill_tok_s": sum(sum(step.counts) for step in prefill) / prefill_s,
        "prefill_flops_share": engine.shares(prefill, prefill_s)["flops_share"],
        "ttft_ms": spread([1e3 * prefill_s]),
        "itl_ms": spread(1e3 * (b - a) for a, b in pairwise(ends)),
    }
    if decode:
        decode_s = ends[-1] - ends[0]
        rep["decode_tok_s"] = sum(step.num_samples for step in decode) / decode_s
        rep |= engine.shares(decode, decode_s)
    return rep


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, Options]:
    parser = Parser(
        "octavo bench latency",
        "Measure one batch of random prompts, prefill and decode apart.",
        usage="octavo bench latency [MODEL] [flags]",
    )
    add = parser.add_argument_group("Workload").add_argument
    add("--batch-size", type=NUMBER, default=8, metavar="N", help="prompts (default: 8)")
    add("--input-len", type=NUMBER, default=32, metavar="N", help="tokens a prompt (default: 32)")
    add("--output-len", type=NUMBER, default=128, metavar="N", help="new tokens (default: 128)")
    add("--temperature", type=value_of(real(0)), default=0.0, metavar="X", help="default: 0")
    add_output_flags(parser, "latency", reps=5)
    add_options(parser, ENGINE_GROUPS)
    args = parser.read(argv)
    return args, options_of(args)


def result_lines(reps: Sequence[Mapping[str, Any]], peak: str) -> Iterator[str]:
    yield rule(" Latency ", "=")
    for label, name, form in LABELS:
        yield from numbers(label, [rep.get(name) for rep in reps], form)
    steps = [rep["itl_ms"] for rep in reps]
    if all(each is not None for each in steps):
        yield rule("Decode step", "-")
        for word, key in spread_labels():
            yield from numbers(f"{word} step (ms):", [each[key] for each in steps], "{:.2f}")
    yield peak
