"""A measurement as a JSON file and as the lines that a person reads."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from octavo.config.facts import read_host_facts
from octavo.config.load import OptionError
from octavo.tools.bench.summary import PERCENTILES, median_of
from octavo.version import __version__

WIDTH = 50
PACKAGES = ("torch", "numpy", "numba", "uvloop")
KEYS = (
    "name", "commit", "versions", "device", "workload", "reps", "output_tok_s", "input_tok_s",
    "ttft_ms", "itl_ms", "host_s", "gpu_s", "idle_share", "bandwidth_share",
)  # fmt: skip
HEADINGS = (
    ("TTFT", "ttft_ms", "Time to First Token"),
    ("TPOT", "tpot_ms", "Time per Output Token (excl. 1st token)"),
    ("ITL", "itl_ms", "Inter-token Latency"),
    ("E2EL", "e2e_ms", "End-to-end Latency"),
)
COUNTS = (
    ("Successful requests:", "completed", "{:.0f}"),
    ("Failed requests:", "failed", "{:.0f}"),
    ("Benchmark duration (s):", "seconds", "{:.2f}"),
    ("Total input tokens:", "prompt_tokens", "{:.0f}"),
    ("Total generated tokens:", "output_tokens", "{:.0f}"),
    ("Peak concurrent requests:", "peak_concurrency", "{:.0f}"),
    ("Request throughput (req/s):", "request_s", "{:.2f}"),
    ("Request goodput (req/s):", "goodput_req_s", "{:.2f}"),
    ("Input token throughput (tok/s):", "input_tok_s", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_tok_s", "{:.2f}"),
    ("Preemptions:", "preemptions", "{:.0f}"),
)


def build_report(
    name: str,
    reps: Sequence[Mapping[str, Any]],
    workload: Mapping[str, Any],
    device: str | None,
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The file's content, with exactly ``KEYS``: each figure is the median over ``reps``, which
    hold the raw ones; null where a measurement has no such figure."""
    given = {
        "name": name,
        "commit": commit(),
        "versions": {**installed_versions(), **(versions or {})},
        "device": device,
        "workload": dict(workload),
        "reps": [dict(rep) for rep in reps],
    }
    return given | {key: median_of(reps, key) for key in KEYS if key not in given}


def write_report(path: str, report: Mapping[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None


def read_report(path: str) -> dict[str, Any]:
    """Raises :class:`OptionError` unless it is a file that :func:`write_report` wrote."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"Cannot read {path}: {error.strerror}.") from None
    except ValueError:
        raise OptionError(f"{path} is not JSON.") from None
    if not isinstance(report, dict) or not set(KEYS) <= set(report) or not report["reps"]:
        raise OptionError(f"{path} is not a measurement by octavo bench.")
    return report


def commit() -> str | None:
    """The commit of the checkout that runs, None outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def installed_versions() -> dict[str, str]:
    found = {"octavo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: str = "cpu") -> str:
    """The CPU's or the first GPU's own name."""
    facts = read_host_facts()
    if device == "cuda" and facts.gpus:
        return facts.gpus[0].name
    return f"{facts.cpu_name}, {facts.cpu_count} cores"


def serving_lines(reps: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Iterator[str]:
    """A result with vLLM's labels; with several repetitions, medians and their range."""
    yield rule(" Serving Benchmark Result ", "=")
    for label, value in given.items():
        yield row(label, str(value))
    for label, name, form in COUNTS:
        yield from numbers(label, [rep.get(name) for rep in reps], form)
    total = [rep["input_tok_s"] + rep["output_tok_s"] for rep in reps]
    yield from numbers("Total token throughput (tok/s):", total, "{:.2f}")
    for short, name, heading in HEADINGS:
        spreads = [rep[name] for rep in reps]
        if any(each is None for each in spreads):
            continue
        yield rule(heading, "-")
        for word, key in spread_labels():
            yield from numbers(f"{word} {short} (ms):", [each[key] for each in spreads], "{:.2f}")
    yield rule("Client", "-")
    shares = [100 * rep["client_cpu_share"] for rep in reps]
    yield from numbers("Client CPU share (% of a core):", shares, "{:.0f}")
    yield from numbers("Sent late by at most (ms):", [rep["late_ms"] for rep in reps], "{:.2f}")
    yield "=" * WIDTH


def spread_labels() -> Iterator[tuple[str, str]]:
    yield "Mean", "mean"
    for q in PERCENTILES:
        yield "Median" if q == 50 else f"P{q}", f"p{q}"


def numbers(label: str, values: Sequence[float | None], form: str) -> Iterator[str]:
    """A line with the median of ``values`` and their range; none if one is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return
    low, middle, high = (form.format(f(known)) for f in (min, statistics.median, max))
    yield row(label, middle) + (f"  ({low} .. {high})" if low != high else "")


def row(label: str, value: str) -> str:
    return f"{label:<{WIDTH - 10}}{value:<10}".rstrip()


def rule(title: str, mark: str) -> str:
    return f"{title:{mark}^{WIDTH}}"
