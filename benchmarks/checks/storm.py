"""Can the scheduler be driven into a storm? Simulated: pools × loads × costs × ceilings × seeds.

``max_num_seqs`` is 4 and 16 times what the pool holds. Each bound is for the worst of two
cost models, both ceilings and five seeds. The best fixed value (of requests at once) is
found with hindsight for each seed and cost model; it, a baseline (admit when the prompt fits,
preempt the newest) and Octavo keep 1 % of the pool free and reuse their own cached pages. The bad
control (first seed only) preempts anyone and computes everything anew. All requests are there
from the start. Rates are those of whole runs, so that every policy has generated the same tokens;
pool use is averaged over the time in which anybody waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from tqdm import tqdm

from benchmarks.check import Check
from benchmarks.checks import _storm_fair, _storm_leak, _storm_targets, _storm_waste
from benchmarks.checks._storm_cells import NUM_REQUESTS, Cell, Figures, measure
from benchmarks.checks._storm_engine import overhead, prediction
from benchmarks.checks._storm_load import SHAPES
from benchmarks.checks._storm_scale import scale

HELD = tuple(NUM_REQUESTS)
SEEDS = range(5)
PROCESSES = 2
MAX_PREEMPTIONS = 20  # of one request

# By pool: at least this output rate over that of the best fixed value, and so on.
RATE = {8: 0.86, 32: 0.90, 128: 0.96, 1000: 0.93}
RATE_AFTER_SHIFT = {8: 0.88, 32: 0.92, 128: 0.95, 1000: 0.93}
PREEMPTIONS = {8: 0.3, 32: 0.1, 128: 0.1, 1000: 0.1}
RECOMPUTED = {8: 0.09, 32: 0.04, 128: 0.03, 1000: 0.03}
GAP = {8: 0.5, 32: 0.5, 128: 1.0, 1000: 1.0}
REFERENCED = {8: 0.70, 32: 0.75, 128: 0.75, 1000: 0.75}
RECOMPUTED_BIMODAL_1000 = 0.06
REFERENCED_PARETO = 0.65
BREAKABLE_POOLS = (8, 32)  # where the baseline must fail
UNBREAKABLE = (1000, "uniform")  # where not even the control does

Key = tuple[int, str]


def run(check: Check) -> None:
    overhead(check)
    prediction(check)
    scale(check)
    for drill in (_storm_leak, _storm_fair, _storm_targets, _storm_waste):
        drill.lines(check)
    grid(check, HELD, tuple(SHAPES), SEEDS)
    short_prompts(check)


def grid(
    check: Check,
    pools: Sequence[int],
    shapes: Sequence[str],
    seeds: Sequence[int],
    processes: int = PROCESSES,
) -> None:
    """Every line of the table, and those that show that the table can fail."""
    cells = [Cell(held, shape) for held, shape in itertools.product(pools, shapes)]
    check.note(requests=NUM_REQUESTS, goal="rate 0.95, recomputed 3 %, gap 1/3, referenced 85 %")
    figures = measure_all(cells, seeds, processes)
    for key in itertools.product(pools, shapes):
        table_lines(check, key, figures[key])
    for key in itertools.product(pools, shapes):
        breaking_lines(check, key, figures[key])
    always(check, list(itertools.chain.from_iterable(figures.values())))


def table_lines(check: Check, key: Key, figures: Sequence[Figures]) -> None:
    held, shape = key

    def line(metric: str, op: str, bound: float) -> None:
        values = [entry[metric] for entry in figures]
        worst = min(values) if op == ">=" else max(values)
        check.line(f"pool_{held}_{shape}_{metric}", worst, op, bound, raw=values)

    line("rate", ">=", RATE[held])
    if shape == "shift":
        line("rate_after_shift", ">=", RATE_AFTER_SHIFT[held])
    line("preemptions", "<=", PREEMPTIONS[held])
    line("recomputed", "<=", recomputed_bound(key))
    line("gap", "<=", GAP[held])
    line("referenced", ">=", REFERENCED_PARETO if shape == "pareto" else REFERENCED[held])


def recomputed_bound(key: Key) -> float:
    return RECOMPUTED_BIMODAL_1000 if key == (1000, "bimodal") else RECOMPUTED[key[0]]


def breaking_lines(check: Check, key: Key, figures: Sequence[Figures]) -> None:
    """How many times over its bound the worse of preemptions and recomputation is; the smallest."""
    held, shape = key
    for policy, must in (("baseline", held in BREAKABLE_POOLS), ("control", key != UNBREAKABLE)):
        if must:
            excess = [
                max(
                    entry[f"{policy}_preemptions"] / PREEMPTIONS[held],
                    entry[f"{policy}_recomputed"] / recomputed_bound(key),
                )
                for entry in figures
                if f"{policy}_recomputed" in entry
            ]
            check.line(f"pool_{held}_{shape}_{policy}_breaks", min(excess), ">", 1.0, raw=excess)


def always(check: Check, figures: Sequence[Figures]) -> None:
    check.line("share_of_requests_ended", min(entry["ended"] for entry in figures), "==", 1.0)
    most = max(entry["most_preemptions"] for entry in figures)
    check.line("most_preemptions_of_a_request", most, "<=", MAX_PREEMPTIONS)
    stalls = sum(entry["stalls"] for entry in figures)
    check.line("steps_without_the_oldest", stalls, "==", 0)


def short_prompts(check: Check) -> None:
    """The cells with prompts of 20 to 100 tokens: printed and kept, without bounds."""
    cells = [Cell(held, shape, "20-100") for held in HELD for shape in SHAPES]
    for (held, shape), figures in measure_all(cells, SEEDS[:1], PROCESSES).items():
        worst = {
            "rate": min(entry["rate"] for entry in figures),
            "preemptions": max(entry["preemptions"] for entry in figures),
            "recomputed": max(entry["recomputed"] for entry in figures),
            "gap": max(entry["gap"] for entry in figures),
            "referenced": min(entry["referenced"] for entry in figures),
        }
        name = f"pool_{held}_{shape}_prompts_20_to_100"
        print("NOTE", check.name, name, *(f"{k} {v:.4g}" for k, v in worst.items()), flush=True)
        check.note(**{name: worst})


def measure_all(
    cells: Sequence[Cell], seeds: Sequence[int], processes: int
) -> dict[Key, list[Figures]]:
    """Figures by pool and load; the longest runs first."""
    found: dict[Key, list[Figures]] = {}
    ordered = sorted(cells, key=lambda cell: -cell.held)
    with tqdm(total=len(cells), desc="Cells", unit="cell", disable=None) as bar:
        for cell, figures in _measured(ordered, seeds, processes):
            found[cell.held, cell.shape] = figures
            bar.update()
    return dict(sorted(found.items()))


def _measured(
    cells: Sequence[Cell], seeds: Sequence[int], processes: int
) -> Iterator[tuple[Cell, list[Figures]]]:
    if processes == 1:
        yield from ((cell, measure(cell, seeds)) for cell in cells)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as workers:
        futures = {workers.submit(measure, cell, seeds): cell for cell in cells}
        for future in as_completed(futures):
            yield futures[future], future.result()
