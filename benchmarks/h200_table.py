"""The rows of the H200 benchmark: what each is, who else reached what, and what is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """``op`` and ``bound`` judge the value, which sums up ``reps`` repetitions. ``part``: the
    process that measures it. ``peer``, ``goal``, ``ceiling``: for readers."""

    name: str
    unit: str
    op: str
    bound: float
    part: str
    reps: int = 1
    peer: str = ""
    goal: str = ""
    ceiling: str = ""


def _rate(
    model: str, work: str, kind: str, bound: float, numbers: tuple[str, str, str], reps: int = 3
) -> Row:
    part = model if work != "W1 fp8" else f"{model} fp8"
    return Row(f"{model} {work}", f"{kind} tok/s", ">=", bound, part, reps, *numbers)


OFFLINE = (
    _rate("8B", "W1", "output", 10_500, ("9,530", "11,300", "11,960")),
    _rate("8B", "W1 fp8", "output", 11_300, ("10,100", "12,800", "14,200")),
    _rate("8B", "W2", "decode", 232, ("210", "255", "286")),
    _rate("8B", "W3", "input", 41_500, ("40,950", "44,000", "51,800")),
    _rate("8B", "W4", "output", 28_000, ("24,000", "32,000", "35,000")),
    _rate("0.6B", "W1", "output", 25_500, ("23,200", "28,500", "31,000")),
    _rate("0.6B", "W2", "decode", 850, ("575", "1,300", "3,600"), reps=5),
    _rate("0.6B", "W3", "input", 343_000, ("343,000", "400,000", "577,000")),
    _rate("0.6B", "W4", "output", 70_000, ("59,500", "82,000", "99,000")),
    Row("8B W1 with top_p and top_k", "share of W1", ">=", 0.97, "8B", 3, "", "0.99", "1"),
)
SERVED = (
    Row("8B W5", "output tok/s", ">=", 10_700, "served", 3, "9,719", "11,500"),
    Row("8B W5 over offline", "share", ">=", 0.97, "served", 3, "0.98", "0.99"),
    Row("W6 TTFT p99", "ms", "<=", 350, "mixed", 1, "478", "150"),
    Row("W6 ITL p99", "ms", "<=", 25, "mixed", 1, "27", "15"),
    Row("W6 ITL p99.9", "ms", "<=", 60, "mixed", 1, "250", "30"),
    Row("W6 preemptions", "", "<=", 0, "mixed", 1, "0", "0"),
    Row("W6 TTFT of 16k prompts, median", "ms", "<=", 700, "mixed", 1, "467", "500"),
    Row("W6 without chunks, ITL p99.9", "ms", ">", 60, "mixed"),
)
START = (
    Row("8B first token, empty kernel cache", "s", "<=", 40, "start", 1, "42", "20"),
    Row("8B first token, filled kernel cache", "s", "<=", 15, "start", 1, "42", "8"),
    Row("8B graphs, capture", "s", "<=", 6, "start"),
    Row("8B graphs, memory", "GiB", "<=", 2, "start"),
)
STEPS = (
    Row("8B W2 idle", "share of time", "<=", 0.03, "8B", 3),
    Row("8B W4 idle", "share of time", "<=", 0.03, "8B", 3),
    Row("host waits in a step", "most in a step", "<=", 0, "0.6B"),
    Row("0.6B memory growth over 40 runs", "MiB", "<=", 0, "0.6B"),
    Row("0.6B W1 replayed", "steps whose ids differ", "<=", 0, "0.6B"),
    Row("fp32 ids, card = CPU", "share of requests", ">=", 1, "ids"),
    Row("fp32 ids, overlapped = plain", "share of requests", ">=", 1, "ids"),
)
ROWS = {row.name: row for row in (*OFFLINE, *SERVED, *START, *STEPS)}
OFFLINE_W5 = "8B W5 offline"  # without a bound of its own
PARTS = ("start", "8B", "0.6B", "served", "mixed", "8B fp8", "ids")  # the most valuable first
W6_ITL_BOUND_MS = ROWS["W6 ITL p99.9"].bound
