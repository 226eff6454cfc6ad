"""Does ``octavo bench`` tell the truth? Servers with known delays, equal ones, a planted slow-down.

The delays are the server's own schedule; the client, the socket and the scheduler of a busy machine
lie in between. Streams start evenly spaced, so that one hiccup does not hit all of them at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.check import Check
from octavo.tools.bench.compare import measure_in_turns
from octavo.tools.bench.serve import Bench, Target, with_model
from octavo.tools.bench.stats import compare, overall
from octavo.tools.bench.workload import Workload
from tests.fakes.scripted_server import scripted_server, sent_times

STREAMS = 32
TRIES = 20
REPS = 6  # pairs of repetitions in a try
EVEN = 1e6  # burstiness of arrivals at equal distances
SLOW_DOWN = 1.05
MAX_ERROR = 0.02


def measure(check: Check) -> None:
    known_delays(check)
    equal_and_slower_servers(check)


run = measure


def known_delays(
    check: Check, *, ttft_s: float = 0.5, itl_s: float = 0.02, output_len: int = 64, reps: int = 3
) -> None:
    """Median TTFT and ITL of 32 streams against the schedule, as shares of it."""
    with scripted_server("--ttft", str(ttft_s), "--itl", str(itl_s)) as url:
        bench = bench_of(url, output_len, rate=100)
        bench.warm_up()
        measured = [bench.measure(repetition) for repetition in range(reps)]
        sent = sent_times(url)[-reps * STREAMS :]
    really = {
        "ttft_ms": [1e3 * (times[1] - times[0]) for times in sent],
        "itl_ms": [1e3 * (b - a) for times in sent for a, b in pairwise(times[1:])],
    }
    check.note(
        streams=STREAMS,
        scripted_ms={"ttft": 1e3 * ttft_s, "itl": 1e3 * itl_s},
        sent_median_ms={name: statistics.median(values) for name, values in really.items()},
    )
    for name, delay_s in (("ttft_ms", ttft_s), ("itl_ms", itl_s)):
        found = [rep[name]["p50"] for rep in measured]
        error = abs(statistics.median(found) / (1e3 * delay_s) - 1)
        check.line(f"median_{name}_error", error, "<=", MAX_ERROR, raw=found)


def equal_and_slower_servers(
    check: Check,
    *,
    ttft_s: float = 0.08,
    itl_s: float = 0.02,
    output_len: int = 9,
    tries: int = TRIES,
) -> None:
    """How often equals are called equal, and a server whose delays are 5 % longer worse."""
    delays = ["--ttft", str(ttft_s), "--itl", str(itl_s)]
    longer = ["--ttft", str(ttft_s * SLOW_DOWN), "--itl", str(itl_s * SLOW_DOWN)]
    with (
        scripted_server(*delays) as first,
        scripted_server(*delays) as same,
        scripted_server(*longer) as slower,
    ):
        benches = [bench_of(url, output_len, rate=320) for url in (first, same, slower)]
        for bench in benches:
            bench.warm_up()
        equal = [verdict(benches[0], benches[1], k) for k in range(tries)]
        planted = [verdict(benches[0], benches[2], k) for k in range(tries)]
    check.note(tries=tries, repetitions=REPS, slow_down=SLOW_DOWN)
    agreed = equal.count("no difference")
    check.line("equal_servers_no_difference", agreed, ">=", at_least(19, tries), raw=equal)
    seen = planted.count("worse")
    check.line("planted_5_percent_seen", seen, ">=", at_least(18, tries), raw=planted)


def verdict(a: Bench, b: Bench, attempt: int) -> str:
    """What one comparison, as ``octavo bench compare --serve`` makes it, says of ``b``."""
    sides: tuple[Sequence, Sequence] = measure_in_turns(a, b, REPS, first=attempt * REPS)
    return overall(compare(*sides))


def bench_of(url: str, output_len: int, rate: float) -> Bench:
    workload = Workload(
        num_prompts=STREAMS, input_len=16, output_len=output_len, request_rate=rate, burstiness=EVEN
    )
    return Bench(with_model(Target(base_url=url)), workload, show_progress=False)


def at_least(of_twenty: int, tries: int) -> int:
    """The same share of fewer tries, for a short run."""
    return of_twenty * tries // TRIES
