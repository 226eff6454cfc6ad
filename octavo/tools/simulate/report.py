"""The figures of a simulated run, and the lines that a person reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from octavo.tools.bench.report import row, rule
from octavo.tools.simulate.outcome import Outcome
from octavo.tools.simulate.trace import Trace

TTFT_PERCENTILES = (50, 90, 95, 99)
ITL_PERCENTILES = (50, 95, 99, 99.9)
LABELS = (
    ("Requests:", "requests", "{:,.0f}"),
    ("Simulated time (s):", "seconds", "{:,.2f}"),
    ("Steps:", "steps", "{:,.0f}"),
    ("Request throughput (req/s):", "request_s", "{:.2f}"),
    ("Input token throughput (tok/s):", "input_tok_s", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_tok_s", "{:.2f}"),
    ("Preemptions:", "preemptions", "{:,.0f}"),
    ("Most preemptions of a request:", "most_preemptions", "{:.0f}"),
    ("Recomputed tokens:", "recomputed_share", "{:.2%}"),
    ("KV cache in use, mean:", "mean_pool_use", "{:.1%}"),
    ("Running requests, mean:", "mean_running", "{:.1f}"),
    ("Running requests, peak:", "peak_running", "{:.0f}"),
    ("Recorded output (tok/s):", "recorded_output_tok_s", "{:.2f}"),
    ("Recorded steps after the last end:", "recorded_steps_left_out", "{:,.0f}"),
    ("Decodes of requests cut off:", "recorded_rows_left_out", "{:.1%}"),
    ("Predicted ÷ recorded output:", "predicted_over_recorded", "{:.3f}"),
)


def summarise(trace: Trace, outcome: Outcome) -> dict[str, Any]:
    """Counts, rates (tokens or requests a simulated second), times in ms; None where a run has
    nothing to measure."""
    steps, seconds = outcome.steps, outcome.seconds
    ttft = 1e3 * outcome.ttft() if outcome.output_tokens else np.array([np.nan])
    prompts = int(trace.prompt[outcome.first_step >= 0].sum())
    return {
        "requests": len(trace),
        "finished": dict(Counter(outcome.finish)),
        "seconds": seconds,
        "steps": len(steps),
        "request_s": outcome.num_finished / seconds,
        "input_tok_s": prompts / seconds,
        "output_tok_s": outcome.output_rate,
        "preemptions": int(outcome.preemptions.sum()),
        "most_preemptions": int(outcome.preemptions.max()),
        "recomputed_share": outcome.recomputed_tokens / outcome.computed_tokens,
        "mean_pool_use": outcome.mean_referenced,
        "mean_running": float(np.average(steps.running, weights=steps.seconds)),
        "peak_running": int(steps.running.max()),
        "ttft_ms": {f"p{q:g}": _known(np.percentile(ttft, q)) for q in TTFT_PERCENTILES},
        "itl_ms": {f"p{q:g}": _known(1e3 * outcome.gap_percentile(q)) for q in ITL_PERCENTILES},
    }


def result_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    yield rule(" Simulation ", "=")
    for label, name, form in LABELS:
        if name in figures:
            yield row(label, _shown(figures[name], form))
    for reason, count in sorted(figures["finished"].items()):
        yield row(f"Ended with reason {reason}:", f"{count:,}")
    for short, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms")):
        for key, value in figures[name].items():
            yield row(f"{key.upper()} {short} (ms):", _shown(value, "{:.2f}"))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)
