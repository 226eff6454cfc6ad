"""Recordings: everything that happened, in lengths and times, and nothing of what was said."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.errors import StartupError
from octavo.core.pages import PagePool
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.distributed.executor import LocalExecutor
from octavo.engine.loop import EngineLoop
from octavo.engine.record import Ended, Recorder, Start, Step, read_recording
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
    assert [s.start for s in steps] == [0.75, 1.25, 1.75]
    assert [s.seconds for s in steps] == [0.5, 0.5, 0.25]  # the last one has no successor
    ends = {entry.prompt: entry for entry in entries if isinstance(entry, Ended)}
    assert ends[10] == Ended(0.25, 10, 0, 3, 3, "length", 0, 2, first=1.0, end=2.0)
    assert ends[5] == Ended(0.5, 5, 0, 2, 2, "length", 1, 0, first=1.0, end=1.5)


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
