"""octavo bench throughput and latency: a tiny model, metered step by step."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config.options import Options
from octavo.core.plan import StepPlan, StepResult
from octavo.tools import cli
from octavo.tools.bench.report import KEYS
from octavo.tools.bench.steps import StepMeter, busy_seconds
from octavo.tools.local import engine_arguments
from tests.fakes.tiny import make_tiny


@pytest.fixture(autouse=True)
def no_octavo_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench") / "tiny")


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class SlowExecutor:
    """Each call takes a second of its own clock."""

    depth = 2

    def __init__(self) -> None:
        self.now = 0.0
        self.closed = False

    def submit(self, plan: StepPlan) -> None:
        self.now += 1

    def result(self) -> StepResult:
        self.now += 1
        return StepResult(0)

    def control(self, name: str, args: Any) -> Any:
        return name, args

    def close(self) -> None:
        self.closed = True


def test_steps_are_metered_in_their_order() -> None:
    inner = SlowExecutor()
    meter = StepMeter(inner, clock=lambda: inner.now)
    first = StepPlan(0, starts=[0, 5], counts=[4, 1], samples=[False, True])
    second = StepPlan(1, starts=[4], counts=[1], samples=[True])
    meter.submit(first)
    meter.submit(second)
    inner.now = 10.0
    meter.result()
    inner.now = 20.0  # the host's time, not a step's
    meter.result()
    one, two = meter.take()
    assert (one.starts, one.counts, one.num_samples) == ([0, 5], [4, 1], 1)
    assert (one.seconds, one.ended_at, two.seconds, two.ended_at) == (2.0, 11.0, 2.0, 21.0)
    assert one.computes_prompt(4)
    assert not two.computes_prompt(4)
    assert meter.take() == []
    assert meter.control("stats", {}) == ("stats", {})
    assert meter.depth == 2
    meter.close()
    assert inner.closed


class Mark:
    """An event that the device reaches at ``at``, on the executor's clock; in seconds, of which
    ``elapsed_time`` tells the milliseconds."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.at = max(device.now, device.free_at)

    def query(self) -> bool:
        return self._device.now >= self.at

    def elapsed_time(self, other: Mark) -> float:
        return 1e3 * (other.at - self.at)


class Device(SlowExecutor):
    """Starting a step takes a second of the host; the device then works on it for three."""

    free_at = 0.0

    def submit(self, plan: StepPlan) -> None:
        self.now += 1
        self.free_at = max(self.now, self.free_at) + 3

    def result(self) -> StepResult:
        return StepResult(0)


def test_a_device_that_waits_for_the_host_is_idle() -> None:
    device = Device()
    meter = StepMeter(device, lambda: Mark(device), clock=lambda: device.now)
    plan = StepPlan(0, starts=[0], counts=[1], samples=[True])
    meter.submit(plan)  # from 0: the device waits until 1, and works until 4
    meter.submit(plan)  # in time: works until 7
    meter.result()
    device.now = 9.0
    meter.submit(plan)  # late: the device waits from 7 to 10, and works until 13
    meter.result()
    meter.result()
    steps = meter.take()
    assert [step.starved_s for step in steps] == [1.0, 0.0, 1.0]
    assert [busy_seconds(step) for step in steps] == [3.0, 3.0, 3.0]


def run(tiny: Path, tmp_path: Path, name: str, *argv: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "out.json"
    code = cli.main(
        ["bench", name, str(tiny), "--kv-cache-tokens", "2k", "--cpu-threads", "1",
         "--ops-backend", "reference", "--json", str(path), *argv]
    )  # fmt: skip
    report: dict[str, Any] = json.loads(path.read_text())
    assert tuple(report) == KEYS
    return code, report


def test_throughput(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(
        tiny, tmp_path, "throughput", "--num-prompts", "6", "--input-len", "20",
        "--output-len", "5", "--reps", "2", "--max-num-batched-tokens", "64",
        "--max-num-seqs", "4",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    assert "Output token throughput (tok/s):" in out
    assert "Measured peak:" in out
    assert [rep["output_tokens"] for rep in report["reps"]] == [30, 30]
    assert [rep["prompt_tokens"] for rep in report["reps"]] == [120, 120]
    assert report["workload"]["max_num_seqs"] == 4
    assert report["workload"]["vocab_size"] == 512
    assert report["gpu_s"] is None
    for rep in report["reps"]:
        assert 0 < rep["host_s"] < rep["seconds"]
        assert rep["idle_share"] == pytest.approx(rep["host_s"] / rep["seconds"])
        assert 0 < rep["bandwidth_share"] < 1
        assert rep["output_tok_s"] == pytest.approx(30 / rep["seconds"])


def test_latency(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(
        tiny, tmp_path, "latency", "--batch-size", "3", "--input-len", "20", "--output-len", "6",
        "--reps", "1", "--max-num-batched-tokens", "32", "--max-num-seqs", "4",
    )  # fmt: skip
    assert code == 0
    assert "Median step (ms):" in capsys.readouterr().out
    (rep,) = report["reps"]
    assert rep["steps"] >= 2 + 5  # 60 prompt tokens take two steps of 32
    assert 0 < rep["prefill_s"] < rep["seconds"]
    assert rep["ttft_ms"]["p50"] == pytest.approx(1e3 * rep["prefill_s"])
    assert rep["prefill_tok_s"] > 0
    assert rep["decode_tok_s"] > 0
    assert set(rep["itl_ms"]) == {"mean", "p50", "p90", "p95", "p99"}


def test_options_that_were_given_reach_the_engine() -> None:
    options = Options(
        max_num_seqs=4, dtype="float32", sources={"max_num_seqs": "flag", "dtype": "default"}
    )
    assert engine_arguments(options) == {"max_num_seqs": 4}


def test_a_named_workload_for_a_server_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "throughput", str(tiny), "--dataset-name", "W5"]) == 2
    assert "W5 is a load on a server: octavo bench serve measures it." in capsys.readouterr().err


def test_a_servers_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "throughput", "--port", "1"]) == 2
    assert "octavo bench throughput does not take --port" in capsys.readouterr().err
