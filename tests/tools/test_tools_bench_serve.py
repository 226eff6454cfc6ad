"""octavo bench serve and compare against a server whose delays are known."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config.load import OptionError
from octavo.core.errors import StartupError
from octavo.tools import cli
from octavo.tools.bench.client import Load
from octavo.tools.bench.fleet import deal
from octavo.tools.bench.report import KEYS, device_name
from octavo.tools.bench.serve import Bench, Target, server_device, with_model
from octavo.tools.bench.workload import Workload
from tests.fakes.scripted_server import scripted_server, sent_times

TTFT_S, ITL_S = 0.05, 0.02


@pytest.fixture(autouse=True)
def no_octavo_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with scripted_server("--ttft", str(TTFT_S), "--itl", str(ITL_S)) as address:
        yield address


def bench(url: str, endpoint: str = "completions", **workload: Any) -> Bench:
    target = with_model(Target(base_url=url, endpoint=endpoint))
    values = {"num_prompts": 8, "input_len": 16, "output_len": 6} | workload
    return Bench(target, Workload(**values), show_progress=False)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_known_delays_are_found(url: str, endpoint: str) -> None:
    """Delays are lower bounds at any load of the machine; what is above them may be its own."""
    rep = bench(url, endpoint).measure()
    sent = sent_times(url)[-8:]
    assert (rep["completed"], rep["failed"], rep["output_tokens"]) == (8, 0, 48)
    assert rep["prompt_tokens"] == 8 * 16
    assert 1e3 * TTFT_S <= rep["ttft_ms"]["p50"] < 1e3 * TTFT_S + 500
    slowest = max(times[-1] - times[0] for times in sent)
    assert 1e3 * (TTFT_S + 5 * ITL_S) <= rep["e2e_ms"]["mean"] < 1e3 * slowest + 500
    assert rep["tpot_ms"]["mean"] == pytest.approx(rep["itl_ms"]["mean"], rel=1e-6)
    assert rep["preemptions"] == 8  # the script's own way to count
    assert rep["peak_concurrency"] <= 8


def test_concurrency_and_rate_are_kept(url: str) -> None:
    closed = bench(url, max_concurrency=2).measure()
    assert closed["peak_concurrency"] <= 2
    assert closed["completed"] == 8
    assert closed["seconds"] >= 4 * (TTFT_S + 5 * ITL_S)
    open_loop = bench(url, request_rate=40.0, burstiness=1e6).measure()
    assert open_loop["seconds"] >= 7 / 40 + TTFT_S + 5 * ITL_S


def test_several_client_processes_share_the_work(url: str) -> None:
    one = bench(url)
    rep = Bench(one.target, one.workload, client_processes=2, show_progress=False).measure()
    assert (rep["completed"], rep["output_tokens"]) == (8, 48)
    assert rep["ttft_ms"]["p50"] >= 1e3 * TTFT_S


def test_work_is_dealt_out_evenly() -> None:
    load = Load(
        base_url="http://x", requests=[b"%d" % i for i in range(7)],
        due_s=[float(i) for i in range(7)], max_concurrency=5,
    )  # fmt: skip
    parts = deal(load, 3)
    assert sorted(b for part in parts for b in part.requests) == load.requests
    assert [part.max_concurrency for part in parts] == [2, 2, 1]
    assert [part.due_s for part in parts][1] == [1.0, 4.0]


@pytest.mark.parametrize(
    ("status", "kind"), [("503", "HTTP 503: scripted failure"), ("0", "connection lost")]
)
def test_failures_are_counted_by_kind_and_leave_the_figures_alone(status: str, kind: str) -> None:
    # The probe for token ids is the first request, so that the fourth, … of eight fail.
    flags = ["--ttft", "0.01", "--itl", "0.01", "--fail-every", "4", "--fail-status", status]
    with scripted_server(*flags) as url:
        rep = bench(url).measure()
    assert (rep["completed"], rep["failed"]) == (6, 2)
    assert rep["errors"] == {kind: 2}
    assert rep["output_tokens"] == 36


def test_a_server_that_wants_text_gets_text() -> None:
    with scripted_server("--ttft", "0.01", "--itl", "0.01", "--text-only") as url:
        one = bench(url)
        assert not one.target.with_ids
        assert one.measure()["completed"] == 8


def test_a_server_that_fails_at_once_is_not_measured() -> None:
    with (
        scripted_server("--fail-every", "1", "--fail-status", "503") as url,
        pytest.raises(StartupError, match="HTTP 503: scripted failure"),
    ):
        with_model(Target(base_url=url))


def test_the_device_of_a_server_that_tells_none_or_is_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for card, host, device in (
        ("{}", "127.0.0.1", None),
        ('{"data": [{"device": "cuda"}]}', "gpu.example", "cuda"),
        ('{"data": [{"device": "cpu"}]}', "127.0.0.1", device_name("cpu")),
    ):
        monkeypatch.setattr(Target, "get", lambda self, path, card=card: card)
        assert server_device(Target(base_url=f"http://{host}:8000")) == device


def test_nobody_there_is_one_sentence() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(StartupError, match="octavo serve"):
            with_model(Target(base_url=url))
        rep = Bench(Target(base_url=url, model="m"), Workload(num_prompts=2)).measure()
    assert rep["errors"] == {"connection refused": 2}


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["bench", *argv])
    out, err = capsys.readouterr()
    return code, out, err


SMALL = ["--num-prompts", "4", "--input-len", "8", "--output-len", "3"]


def test_the_command_prints_vllms_labels_and_writes_its_keys(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    code, out, _ = run(
        capsys, "serve", "--base-url", url, *SMALL, "--reps", "2", "--json", str(path),
        "--goodput", "ttft:10000", "tpot:10000",
    )  # fmt: skip
    assert code == 0
    for label in (
        "Successful requests:", "Request throughput (req/s):", "Output token throughput (tok/s):",
        "Total token throughput (tok/s):", "Request goodput (req/s):", "Mean TTFT (ms):",
        "Median ITL (ms):", "P99 TPOT (ms):", "P95 E2EL (ms):", "Preemptions:",
    ):  # fmt: skip
        assert label in out
    report = json.loads(path.read_text())
    assert tuple(report) == KEYS
    assert report["name"] == "serve"
    assert report["versions"]["server"] == "1.0-scripted"
    assert report["versions"]["server_dtype"] == "float32"
    assert report["device"] == device_name("cpu")
    assert report["workload"]["model"] == "scripted"
    assert report["workload"]["prompts_as"] == "ids"
    assert [rep["completed"] for rep in report["reps"]] == [4, 4]
    assert set(report["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert report["gpu_s"] is report["host_s"] is report["bandwidth_share"] is None

    code, out, _ = run(capsys, "compare", str(path), f"{path},{path}")
    assert code == 0
    assert "A: serve" in out
    assert "4 repetitions" in out
    assert "No difference. (separate runs)" in out


def test_two_servers_are_measured_in_turns(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four times slower is slower on any machine."""
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    with scripted_server("--ttft", str(4 * TTFT_S), "--itl", str(4 * ITL_S)) as slow:
        code, out, _ = run(
            capsys, "compare", "--serve", url, slow, *SMALL, "--reps", "5", "--json", *files,
        )  # fmt: skip
    assert code == 0
    assert "B is worse. (interleaved pairs)" in out
    again = run(capsys, "compare", *files)[1]
    assert again.splitlines()[-1] == "B is worse. (interleaved pairs)"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--base-url", "nowhere"], "must be given as http://HOST:PORT"),
        (["serve", "--num-prompts", "0"], "must be a whole number of at least 1, not '0'"),
        (["serve", "--goodput", "speed:3"], "NAME:MS"),
        (["serve", "--request-rate", "0"], "above 0"),
        (["serve", "--dataset-name", "sharegpt"], "must be one of random, jsonl, lengths"),
        (["serve", "--dataset-name", "jsonl"], "needs --dataset-path"),
        (["serve", "--dataset-name", "W6", "--request-rate", "3"], "W6 has its own arrivals"),
        (["serve", "--dataset-name", "W2", "--num-prompts", "2"], "at most 1, the prompts in W2"),
        (["serve", "--dataset-name", "jsonl", "--dataset-path", "/none"], "Cannot read /none"),
        (["compare", "a.json"], "two files, not 1"),
        (["compare", "a.json", "b.json"], "Cannot read a.json"),
        (["compare", "--serve", "http://a", "http://b", "--reps", "1"], "at least 2"),
        (["latencies"], "did you mean latency?"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert part in err
    assert err.count("\n") == 1


def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(OptionError, match="not a measurement"):
        cli._run(["bench", "compare", str(path), str(path)])
