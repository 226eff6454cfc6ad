"""Flags, environment and file into one :class:`Options`, each value with its source.

Precedence: flag (or Python argument), environment variable, file, default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from octavo.config.foreign import EXPLANATIONS, NEUTRAL, SPELLINGS
from octavo.config.options import DECLARATIONS, Declaration, Options
from octavo.core.errors import StartupError

ENVIRONMENT_PREFIX = "OCTAVO_"
NAMES = {alias: name for name, entry in DECLARATIONS.items() for alias in (name, *entry.aliases)}
SWITCHES = frozenset(name for name, entry in DECLARATIONS.items() if entry.kind.is_switch)


class OptionError(StartupError, ValueError):
    """An option is unknown, has a bad value, or contradicts another."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from, and how the name ``max_num_seqs`` is written there."""

    noun: str
    spell: Callable[[str], str]
    place: str = ""

    def source(self, name: str) -> str:
        return f"{self.noun} {self.spell(name)}{self.place}"


FLAG = Origin("flag", lambda name: "--" + name.replace("_", "-"))
ENVIRONMENT = Origin("environment variable", lambda name: ENVIRONMENT_PREFIX + name.upper())
ARGUMENT = Origin("argument", lambda name: name)


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one origin, by the options' own names."""

    origin: Origin
    values: Mapping[str, Any]


def load_options(
    given: Mapping[str, Any], environ: Mapping[str, str], origin: Origin = FLAG
) -> Options:
    """Options from what a person gave (texts or Python values), the environment and a file.

    With ``origin=ARGUMENT``, for Python calls, a value of None means "not given".
    Raises :class:`OptionError`.
    """
    if origin is ARGUMENT:
        given = {name: value for name, value in given.items() if value is not None}
    variables = {
        key.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for key, value in environ.items()
        if key.startswith(ENVIRONMENT_PREFIX) and value and not _is_kubernetes(key, value)
    }
    layers = [_layer(origin, given), _layer(ENVIRONMENT, variables)]
    file = _parsed(DECLARATIONS["config"], layers)
    if file is not None:
        layers.append(_file_layer(file[0]))
    values: dict[str, Any] = {}
    sources = dict.fromkeys(DECLARATIONS, "default")
    for name, entry in DECLARATIONS.items():
        found = _parsed(entry, layers)
        if found is not None:
            values[name], sources[name] = found
    return Options(**values, sources=sources)


def _is_kubernetes(key: str, value: str) -> bool:
    """Whether the variable is one that Kubernetes gives pods beside a service named octavo:
    OCTAVO_SERVICE_HOST, OCTAVO_PORT=tcp://…, OCTAVO_PORT_8000_TCP and the like."""
    rest = key.removeprefix(ENVIRONMENT_PREFIX)
    return rest.startswith(("SERVICE_", "PORT_")) or ("://" in value and rest == "PORT")


def known_name(name: str, value: str | None, origin: Origin) -> str | None:
    """The option that ``name`` means; None if name and value ask for what holds anyway.

    Raises :class:`OptionError` for a name that Octavo does not have.
    """
    name = name.replace("-", "_")
    if name in NAMES:
        return NAMES[name]
    foreign = SPELLINGS.get(name, name)
    if value in NEUTRAL.get(foreign, ()):
        return None
    if foreign in EXPLANATIONS:
        raise OptionError(f"{origin.spell(name)} {EXPLANATIONS[foreign]}.")
    negated = origin is FLAG and name.startswith("no_")
    best = nearest(name, (f"no_{switch}" for switch in SWITCHES) if negated else NAMES)
    hint = "." if best is None else f"; did you mean {origin.spell(best)}?"
    raise OptionError(f"There is no {origin.source(name)}{hint}")


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word most like ``word`` or beginning with it, if there is one."""
    candidates = list(words)
    begun = [other for other in candidates if len(word) > 2 and other.startswith(word)]
    best = get_close_matches(word, candidates, n=1, cutoff=0.7) or begun
    return best[0] if best else None


def _layer(origin: Origin, values: Mapping[str, Any]) -> Layer:
    """Names checked and aliases resolved."""
    canonical: dict[str, Any] = {}
    for key, value in values.items():
        name = known_name(key, _as_text(value), origin)
        if name is None:
            continue
        if name in canonical:
            raise OptionError(f"{origin.source(key)} repeats {name.replace('_', '-')}.")
        canonical[name] = value
    return Layer(origin, canonical)


def _parsed(entry: Declaration, layers: Iterable[Layer]) -> tuple[Any, str] | None:
    """The value of the first layer that has one, and its source."""
    for layer in layers:
        if entry.name in layer.values:
            source = layer.origin.source(entry.name)
            return _value(entry, layer.values[entry.name], source), source
    return None


def _value(entry: Declaration, given: Any, source: str) -> Any:
    values = []
    for item in _items(given) if entry.is_list else [given]:
        try:
            values.append(entry.kind.parse(_as_text(item).strip()))
        except ValueError:
            shown = "what was given" if entry.is_secret else repr(item)
            raise OptionError(f"The {source} must be {entry.kind.expects}, not {shown}.") from None
    return tuple(values) if entry.is_list else values[0]


def _items(given: Any) -> list[Any]:
    """A list as it is; a text as a JSON list, or cut at its commas."""
    if isinstance(given, list | tuple):
        return list(given)
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            return list(json.loads(given))
        except ValueError:
            return [given]
    return str(given).split(",")


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value)


def _file_layer(path: str) -> Layer:
    values = _read_yaml(path)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise OptionError(f"{path} must hold option names with their values.")
    empty = [key for key, value in values.items() if value is None]
    if empty:
        raise OptionError(f"The key {empty[0]} of {path} has no value; leave it out.")
    layer = _layer(Origin("key", lambda name: name.replace("_", "-"), f" of {path}"), values)
    if "config" in layer.values:
        raise OptionError(f"{path} may not name another file under config.")
    return layer


def _read_yaml(path: str) -> Any:
    import yaml  # heavy, and needed only here

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise OptionError(f"Cannot read the file of options {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise OptionError(f"The file of options {path} is not YAML: {detail}.") from None
    return {} if values is None else values
