"""The command line: flags into options, one sentence for each mistake, a light start."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from octavo.config.load import OptionError
from octavo.config.options import DECLARATIONS, Options
from octavo.core.errors import EngineUnavailable, StartupError
from octavo.tools import cli
from octavo.tools.flags import Parser, add_options, options_of
from octavo.version import __version__
from tests.fakes.tiny import make_tiny


@pytest.fixture(autouse=True)
def no_octavo_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OCTAVO_")]:
        monkeypatch.delenv(name)


def parse(*argv: str) -> Options:
    parser = Parser("octavo serve", "Serve.")
    add_options(parser)
    return options_of(parser.read(argv))


def refusal(*argv: str) -> str:
    with pytest.raises(OptionError) as caught:
        parse(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flags_become_options() -> None:
    options = parse(
        "org/name", "--max_num_seqs=4", "--max-model-len", "-1", "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", "2GiB", "--api-key", "a", "--api-key", "c,d",
    )  # fmt: skip
    assert options.model == "org/name"
    assert (options.max_num_seqs, options.max_model_len) == (4, "auto")
    assert options.enable_prefix_caching is False
    assert options.kv_cache_memory == 2 * 2**30
    assert options.api_key == ("a", "c", "d")
    assert options.sources["model"] == "flag --model"
    assert parse("--model", "x").model == parse("x", "--model", "x").model == "x"


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name", "--allowed-origins"])
def test_a_model_after_a_list_is_the_model(flag: str) -> None:
    options = parse(flag, "x", "org/name")
    assert options.model == "org/name"
    assert getattr(options, flag.lstrip("-").replace("-", "_")) == ("x",)


def test_without_flags_everything_is_the_default() -> None:
    assert parse() == Options()


def test_a_switch_on_the_command_line_wins_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_CLAMP_MAX_TOKENS", "true")
    assert parse().clamp_max_tokens
    assert not parse("--no-clamp-max-tokens").clamp_max_tokens


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--max-num-sqs", "4"], "did you mean --max-num-seqs?"),
        (["--max-num-sqs=4"], "did you mean --max-num-seqs?"),
        (["--num-scheduler-steps", "8", "model"], "--num-scheduler-steps is gone"),
        (["--scheduling-policy", "lottery"], "one of fcfs, priority, fair, not 'lottery'"),
        (["model", "--chunked-prefill-size", "4096"], "use --max-num-batched-tokens"),
        (["-tp", "2"], "one device"),
        (["--awq_checkpoint", "x"], "--awq-checkpoint is not an option of any engine"),
        (["--port"], "--port"),
        (["--max-num-batch"], "did you mean --max-num-batched-tokens?"),
        (["a", "b"], "'b'"),
        (["a", "--model", "b"], "Two models"),
        (["--port", "x"], "not 'x'"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], part: str) -> None:
    assert part in refusal(*argv)


def test_flags_of_others_that_ask_for_nothing_are_taken() -> None:
    options = parse("--tensor-parallel-size", "1", "m", "--kv-cache-dtype=auto", "-pp", "1")
    assert options.model == "m"


def test_a_command_may_take_some_groups_and_its_own_flags() -> None:
    parser = Parser("octavo bench", "Measure.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=1)
    add_options(parser, {"Scheduling"})
    args = parser.read(["m", "--prompts", "3", "--max-num-seqs", "2"])
    options = options_of(args)
    assert (args.seed, args.prompts) == (7, 3)
    assert (options.model, options.max_num_seqs, options.seed) == ("m", 2, 0)
    with pytest.raises(OptionError, match="octavo bench does not take --port"):
        parser.read(["--port", "3"])


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def test_wrong_usage_exits_with_2_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "serve", "--max-num-sqs", "1") == (
        2, "", "octavo: There is no flag --max-num-sqs; did you mean --max-num-seqs?\n",
    )  # fmt: skip
    assert run(capsys, "serv") == (
        2, "", "octavo: There is no command 'serv'; did you mean octavo serve?\n",
    )  # fmt: skip
    assert run(capsys)[0] == 2


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(command in out for command in cli.COMMANDS)
    assert run(capsys, "--version") == (0, f"octavo {__version__}\n", "")
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert out.startswith(f"octavo {__version__}\npython ")


def test_the_help_shows_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for entry in DECLARATIONS.values():
        assert entry.flag in out or entry.flag.replace("--", "--no-") in out
        assert entry.group in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StartupError("No memory."), 1),
        (EngineUnavailable("No engine."), 1),
        (OptionError("No such thing."), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_a_command_raises_becomes_an_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fail(argv: list[str]) -> int:
        raise error

    module = types.ModuleType("a_command_that_fails")
    module.main = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fail", (module.__name__, "fails"))
    assert cli.main(["fail"]) == code
    message = str(error)
    assert capsys.readouterr().err == (f"octavo: {message}\n" if message else "")


def test_the_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys; sys.argv = ['octavo', 'serve', '--help']\n"
        "try:\n    from octavo.tools.cli import main; main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'yaml', 'fastapi', 'uvicorn', 'msgspec', 'numba'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_dash_m_octavo_is_the_command() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "--version"],
        capture_output=True, text=True, cwd=root, check=True,
    )  # fmt: skip
    assert done.stdout == f"octavo {__version__}\n"


@pytest.mark.parametrize(("level", "shown"), [("debug", True), ("info", False)])
def test_a_start_at_debug_level_shows_where_each_value_comes_from(
    level: str,
    shown: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from octavo.engine import supervisor

    monkeypatch.setattr(supervisor, "run_supervisor", lambda *args: 0)
    argv = ["serve", str(make_tiny(tmp_path)), "--log-level", level, "--api-key", "hunter2"]
    assert cli.main(argv) == 0
    err = capsys.readouterr().err
    assert ("flag --log-level" in err) == shown
    assert "hunter2" not in err
