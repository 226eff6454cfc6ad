"""Recordings: everything that happened, in lengths and times, and nothing of what was said."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from octavo.core.errors import StartupError
from octavo.core.pages import PagePool
from octavo.core.plan import StepOutput, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import StepTime
from octavo.distributed.executor import LocalExecutor
from octavo.engine.loop import EngineLoop
from octavo.engine.record import Ended, Recorder, Start, Step, read_recording
from octavo.tools.simulate.replay import Recording, load_recording
from octavo.tools.simulate.simulator import Simulator
from tests.fakes.runner import FakeWorker

START = Start(41, 16, 256, 8, 64, True)


class Clock:
    """Each reading is a quarter of a second after the one before."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def recorded(path: Path, *requests: Request, abort: str = "") -> list:
    clock = Clock()
    loop = EngineLoop(
        Scheduler(pool=PagePool(41), max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256),
        LocalExecutor(FakeWorker(num_pages=41)),
        clock,
        Recorder(path, START, clock.now),
    )
    for request in requests:
        loop.submit(request, clock())
    if abort:
        loop.abort(abort, clock())
    while loop.has_work:
        loop.step(clock())
    loop.close()
    return list(read_recording(path))


def test_every_step_and_every_request_has_its_line(tmp_path: Path) -> None:
    entries = recorded(
        tmp_path / "trace",
        Request("secret-a", list(range(1000, 1010)), max_tokens=3, tenant="key-1", priority=2),
        Request("secret-b", list(range(2000, 2005)), max_tokens=2, tenant="key-2"),
    )
    assert entries[0] == START
    steps = [entry for entry in entries if isinstance(entry, Step)]
    assert [(s.prefill_tokens, s.decode_rows, s.context_tokens) for s in steps] == [
        (15, 0, 15),
        (0, 2, 11 + 6),
        (0, 1, 12),
    ]
    assert [s.start for s in steps] == [0.75, 1.0, 1.5]  # the first one has no predecessor
    assert [s.seconds for s in steps] == [0.25, 0.5, 0.5]
    ends = {entry.prompt: entry for entry in entries if isinstance(entry, Ended)}
    tenants = ends[10].tenant, ends[5].tenant
    assert tenants[0] != tenants[1]
    assert ends[10] == Ended(0.25, 10, 0, 3, 3, "length", tenants[0], 2, first=1.0, end=2.0)
    assert ends[5] == Ended(0.5, 5, 0, 2, 2, "length", tenants[1], 0, first=1.0, end=1.5)


def test_a_tenant_has_one_number_in_a_recording_and_another_in_the_next(tmp_path: Path) -> None:
    numbers = []
    for name in ("one", "two"):
        requests = [Request(str(i), [i], max_tokens=1, tenant=f"key-{i % 2}") for i in range(4)]
        entries = recorded(tmp_path / name, *requests)
        ended = sorted((e for e in entries if isinstance(e, Ended)), key=lambda e: e.arrival)
        numbers.append([entry.tenant for entry in ended])
    first, second = numbers
    assert first[:2] == first[2:]
    assert len({*first, *second}) == 4


class Device:
    """An executor that runs plans one after the other on a clock of its own, ``now``, ``depth`` of
    them under way; each takes what ``TRUE`` says, and nothing else takes time."""

    TRUE = StepTime(4e-3, 30e-6, 5e-6, 1e-8)

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.now = self._free = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._free = max(self._free, self.now) + self.TRUE.seconds(*plan.size())
        slots = [slot for slot, samples in zip(plan.slots, plan.samples, strict=True) if samples]
        result = StepResult(plan.step, slots, [1] * len(slots), [7] * len(slots))
        self._results.append((self._free, result))

    def result(self) -> StepResult:
        over, result = self._results.popleft()
        self.now = max(self.now, over)
        return result

    def close(self) -> None: ...

    reset = close


def scheduler_of_device() -> Scheduler:
    return Scheduler(
        pool=PagePool(1 << 12), max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096
    )


def recorded_on_device(path: Path, depth: int) -> Recording:
    """Long prompts that come while answers are given, and times without any request."""
    draw = np.random.default_rng(0)
    device = Device(depth)
    loop = EngineLoop(
        scheduler_of_device(),
        device,  # type: ignore[arg-type]
        lambda: device.now,
        Recorder(path, START, 0.0),
    )
    arrivals = deque(np.cumsum(draw.exponential(0.2, 100)).tolist())
    while arrivals or loop.has_work:
        while arrivals and arrivals[0] <= device.now:
            prompt = [len(arrivals), *[1] * int(draw.integers(100, 1500))]
            request = Request(str(len(arrivals)), prompt, int(draw.integers(20, 150)))
            loop.submit(request, arrivals.popleft())
        if loop.has_work:
            loop.step(device.now)
        else:
            device.now = arrivals[0]
    loop.close()
    return load_recording(str(path))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_step_has_its_own_time_however_many_are_under_way(tmp_path: Path, depth: int) -> None:
    recording = recorded_on_device(tmp_path / "trace", depth)
    for step in recording.steps:
        true = Device.TRUE.seconds(step.prefill_tokens, step.decode_rows, step.context_tokens)
        assert step.seconds == pytest.approx(true, abs=3e-6)  # it is written in microseconds
    fit = recording.fit()
    again, true = (
        Simulator(scheduler_of_device(), cost).run(recording.trace()) for cost in (fit, Device.TRUE)
    )
    assert again.gap_percentile(99) == pytest.approx(true.gap_percentile(99), rel=1e-3)
    assert again.output_rate == pytest.approx(recording.output_rate, rel=0.01)


def test_a_recording_goes_on_after_what_came_to_nothing(tmp_path: Path) -> None:
    """The steps under way then are not recorded, nor is their time in that of later ones."""
    recorder = Recorder(tmp_path / "trace", START, 0.0)
    plans = [StepPlan(step, [0], [step], [1], [True]) for step in range(4)]
    recorder.submitted(Request("a", [1], max_tokens=9), None, 0.0)
    recorder.planned(plans[0], 1.0)
    recorder.planned(plans[1], 1.0)
    recorder.applied(StepOutput(["a"], [7]), 2.0)
    recorder.forget_all()
    recorder.submitted(Request("b", [1], max_tokens=9), None, 10.0)
    recorder.planned(plans[2], 11.0)
    recorder.applied(StepOutput(["b"], [7]), 13.0)
    recorder.close()
    steps = [entry for entry in read_recording(tmp_path / "trace") if isinstance(entry, Step)]
    assert [(s.start, s.seconds, s.context_tokens) for s in steps] == [(1, 1, 1), (11, 2, 3)]


def test_no_text_no_ids_no_names(tmp_path: Path) -> None:
    request = Request("secret-a", list(range(1000, 1010)), max_tokens=3, tenant="key-1")
    recorded(tmp_path / "trace", request)
    text = (tmp_path / "trace").read_text()
    assert not any(word in text for word in ("secret", "key-1", "1000", "1009"))


def test_an_aborted_request_is_recorded(tmp_path: Path) -> None:
    entries = recorded(tmp_path / "trace", Request("a", [1, 2], max_tokens=3), abort="a")
    (end,) = (entry for entry in entries if isinstance(entry, Ended))
    assert (end.finish, end.output, end.first) == ("abort", 0, None)


def test_a_request_that_ends_at_once_is_recorded(tmp_path: Path) -> None:
    resumed = Request("a", [1, 2], max_tokens=3, generated=[7, 7, 7])
    entries = recorded(tmp_path / "trace", resumed)
    (end,) = (entry for entry in entries if isinstance(entry, Ended))
    assert (end.finish, end.output) == ("length", 3)


def test_the_latest_recording_of_a_file_counts(tmp_path: Path) -> None:
    recorded(tmp_path / "trace", Request("a", [1, 2], max_tokens=3))
    entries = recorded(tmp_path / "trace", Request("b", [1, 2, 3, 4], max_tokens=1))
    assert [entry.prompt for entry in entries if isinstance(entry, Ended)] == [4]


def test_a_line_cut_off_by_a_death_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    whole = recorded(path, Request("a", [1, 2], max_tokens=3))
    path.write_bytes(path.read_bytes()[:-10])
    assert list(read_recording(path)) == whole[:-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind":"other"}\n', "line 1 is not part of a recording: it has no known kind"),
        ("[1]\n", "it has no known kind"),
        ('{"kind":"step"}\n', "it must have start, seconds"),
        ("hello\n", "line 1 is not part"),
        ('{"kind":"step","start":"0","seconds":1,"prefill_tokens":1,"decode_rows":0,'
         '"context_tokens":1}\n', "start cannot be '0'"),
        ("", "does not begin"),
        ('{"kind":"step","start":0,"seconds":1,"prefill_tokens":1,"decode_rows":0,'
         '"context_tokens":1}\n', "does not begin"),
    ],
)  # fmt: skip
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recording(tmp_path / "trace")


def test_a_file_that_cannot_be_written_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--trace-file: cannot write"):
        Recorder(tmp_path / "no" / "trace", START, 0.0)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("octavo.engine.record.BUFFER_BYTES", 0)
    recorder = Recorder(tmp_path / "trace", START, 0.0)

    class Full:
        name = "trace"

        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        flush = close = lambda self: None

    recorder._file.close()
    recorder._file = Full()
    recorder.submitted(Request("a", [1], max_tokens=1, generated=[7]), None, 1.0)
    recorder.forget_all()
    recorder.flush()
    recorder.close()
    assert caplog.text.count("No space left") == 1
