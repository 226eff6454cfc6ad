"""`octavo simulate`: from flags or a recording to figures."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.config.load import OptionError
from octavo.core.steptime import StepTime
from octavo.engine.record import Ended, Start, Step, to_line
from octavo.tools.simulate.command import main
from octavo.tools.simulate.lengths import parse_lengths
from octavo.tools.simulate.replay import load_recording

TRUE = StepTime(base=0.02, per_token=0.001, per_row=0.0005, per_context=2e-6)


def simulate(tmp_path: Path, *argv: str) -> dict:
    assert main([*argv, "--json", str(tmp_path / "figures.json")]) == 0
    return json.loads((tmp_path / "figures.json").read_text())


def write_recording(path: Path, steps: list[Step], ended: list[Ended]) -> str:
    entries = [Start(65, 16, 512, 8, 128, True), *steps, *ended]
    path.write_bytes(b"".join(map(to_line, entries)))
    return str(path)


def one_after_the_other(count: int) -> tuple[list[Step], list[Ended]]:
    """Requests of 20 and 4 tokens that wait for one another, on a machine of cost ``TRUE``."""
    steps, ended, now = [], [], 5.0
    for _ in range(count):
        arrival = now
        for prefill, rows, context in [(20, 0, 20), (0, 1, 21), (0, 1, 22), (0, 1, 23)]:
            seconds = TRUE.seconds(prefill, rows, context)
            steps.append(Step(now, seconds, prefill, rows, context))
            now += seconds
        first = arrival + steps[-4].seconds
        ended.append(Ended(arrival, 20, 0, 4, 4, "length", 0, 0, first, now))
    return steps, ended


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("7", 7, 7, 7),
        ("10-20", 10, 20, 15),
        ("10,30", 10, 30, 20),
        ("pareto:1.2:80-2560", 80, 2560, 480 - 2560 * (80 / 2560) ** 1.2 / 0.2),
    ],
)
def test_lengths_are_drawn_as_written(text: str, low: int, high: int, mean: float) -> None:
    drawn = parse_lengths(text).draw(np.random.default_rng(0), 20_000)
    assert (drawn.min(), drawn.max()) == (low, high)
    assert drawn.mean() == pytest.approx(mean, rel=0.05)


@pytest.mark.filterwarnings("error")
def test_a_tail_beyond_all_numbers_is_cut_off() -> None:
    assert parse_lengths("pareto:0.0001:80-2560").draw(np.random.default_rng(0), 99).mean() > 2500


@pytest.mark.parametrize(
    "text", ["", "0", "5-3", "x", "pareto:0:1-9", "pareto:1:5", "1,,2", "9" * 20, "1-9999999999"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be N, LOW-HIGH"):
        parse_lengths(text)


def test_a_synthetic_load(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    load = ("--requests", "50", "--prompt", "10-40", "--output", "20", "--kv-cache-tokens", "640")
    figures = simulate(tmp_path, *load)
    assert figures["finished"] == {"length": 50}
    assert figures["output_tok_s"] == pytest.approx(50 * 20 / figures["seconds"])
    assert figures["peak_running"] <= 20
    assert "Output token throughput" in capsys.readouterr().out
    slower = simulate(tmp_path, *load, "--cost", "cpu", "--max-num-seqs", "2")
    assert slower["peak_running"] == 2
    assert slower["output_tok_s"] < figures["output_tok_s"]


def test_time_limits_end_requests(tmp_path: Path) -> None:
    figures = simulate(
        tmp_path, "--requests", "50", "--output", "100", "--cost", "cpu", "--max-num-seqs", "1",
        "--queue-timeout", "20",
    )  # fmt: skip
    assert set(figures["finished"]) == {"length", "timeout"}


def test_a_recorded_cost_is_found_and_the_run_predicted(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "trace", *one_after_the_other(6))
    figures = simulate(tmp_path, path, "--fit")
    assert figures["predicted_over_recorded"] == pytest.approx(1.0, abs=0.01)
    assert figures["requests"] == 6


def test_the_cost_of_another_recording(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(6)
    slower = [Step(s.start, 3 * s.seconds, s.prefill_tokens, s.decode_rows, s.context_tokens)
              for s in steps]  # fmt: skip
    path = write_recording(tmp_path / "trace", steps, ended)
    other = write_recording(tmp_path / "other", slower, ended)
    figures = simulate(tmp_path, path, "--fit", other)
    # Three times as slow, but the requests now overlap.
    assert 1 / 3 < figures["predicted_over_recorded"] < 2 / 3


def test_what_was_recorded_holds_unless_a_flag_says_otherwise(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(12)
    for entry in ended:
        entry.arrival = 0.0
    path = write_recording(tmp_path / "trace", steps, ended)
    assert simulate(tmp_path, path)["peak_running"] == 8
    assert simulate(tmp_path, path, "--max-num-seqs", "3")["peak_running"] == 3


def test_prompts_that_hit_the_cache_hit_it_again(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(6)
    for entry in ended[1:]:
        entry.cached = 16
    recording = load_recording(write_recording(tmp_path / "trace", steps, ended))
    assert recording.trace().shared.tolist() == [0, 16, 16, 16, 16, 16]
    hits, none = (
        simulate(tmp_path, recording.path, "--cost", "cpu", *flags)["seconds"]
        for flags in ((), ("--no-enable-prefix-caching",))
    )
    assert hits < none


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs a TRACE or --requests"),
        (["--requests", "3", "--fit"], "needs a FILE"),
        (["--requests", "3", "--fit", "x", "--cost", "cpu"], "one of --fit and --cost"),
        (["trace", "--output", "5"], "--output has no effect"),
        (["trace", "--seed", "0"], "--seed has no effect"),
        (["--requests", "3", "--burstiness", "2"], "--burstiness needs a --request-rate"),
        (
            ["--requests", "3", "--json", "/nowhere/x"],
            "Cannot write /nowhere/x: there is no folder",
        ),
        (["--requests", "3", "--json", "/"], "Cannot write /: it is a folder"),
        (["--requests", "1000000000000"], "--requests: must be a whole number between"),
        (["--requests", "3", "--max-tokens", "9" * 20], "--max-tokens: must be a whole number"),
        (
            ["--requests", "3", "--max-model-len", "9000", "--kv-cache-tokens", "8k"],
            "or a larger --kv-cache-tokens",
        ),
        (["--requests", "3", "--request-rate", "1e-320"], "--request-rate: must be a number of"),
        (
            ["--requests", "3", "--request-rate", "1", "--burstiness", "1e-320"],
            "--burstiness: must be a number of",
        ),
        (["nowhere"], "Cannot read nowhere"),
        (["--requests", "3", "--prompt", "900", "--kv-cache-tokens", "512"], "no room for an"),
        (["--requests", "3", "--max-num-seqs", "9", "--max-num-batched-tokens", "3"], "is less"),
        (["--requests", "3", "--model", "x"], "does not take --model"),
    ],
)
def test_wrong_usage_is_told_in_a_sentence(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        main(argv)


def test_a_file_that_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(OptionError, match="is not a recording by --trace-file: line 1"):
        main([str(tmp_path / "other")])
    few = write_recording(tmp_path / "few", *one_after_the_other(1))
    with pytest.raises(OptionError, match="records 4 steps; a fit needs at least 8"):
        main([few, "--fit"])


def test_a_recorded_length_gives_way_to_a_smaller_cache(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "trace", *one_after_the_other(3))  # 512 tokens of context
    assert simulate(tmp_path, path, "--kv-cache-tokens", "64")["finished"] == {"length": 3}
    with pytest.raises(
        OptionError, match=r"longest recorded request has 24 tokens, and .* holds 16"
    ):
        main([path, "--kv-cache-tokens", "16"])
    cut = simulate(tmp_path, path, "--kv-cache-tokens", "64", "--max-model-len", "22")
    assert cut["output_tok_s"] * cut["seconds"] == pytest.approx(3 * 2)


def test_a_message_says_what_was_recorded(tmp_path: Path) -> None:
    path = write_recording(tmp_path / "trace", *one_after_the_other(3))
    with pytest.raises(OptionError, match="Recorded: --max-num-batched-tokens 128"):
        main([path, "--max-num-seqs", "300"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("preemption_mode", "swap"), ("swap_space", "1GiB"), ("kv_cache_memory", "1GiB")],
)
def test_what_it_cannot_do_is_refused_wherever_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    (tmp_path / "options.yaml").write_text(f"{name}: {value}\n")
    with pytest.raises(OptionError, match="octavo simulate does not take the key"):
        main(["--requests", "3", "--config", str(tmp_path / "options.yaml")])
    monkeypatch.setenv(f"OCTAVO_{name.upper()}", value)
    with pytest.raises(OptionError, match="octavo simulate does not take the environment variable"):
        main(["--requests", "3"])


def test_nothing_is_written_for_a_refused_run(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no room for an"):
        main(["--requests", "3", "--prompt", "1000000", "--json", str(tmp_path / "figures")])
    assert not (tmp_path / "figures").exists()


def test_a_comparison_needs_recorded_steps(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(3)
    other = write_recording(tmp_path / "other", steps, ended)
    with pytest.raises(OptionError, match="none records no steps"):
        main([write_recording(tmp_path / "none", [], ended), "--fit", other])
    late = [replace(steps[0], start=ended[-1].end)]
    with pytest.raises(OptionError, match="late records no time"):
        main([write_recording(tmp_path / "late", late, ended), "--fit", other])


def test_what_was_never_measured_is_null_and_a_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    figures = simulate(tmp_path, "--requests", "2", "--output", "1")
    assert set(figures["itl_ms"].values()) == {None}
    assert all(value > 0 for value in figures["ttft_ms"].values())
    shown = next(line for line in capsys.readouterr().out.splitlines() if "P50 ITL" in line)
    assert shown.split()[-1] == "-"


def test_a_cut_recording_counts_what_ended_until_it_ended(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(6)
    whole = load_recording(write_recording(tmp_path / "whole", steps, ended))
    cut = load_recording(write_recording(tmp_path / "cut", steps, ended[:3]))
    assert cut.output_rate == pytest.approx(whole.output_rate)
    assert (whole.num_steps_left_out, cut.num_steps_left_out) == (0, 12)
    assert cut.share_of_rows_left_out == 0
    figures = simulate(tmp_path, cut.path, "--fit")
    assert figures["predicted_over_recorded"] == pytest.approx(1.0, abs=0.01)
    assert figures["recorded_steps_left_out"] == 12


def test_a_cut_recording_says_how_much_others_got(tmp_path: Path) -> None:
    steps, ended = one_after_the_other(6)
    for step in steps:
        step.decode_rows *= 4  # three more requests that never ended
    cut = load_recording(write_recording(tmp_path / "cut", steps, ended[:3]))
    assert cut.share_of_rows_left_out == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("field", "value"), [("prompt", 0), ("prompt", -5), ("output", -1), ("arrival", float("nan")),
                         ("end", float("inf")), ("max_tokens", 10**20)]
)  # fmt: skip
def test_an_impossible_number_is_told_with_its_line(
    tmp_path: Path, field: str, value: float
) -> None:
    steps, ended = one_after_the_other(2)
    bad = replace(ended[1], **{field: value})
    path = write_recording(tmp_path / "trace", steps, [ended[0], bad])
    with pytest.raises(OptionError, match=f"line 11 .*: {field} cannot be"):
        main([path])
