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


@pytest.fixture(scope="module")
def small() -> list[dict]:
    return measure(Cell(8, "uniform", count=150), [0])


def test_every_request_ends_and_the_oldest_advances(small: list[dict]) -> None:
    check = Check("storm")
    storm.always(check, small)
    assert check.passed, check.lines


def test_the_table_holds_but_for_rates_of_so_short_a_run(small: list[dict]) -> None:
    check = Check("storm")
    storm.table_lines(check, (8, "uniform"), small)
    metrics = {line["metric"].removeprefix("pool_8_uniform_") for line in check.lines}
    assert metrics == {"rate", "preemptions", "recomputed", "gap", "referenced"}
    failed = {line["metric"] for line in check.lines if not line["passed"]}
    assert failed <= {"pool_8_uniform_rate", "pool_8_uniform_gap", "pool_8_uniform_referenced"}


def test_baseline_and_control_break_the_bounds(small: list[dict]) -> None:
    check = Check("storm")
    storm.breaking_lines(check, (8, "uniform"), small)
    assert len(check.lines) == 2
    assert check.passed, check.lines


def test_the_schedule_does_not_depend_on_the_price() -> None:
    """What allows one run to be priced twice."""
    trace, setting = make_trace("bimodal", "50-500", 60, 0), Setting(8, 530, 4)
    runs = [Simulator(setting.octavo(), cost).run(trace) for cost in (GPU, CPU)]
    for name in ("prefill_tokens", "decode_rows", "context_tokens"):
        assert np.array_equal(*(getattr(run.steps, name) for run in runs))


def test_a_run_below_its_ceiling_is_that_of_a_higher_one() -> None:
    trace = make_trace("uniform", "50-500", 60, 0)
    low, high = (Simulator(Setting(8, 530, r).octavo(), GPU).run(trace) for r in (4, 16))
    assert peak(low) < 4 * 8
    assert np.array_equal(low.steps.start, high.steps.start)


def test_the_ceiling_binds_where_prompts_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both ceilings are simulated there."""
    trace = make_trace("uniform", "20-100", 200, 0)
    settings = {ratio: Setting(8, 316, ratio) for ratio in (1, 16)}
    runs = _storm_cells._at_each_ceiling(settings, trace, Setting.baseline)
    assert peak(runs[1]) == 8 < peak(runs[16])
