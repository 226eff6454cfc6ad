"""``octavo bench``: throughput and latency, of a server or of an engine in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from octavo.config.load import OptionError, nearest

MEASUREMENTS = {
    "serve": ("octavo.tools.bench.serve", "load on any server that speaks OpenAI's protocol"),
    "throughput": ("octavo.tools.bench.throughput", "many prompts at once, without a server"),
    "latency": ("octavo.tools.bench.latency", "one batch, prefill and decode apart"),
    "compare": ("octavo.tools.bench.compare", "two measurements, or two servers in turns"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, *rest = argv
    if name not in MEASUREMENTS:
        best = nearest(name, MEASUREMENTS)
        hint = "see octavo bench --help." if best is None else f"did you mean {best}?"
        raise OptionError(f"octavo bench has no measurement {name!r}; {hint}")
    module = importlib.import_module(MEASUREMENTS[name][0])
    code: int = module.main(rest)
    return code


def _usage() -> str:
    lines = [f"  {name:<11} {text}" for name, (_, text) in MEASUREMENTS.items()]
    return "\n".join(["usage: octavo bench MEASUREMENT …", "", *lines])
