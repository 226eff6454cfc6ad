"""The pieces of the H200 benchmark that need no H200."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import h200
from benchmarks.gpu_ids import TIE, judge
from benchmarks.gpu_probes import PlanRecorder, SyncCounter, closed_loop, probed, replay
from benchmarks.h200_mixed import summarise_mix
from benchmarks.h200_results import latest_rows, new_run, read_runs, write_runs
from benchmarks.h200_served import UNCHUNKED_PATH, write_tokenizer
from benchmarks.h200_table import PARTS, ROWS
from octavo.core import pacing
from octavo.core.pacing import PrefillPace
from octavo.core.pages import BlockSpec, CacheLayout, PagePool
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.core.validation import choice_seed
from octavo.distributed.executor import LocalExecutor
from octavo.engine.loop import EngineLoop
from octavo.text.tokenizer import load_tokenizer
from octavo.tools.bench.client import Outcome, Record
from tests.fakes.runner import FakeWorker

# ---- W6


def test_without_chunks_a_prompt_is_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module that such a server finds on its path."""
    before = PrefillPace().tokens(20_000, rows=8, context=4000, pressed=False)
    monkeypatch.setattr(pacing, "TOKENS_BESIDE", pacing.TOKENS_BESIDE)  # undone afterwards
    runpy.run_path(str(UNCHUNKED_PATH / "sitecustomize.py"))
    after = PrefillPace().tokens(20_000, rows=8, context=4000, pressed=False)
    assert before < 16_000 < after


def record(ttft_s: float, gaps_s: list[float], error: str | None = None) -> Record:
    stamps = [1.0 + ttft_s]
    for gap in gaps_s:
        stamps.append(stamps[-1] + gap)
    return Record(1.0, sent_at=1.0, stamps=stamps, output_tokens=len(stamps), error=error)


def test_figures_of_the_mix_are_those_of_the_short_requests() -> None:
    records = [record(0.1, [0.01] * 3), record(5.0, [1.0]), record(0.3, [0.02])]
    found = summarise_mix(Outcome(records, 0.0, 0.0, 0.1), [False, True, False])
    assert found["ttft_ms"]["p50"] == pytest.approx(200.0)
    assert found["itl_ms"]["p100"] == pytest.approx(20.0)
    assert found["long_ttft_ms"]["p50"] == pytest.approx(5000.0)
    assert found["requests"] == {"short": 2, "long": 1}


def test_a_failed_request_fails_the_mix() -> None:
    records = [record(0.1, []), record(0.1, [], error="HTTP 500")]
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: HTTP 500"):
        summarise_mix(Outcome(records, 0.0, 0.0, 0.1), [False, True])


def test_the_tokenizer_is_as_large_as_asked_for(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 5000)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 5000
    assert all(tokenizer.token_bytes(i) for i in range(5000))
    assert tokenizer.decode(tokenizer.encode("two words, ü")) == "two words, ü"


# ---- what happens inside a step

NUM_PAGES = 40


def make_loop(worker: FakeWorker, depth: int = 1) -> EngineLoop:
    blocks = CacheLayout(page_size=16, blocks=(BlockSpec(),)).blocks
    scheduler = Scheduler(
        pool=PagePool(NUM_PAGES, 16, blocks), max_num_seqs=8, max_num_batched_tokens=64,
        max_model_len=128,
    )  # fmt: skip
    return EngineLoop(scheduler, LocalExecutor(worker, depth))


def requests(count: int) -> list[Request]:
    return [
        Request(f"r{i}", [7 * i + j for j in range(3 + 5 * i)], 4 + i, Sampling(temperature=0.0))
        for i in range(count)
    ]


def test_recorded_plans_give_their_ids_again_in_both_loops() -> None:
    loop = make_loop(FakeWorker(num_pages=NUM_PAGES), depth=2)
    recorder = PlanRecorder(loop.executor)
    with probed(loop, recorder):
        closed_loop(loop, requests(6), streams=4)
    assert recorder.ids
    for depth in (1, 2):
        again = LocalExecutor(FakeWorker(num_pages=NUM_PAGES), depth)
        assert replay(again, recorder.plans) == recorder.ids
    other = FakeWorker(lambda tokens, prompt_len: 3, num_pages=NUM_PAGES)
    assert replay(LocalExecutor(other), recorder.plans) != recorder.ids


def test_a_closed_loop_keeps_its_streams_open_and_no_more() -> None:
    worker = FakeWorker(num_pages=NUM_PAGES)
    most: list[int] = []

    class Watched(LocalExecutor):
        def submit(self, plan: StepPlan) -> None:
            most.append(len(plan.slots))
            super().submit(plan)

    loop = make_loop(worker)
    loop.executor = Watched(worker)
    given = requests(6)
    assert closed_loop(loop, given, streams=3) == sum(r.max_tokens for r in given)
    assert max(most) == 3
    assert not loop.has_work


class Waiting(LocalExecutor):
    """Waits for the device in every second step."""

    steps = 0

    def submit(self, plan: StepPlan) -> None:
        self.steps += 1
        if self.steps % 2 == 0:
            torch.cuda.synchronize()
            torch.cuda.Event.synchronize(mock.Mock())

    def result(self) -> StepResult:
        torch.cuda.synchronize()  # for an earlier step: not inside one
        return StepResult(0)


def test_waits_of_the_host_are_counted_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch.cuda, torch.cuda.Event):
        monkeypatch.setattr(owner, "synchronize", lambda *args: None)
    counter = SyncCounter(Waiting(mock.Mock()))
    for step in range(3):
        counter.submit(StepPlan(step))
        counter.result()
    assert counter.counts == [0, 2, 0]
    assert counter.first == "cuda.synchronize"


def test_a_difference_of_ids_is_forgiven_only_at_a_tie() -> None:
    for seed, key in ((5, choice_seed(5, 0)), (6, choice_seed(6, 0) - 2**64)):  # int64, as kept
        assert -(2**63) <= key < 2**63
        gaps = {(key, 1): TIE / 2, (key, 2): 1.0}
        assert judge(seed, [1, 2, 3], [1, 2, 3], gaps) == "equal"
        assert judge(seed, [1, 2, 3], [1, 9, 9], gaps) == "forgiven"
        assert judge(seed, [1, 2, 3], [1, 2, 9], gaps) == "differ"


# ---- the whole run


def test_rows_bring_their_parts_in_the_order_of_value() -> None:
    assert h200.parts_of(list(ROWS)) == list(PARTS)
    assert h200.parts_of(["W6 ITL p99", "8B W2"]) == ["8B", "mixed"]
    assert h200.parts_of(["8B W5 over offline"]) == ["8B", "served"]


def python(code: str) -> Callable[[str], list[str]]:
    return lambda part: [sys.executable, "-c", code, part]


def run_parts(path: Path, parts: list[str], code: str, seconds: float) -> dict[str, Any]:
    write_runs(path, [new_run("abc", "card", [])])
    h200.run_parts(parts, python(code), time.time() + seconds, path, {})
    return read_runs(path)[-1]


def test_a_part_that_fails_does_not_take_the_others_along(tmp_path: Path) -> None:
    code = "import sys; sys.exit(3 if sys.argv[1] == 'start' else 0)"
    run = run_parts(tmp_path / "h200.json", ["start", "8B"], code, 60)
    assert run["failures"] == {"part start": "RuntimeError: exit code 3"}
    assert set(run["seconds"]) == {"start", "8B"}


def test_a_part_is_stopped_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200, "LEAST_S", 0.2)
    run = run_parts(tmp_path / "h200.json", ["8B", "0.6B"], "import time; time.sleep(60)", 0.5)
    assert run["failures"] == {
        "part 8B": "TimeoutError: out of time", "part 0.6B": "TimeoutError: no time left",
    }  # fmt: skip


def test_a_process_that_ignores_the_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(h200, "GRACE_S", 0.2)
    code = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "time.sleep(5); pathlib.Path(sys.argv[1]).touch()"
    )
    with pytest.raises(TimeoutError):
        h200.run_until([sys.executable, "-c", code, tmp_path / "survived"], time.time() + 0.5, {})
    assert not (tmp_path / "survived").exists()


def test_an_unknown_row_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        h200.main(["--out", ".", "--rows", "8B W9"])
    assert "There is no row '8B W9'; there are: 8B W1;" in capsys.readouterr().err


@pytest.mark.slow
def test_the_dry_run_measures_every_row_that_a_cpu_can(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.h200", "--out", str(tmp_path), "--dry-run"],
        cwd=Path(h200.__file__).parents[1],
    )
    assert done.returncode == 0
    of_a_card = {
        "8B W2 idle", "8B W4 idle", "8B graphs, capture", "8B graphs, memory",
        "0.6B memory growth over 40 runs",
    }  # fmt: skip
    rows = latest_rows(read_runs(tmp_path / "h200.json"))
    assert set(ROWS) - set(rows) == of_a_card
    for name in ("0.6B W1 replayed", "host waits in a step", "W6 preemptions"):
        assert rows[name]["value"] == 0
    assert rows["fp32 ids, card = CPU"]["value"] == 1
