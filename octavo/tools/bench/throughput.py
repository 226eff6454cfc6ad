"""``octavo bench throughput``: many prompts at once, in this process."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from octavo.config.options import Options
from octavo.tools.bench.arguments import (
    add_generation_flags,
    add_output_flags,
    add_workload_flags,
    temperature_of,
    workload_of,
)
from octavo.tools.bench.report import build_report, device_name, numbers, rule, write_report
from octavo.tools.flags import Parser, add_options, options_of
from octavo.tools.local import ENGINE_GROUPS

LABELS = (
    ("Total num requests:", "completed", "{:.0f}"),
    ("Total num prompt tokens:", "prompt_tokens", "{:.0f}"),
    ("Total num output tokens:", "output_tokens", "{:.0f}"),
    ("Elapsed time (s):", "seconds", "{:.2f}"),
    ("Request throughput (req/s):", "request_s", "{:.2f}"),
    ("Input token throughput (tok/s):", "input_tok_s", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_tok_s", "{:.2f}"),
    ("Steps:", "steps", "{:.0f}"),
    ("Preemptions:", "preemptions", "{:.0f}"),
    ("Time outside the model (s):", "host_s", "{:.3f}"),
    ("Time on the GPU (s):", "gpu_s", "{:.3f}"),
    ("Idle share of the device:", "idle_share", "{:.1%}"),
    ("Share of measured bandwidth:", "bandwidth_share", "{:.1%}"),
    ("Share of measured FLOP/s:", "flops_share", "{:.1%}"),
)


def main(argv: Sequence[str]) -> int:
    args, options = _read(argv)
    from octavo.tools.bench.offline import OfflineEngine, summarise_run

    with closing(OfflineEngine(options)) as engine:
        workload = workload_of(args, options.seed, engine.spec.vocab_size)
        ignore_eos = workload.has_lengths if args.ignore_eos is None else args.ignore_eos
        how: dict[str, Any] = {"temperature": temperature_of(args), "ignore_eos": ignore_eos}
        engine.run(workload.tasks(args.reps)[:1], show=False, **how)  # what runs first runs slower
        reps = []
        for repetition in range(args.reps):
            run = engine.run(workload.tasks(repetition), **how)
            reps.append(summarise_run(run) | engine.shares(run.steps, run.seconds))
    print("\n".join(result_lines(reps, engine.peak.text)))
    if args.json is not None:
        described = workload.described() | how | engine.described()
        report = build_report(args.name, reps, described, device_name(engine.device))
        write_report(args.json, report)
    return 0


def _read(argv: Sequence[str]) -> tuple[argparse.Namespace, Options]:
    parser = Parser(
        "octavo bench throughput",
        "Measure generation without a server.",
        usage="octavo bench throughput [MODEL] [flags]",
    )
    add_workload_flags(parser)
    add_generation_flags(parser)
    add_output_flags(parser, "throughput")
    add_options(parser, ENGINE_GROUPS)
    args = parser.read(argv)
    return args, options_of(args)


def result_lines(reps: Sequence[Mapping[str, Any]], peak: str) -> Iterator[str]:
    yield rule(" Throughput ", "=")
    for label, name, form in LABELS:
        yield from numbers(label, [rep.get(name) for rep in reps], form)
    yield peak
