"""Renders ``docs/performance.md`` from what was measured: ``python -m benchmarks.h200_doc``.

``--add FILE …`` first adds the runs of files that ``benchmarks.h200`` wrote to
``benchmarks/results/h200.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.check import ROOT
from benchmarks.h200_results import (
    RESULT,
    Run,
    Stale,
    latest_rows,
    read_runs,
    write_runs,
)
from benchmarks.h200_table import OFFLINE, OFFLINE_W5, SERVED, START, STEPS, Row

DOC = ROOT / "docs" / "performance.md"
HEAD = """\
# Performance

All figures on this page are printed by a command and rendered by `python -m benchmarks.h200_doc`;
none is typed by hand. On one NVIDIA H200, nothing else running,

    python -m benchmarks.h200 --out DIR

measures all rows, and with `--rows "NAME"` the one of that name. A value is the median of its
repetitions, with the least and the most of them in brackets. `make check NAME=h200` holds the
values against the bounds ("asked for"), and refuses figures of other code than that at hand.
*Peer*: the best of vLLM 0.26.0, SGLang 0.5.15 and nano-vllm, measured on such a card. *Ceiling*:
the products as cuBLAS does them in a captured graph, keys and values at the card's read bandwidth,
and nothing else.

Models are Llama-3-8B and Qwen3-0.6B in shape (`benchmarks/models/`), in bf16 with random weights;
prompts are random ids, new ones for each repetition, and every output has the length asked for.
"""
WORKLOADS = """\
**W1**: 256 requests at once, 100 to 1,024 tokens in and as many out, temperature 0.6. **W2**: one
stream, 128 in, 256 out, greedy, from its second token on. **W3**: 32 prompts of 4,096, 1 out.
**W4**: 512 requests of 32 in and 512 out, greedy. The fp8 row keeps keys and values in fp8.
"""
SERVED_TEXT = """\
Over HTTP on the same machine, streaming, with a tokenizer as large as the model's vocabulary.
**W5**: 1,024 requests of 512 in and 256 out, 256 at a time. **W6**: for 60 s, requests of 512 in
and 128 out arrive at random, 8 a second, and every 2 s a prompt of 16,000 tokens with 32 out; TTFT
and ITL are those of the short ones. The row without chunks, over 12 s of prompts that are
computed whole, shows that the test can fail: it must miss the bound.
"""
START_TEXT = """\
From the command to the first token: `python -m benchmarks.first_token llama3-8b`.
"""
STEPS_TEXT = """\
What a step must not do. *Idle*: no work on the device, from the call to the last id. *Host waits*:
calls that wait for the device while a step is being started. *Memory growth*: over 40 runs of W1
with a quarter of its tokens in and a sixteenth out. *Replayed*: W1's plans once more, one at a
time and two under way. *fp32 ids*: those of a random tiny model, for requests of W1's lengths.
"""
SECTIONS = (
    ("Offline", WORKLOADS, OFFLINE),
    ("Served", SERVED_TEXT, SERVED),
    ("Start", START_TEXT, START),
    ("Inside a step", STEPS_TEXT, STEPS),
)
COLUMNS = ("row", "unit", "measured", "asked for", "peer", "goal", "ceiling")


def render(runs: Sequence[Run]) -> str:
    rows = latest_rows(runs)
    parts = [HEAD]
    for title, text, table in SECTIONS:
        parts += [f"## {title}\n", text, "\n".join(table_lines(table, rows)) + "\n"]
        if title == "Served":
            parts += _notes(rows)
    parts += ["## Where the figures come from\n", "\n".join(_sources(runs, rows)) + "\n"]
    return "\n".join(parts)


def table_lines(table: Sequence[Row], rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for row in table:
        asked = f"{OPERATORS[row.op]} {number(row.bound)}"
        cells = (row.name, row.unit, measured(rows.get(row.name)), asked, row.peer, row.goal,
                 row.ceiling)  # fmt: skip
        yield f"| {' | '.join(cells)} |"


OPERATORS = {">=": "≥", "<=": "≤", ">": ">"}


def measured(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    low, high = number(min(row["raw"])), number(max(row["raw"]))
    return number(row["value"]) + (f" ({low} to {high})" if low != high else "")


def number(value: float) -> str:
    """Four digits, or a whole number from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _notes(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if offline := rows.get(OFFLINE_W5):
        yield f"Offline, W5's lengths give {measured(offline)} output tok/s.\n"
    for name in ("W6 TTFT p99", "W6 without chunks, ITL p99.9"):
        if rows.get(name, {}).get("server"):
            yield f"{name}: `octavo serve … {rows[name]['server']}`.\n"
    if found := rows.get("W6 TTFT p99", {}).get("found"):
        spreads = "; ".join(
            f"{word} {', '.join(f'{q} {number(ms)}' for q, ms in found[key].items())}"
            for word, key in (
                ("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("TTFT of 16k prompts", "long_ttft_ms"),
            )
        )  # fmt: skip
        yield f"W6 in full, in ms: {spreads}.\n"


def _sources(runs: Sequence[Run], rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    used = {row["commit"] for row in rows.values()}
    for run in runs:
        if run["short"] or run["commit"] not in used:
            continue
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        yield f"- {run['date']}, {run['card']}, commit {run['commit'][:12]}, {versions}:"
        yield f"  `{' '.join(run['command'])}`"
    if not used:
        yield "Nothing has been measured yet."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE")
    args = parser.parse_args(argv)
    runs = read_runs(RESULT) if RESULT.exists() else []
    for path in args.add:
        runs += read_runs(path)
    if args.add:
        write_runs(RESULT, runs)
    DOC.write_text(render(runs))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Stale as error:
        sys.exit(f"benchmarks.h200_doc: {error}")
