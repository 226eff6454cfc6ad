"""`make check NAME=storm` in a small form: the table's lines, and that they can fail."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.check import Check
from benchmarks.checks import _storm_cells, storm
from benchmarks.checks._storm_cells import Cell, measure, peak
from benchmarks.checks._storm_load import make_trace
from benchmarks.checks._storm_policies import Setting
from octavo.tools.simulate.cost import CPU, GPU
from octavo.tools.simulate.simulator import Simulator

CELLS = {
    (8, "uniform"): 150,
    (32, "pareto"): 200,
}  # requests: the rates of so short runs say little


@pytest.fixture(scope="module", params=CELLS, ids=str)
def small(request: pytest.FixtureRequest) -> tuple[storm.Key, list[dict]]:
    held, shape = request.param
    return request.param, measure(Cell(held, shape, count=CELLS[request.param]), [0])


def test_every_request_ends_and_the_oldest_advances(small: tuple[storm.Key, list[dict]]) -> None:
    check = Check("storm")
    storm.always(check, small[1])
    assert check.passed, check.lines


def test_the_table_has_its_lines_and_no_storm(small: tuple[storm.Key, list[dict]]) -> None:
    check = Check("storm")
    storm.table_lines(check, *small)
    metrics = [line["metric"].rpartition("_")[2] for line in check.lines]
    assert metrics == ["rate", "preemptions", "recomputed", "gap", "referenced"]
    assert all(line["passed"] for line in check.lines[1:3]), check.lines


def test_baseline_and_control_break_the_bounds(small: tuple[storm.Key, list[dict]]) -> None:
    check = Check("storm")
    storm.breaking_lines(check, *small)
    assert len(check.lines) == 2
    assert check.passed, check.lines


@pytest.mark.slow
def test_the_whole_table() -> None:
    check = Check("storm")
    storm.grid(check, storm.HELD, tuple(storm.SHAPES), storm.SEEDS)
    assert check.passed, [line for line in check.lines if not line["passed"]]


def test_the_schedule_does_not_depend_on_the_price() -> None:
    """What allows one run to be priced twice."""
    trace, setting = make_trace("bimodal", "50-500", 60, 0, 8), Setting(8, 530, 4)
    runs = [Simulator(setting.octavo(), cost).run(trace) for cost in (GPU, CPU)]
    for name in ("prefill_tokens", "decode_rows", "context_tokens"):
        assert np.array_equal(*(getattr(run.steps, name) for run in runs))


def test_a_run_below_its_ceiling_is_that_of_a_higher_one() -> None:
    trace = make_trace("uniform", "50-500", 60, 0, 8)
    low, high = (Simulator(Setting(8, 530, r).octavo(), GPU).run(trace) for r in (4, 16))
    assert peak(low) < 4 * 8
    assert np.array_equal(low.steps.start, high.steps.start)


def test_the_ceiling_binds_where_prompts_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both ceilings are simulated there."""
    trace = make_trace("uniform", "20-100", 200, 0, 8)
    settings = {ratio: Setting(8, 316, ratio) for ratio in (1, 16)}
    runs = _storm_cells._at_each_ceiling(settings, trace, Setting.baseline)
    assert peak(runs[1]) == 8 < peak(runs[16])
