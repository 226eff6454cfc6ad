"""Command-line flags, generated from the declarations in :mod:`octavo.config.options`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from octavo.config.foreign import NEUTRAL, SPELLINGS
from octavo.config.load import FLAG, OptionError, known_name, load_options
from octavo.config.options import DECLARATIONS, Declaration, Options

_PREFIX = "option."  # keeps options apart from a command's own flags of the same name
_POSITIONAL_MODEL = "positional model"


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, takes no abbreviations, and explains flags it does not have."""

    def __init__(
        self, prog: str, description: str, epilog: str | None = None, usage: str | None = None
    ) -> None:
        super().__init__(
            prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=32
            ),
        )

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message[0].upper()}{message[1:]} (see {self.prog} --help).")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse all of ``argv``. Raises :class:`OptionError` with the one thing to change."""
        args, extras = self.parse_known_args(_without_neutral([_with_dashes(a) for a in argv]))
        for extra in extras:
            if extra.startswith("-") and extra.strip("-"):
                flag, _, _ = extra.partition("=")
                known_name(flag.lstrip("-"), None, FLAG)
                raise OptionError(f"{self.prog} does not take {flag}.")
        if extras:
            raise OptionError(f"{self.prog} does not know what to do with {extras[0]!r}.")
        return args


def add_options(parser: Parser, groups: Collection[str] | None = None) -> None:
    """Add the model as first argument and the flags of the named groups (all by default)."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model", default=argparse.SUPPRESS
    ).dest = _POSITIONAL_MODEL
    entries = [entry for entry in DECLARATIONS.values() if groups is None or entry.group in groups]
    add_named_options(parser, [entry.name for entry in entries])


def add_named_options(parser: Parser, names: Collection[str]) -> None:
    """Add the flags of these options, and no model."""
    sections: dict[str, Any] = {}
    for entry in (DECLARATIONS[name] for name in names):
        if entry.group not in sections:
            sections[entry.group] = parser.add_argument_group(entry.group)
        _add_option(sections[entry.group], entry)


def options_of(args: argparse.Namespace) -> Options:
    """The options among parsed flags, completed by environment and file."""
    given = {
        key.removeprefix(_PREFIX): ",".join(value) if isinstance(value, list) else value
        for key, value in vars(args).items()
        if key.startswith(_PREFIX)
    }
    model = vars(args).get(_POSITIONAL_MODEL)
    if model is not None and given.setdefault("model", model) != model:
        raise OptionError(f"Two models are given, {model!r} and --model {given['model']!r}.")
    return load_options(given, os.environ)


def _add_option(section: Any, entry: Declaration) -> None:
    names = [FLAG.spell(name) for name in (entry.name, *entry.aliases)]
    common = {"dest": _PREFIX + entry.name, "default": argparse.SUPPRESS}
    if entry.kind.is_switch:
        # The form that changes the default is the one to show.
        yes, no = _help(entry), argparse.SUPPRESS
        if entry.default:
            yes, no = no, f"Do not: {entry.help[0].lower()}{entry.help[1:]}"
        section.add_argument(*names, action="store_const", const="true", help=yes, **common)
        negative = [FLAG.spell(f"no_{name}") for name in (entry.name, *entry.aliases)]
        section.add_argument(*negative, action="store_const", const="false", help=no, **common)
        return
    many = {"action": "append"} if entry.is_list else {}  # one value each: MODEL may come next
    section.add_argument(*names, metavar=entry.kind.metavar, help=_help(entry), **many, **common)


def _help(entry: Declaration) -> str:
    text = entry.help
    if entry.default not in (None, (), "", False):
        text += f" (default: {entry.default})"
    return text.replace("%", "%%")


def _with_dashes(argument: str) -> str:
    """``--max_num_seqs=4`` is ``--max-num-seqs=4``."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _without_neutral(argv: Sequence[str]) -> list[str]:
    """Leave out flags of other engines whose value asks for what holds anyway."""
    kept: list[str] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, equals, value = argument.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        neutral = NEUTRAL.get(SPELLINGS.get(name, name), ()) if flag.startswith("-") else ()
        if equals and value in neutral:
            continue
        if not equals and rest and rest[0] in neutral:
            rest.pop(0)
            continue
        kept.append(argument)
    return kept
