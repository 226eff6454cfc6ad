"""The ``octavo`` command: picks a subcommand and turns errors into one sentence."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from octavo.config.load import OptionError, nearest
from octavo.core.errors import OctavoError, StartupError
from octavo.version import __version__

# Each module has main(argv) -> exit code; it is imported only when its command is given.
COMMANDS = {
    "serve": ("octavo.tools.serve", "serve a model over HTTP, the way OpenAI's clients expect it"),
    "chat": ("octavo.tools.chat", "talk to a server or to a model"),
    "bench": ("octavo.tools.bench", "measure throughput and latency, compare two measurements"),
    "simulate": ("octavo.tools.simulate.command", "run the scheduler on a virtual clock"),
    "warm-cache": ("octavo.tools.warm_cache", "compile a model's kernels ahead of its first start"),
    "version": ("octavo.tools.versions", "print the versions of Octavo and of what it runs on"),
}
USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``octavo ARGV``. Returns the exit code: 2 for wrong usage, 1 for a failure."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except OptionError as error:
        return _fail(error, USAGE_ERROR)
    except (StartupError, OctavoError) as error:
        return _fail(error, FAILURE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # octavo … | head: who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    if not argv:
        print(_usage(), file=sys.stderr)
        return USAGE_ERROR
    command, *rest = argv
    if command in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if command in ("-V", "--version"):
        print(f"octavo {__version__}")
        return 0
    if command not in COMMANDS:
        best = nearest(command, COMMANDS)
        hint = "see octavo --help." if best is None else f"did you mean octavo {best}?"
        raise OptionError(f"There is no command {command!r}; {hint}")
    module = importlib.import_module(COMMANDS[command][0])
    code: int = module.main(rest)
    return code


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: octavo COMMAND …",
            "",
            *lines,
            "",
            "octavo COMMAND --help lists the command's options. Without a model, octavo serve",
            "takes a small one that comes from the Python package index.",
        ]
    )


def _fail(error: Exception, code: int) -> int:
    print(f"octavo: {error}", file=sys.stderr)
    return code
