"""``octavo bench compare``: two measurements, or two servers measured in turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from octavo.config.kinds import real
from octavo.config.load import OptionError
from octavo.tools.bench.arguments import NUMBER, add_serving_flags, add_workload_flags
from octavo.tools.bench.report import read_report, write_report
from octavo.tools.bench.stats import (
    FALSE_ALARMS,
    MIN_EFFECT,
    Comparison,
    Verdict,
    compare,
    interleaved,
    overall,
)
from octavo.tools.flags import Parser
from octavo.tools.values import value_of

DEFAULT_REPS = 6
EPILOG = """\
A and B are files written by --json of octavo bench, or comma-separated lists of such files (several
starts of an engine tell more than several repetitions in one). With --serve the two servers are
measured in turns, A B B A A B …, so that what else happens on the machine meets both.

A difference is named if it is at least --min-effect and an interval around it, taken from the
repetitions, excludes "none". Of comparisons between equals, --false-alarms name one."""

Reps = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    if args.serve is not None:
        if args.files:
            raise OptionError("Give either two files or --serve with two servers, not both.")
        a, b = _measured(args)
    else:
        if len(args.files) != 2:
            raise OptionError(f"octavo bench compare needs two files, not {len(args.files)}.")
        a, b = _read(args.files[0]), _read(args.files[1])
    found = compare(
        a["reps"], b["reps"], false_alarms=args.false_alarms, min_effect=args.min_effect
    )
    print("\n".join(comparison_lines(found, a, b)))
    return 0


class Measurable(Protocol):
    """What is measured in turns, as :class:`octavo.tools.bench.serve.Bench` is."""

    def measure(self, repetition: int, side: int) -> Mapping[str, Any]: ...


def measure_in_turns(a: Measurable, b: Measurable, reps: int, first: int = 0) -> tuple[Reps, Reps]:
    """Repetitions ``first``, … of both, in the order A B, B A, A B, …"""
    taken: tuple[list[Any], list[Any]] = ([], [])
    for repetition in range(first, first + reps):
        for side in (0, 1) if repetition % 2 == 0 else (1, 0):
            taken[side].append((a, b)[side].measure(repetition, side))
    return taken


def _parser() -> Parser:
    parser = Parser(
        "octavo bench compare",
        "Say whether B differs from A by more than noise.",
        EPILOG,
        usage="octavo bench compare A.json B.json\n"
        "       octavo bench compare --serve URL_A URL_B [flags of octavo bench serve]",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="measurements A and B")
    add = parser.add_argument
    add("--serve", nargs=2, metavar="URL", help="measure two servers in turns")
    add("--reps", type=NUMBER, default=DEFAULT_REPS, metavar="N",
        help=f"repetitions of each server (default: {DEFAULT_REPS})")  # fmt: skip
    add("--json", nargs=2, metavar="FILE", help="write both servers' figures to two files")
    add("--false-alarms", type=value_of(real(0, 1, above_low=True)), default=FALSE_ALARMS,
        metavar="X", help=f"default: {FALSE_ALARMS:g}")  # fmt: skip
    add("--min-effect", type=value_of(real(0)), default=MIN_EFFECT, metavar="X",
        help=f"smallest change worth a name, as a share (default: {MIN_EFFECT:g})")  # fmt: skip
    add_serving_flags(parser)
    add_workload_flags(parser)
    return parser


def _measured(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    from octavo.tools.bench.serve import bench_of, report_of, warnings_of

    if args.reps < 2:
        raise OptionError(f"--reps must be at least 2 to know the noise, not {args.reps}.")
    benches = [bench_of(url, args) for url in args.serve]
    for bench in benches:
        bench.warm_up()
    sides = measure_in_turns(benches[0], benches[1], args.reps)
    for url, reps in zip(args.serve, sides, strict=True):
        for line in warnings_of(reps):
            print(f"{url}: {line}")
    a, b = (
        report_of(bench, reps, f"serve {url}")
        for bench, reps, url in zip(benches, sides, args.serve, strict=True)
    )
    if args.json is not None:
        write_report(args.json[0], a)
        write_report(args.json[1], b)
    return a, b


def _read(names: str) -> dict[str, Any]:
    """The first report of a comma-separated list, with the repetitions of all."""
    reports = [read_report(name) for name in names.split(",")]
    return reports[0] | {"reps": [rep for report in reports for rep in report["reps"]]}


def comparison_lines(
    found: Sequence[Comparison], a: Mapping[str, Any], b: Mapping[str, Any]
) -> Iterator[str]:
    """A line for each figure, then what B is."""
    for side, report in (("A", a), ("B", b)):
        commit = (report["commit"] or "unknown commit")[:12]
        yield f"{side}: {report['name']}, {commit}, {len(report['reps'])} repetitions"
    if differing := differences(a["workload"], b["workload"]):
        yield f"The workloads differ in {', '.join(differing)}: the ratios may say nothing."
    for side, report in (("A", a), ("B", b)):
        if failed := sum(rep.get("failed") or 0 for rep in report["reps"]):
            yield f"{side} failed {failed} requests; the figures leave them out."
    if not found:
        yield "There is no figure that all repetitions of both have."
        return
    yield f"{'':32}{'A':>10}{'B':>10}   B / A"
    for each in found:
        yield f"{each.metric.label:<32}{each.a:>10.2f}{each.b:>10.2f}   {ratio_text(each)}"
    how = "interleaved pairs" if interleaved(a["reps"], b["reps"]) else "separate runs"
    yield f"{verdict_text(overall(found))} ({how})"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*a, *b} if a.get(key) != b.get(key))


def ratio_text(each: Comparison) -> str:
    if each.low is None or each.high is None:
        return f"{each.ratio:.3f}   one repetition: noise is not known"
    word = f"B is {abs(each.ratio - 1):.1%} {each.verdict}"
    if each.verdict == "no difference":
        noise = max(each.high / each.ratio, each.ratio / each.low) - 1
        word = f"no difference (noise: {noise:.1%})"
    return f"{each.ratio:.3f} ({each.low:.3f} .. {each.high:.3f})   {word}"


def verdict_text(verdict: Verdict | str) -> str:
    return {
        "better": "B is better.",
        "worse": "B is worse.",
        "mixed": "B is better in some figures and worse in others.",
        "no difference": "No difference.",
    }.get(verdict, "Whether they differ cannot be told: use --reps.")
