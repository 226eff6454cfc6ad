"""SamplingParams: what a caller may ask for, checked as far as no model is needed.

Names and defaults are vLLM's, so that a script moves over by changing its import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field

from octavo.core.errors import InvalidRequest

MAX_LOGPROBS = 20  # OpenAI's limit; applies to logprobs and prompt_logprobs
MAX_STOPS = 64
MAX_IDS = 1024  # of logit_bias, of stop_token_ids
MAX_ALLOWED_IDS = 2**18  # no vocabulary is larger
MIN_REPETITION_PENALTY = 1e-3  # what divides a logit must leave it finite
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one generation. Raises :class:`InvalidRequest` on a bad value.

    ``max_tokens=None`` means: until the context is full. ``temperature=0`` is greedy
    (lowest id on ties). ``seed=None`` draws a fresh one. ``top_k`` 0 or -1 is off.
    ``logprobs=k`` reports each new token's own log-probability and the k best.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    stops: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        integer("n", self.n, 1, None)
        number("temperature", self.temperature, 0.0, 2.0**15)
        number("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        integer("top_k", self.top_k, -1, None)
        number("min_p", self.min_p, 0.0, 1.0)
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 2.0**15)
        optional_integer("seed", self.seed, -(2**63), MAX_SEED)
        optional_integer("max_tokens", self.max_tokens, 1, None)
        integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        object.__setattr__(self, "stops", _stop_strings(self.stop))
        _ids("stop_token_ids", self.stop_token_ids, MAX_IDS)
        _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_IDS)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty.", param="allowed_token_ids")
        _strings("bad_words", self.bad_words)
        _bias("logit_bias", self.logit_bias)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _boolean(name, getattr(self, name))


def integer(name: str, value: object, low: int, high: int | None) -> None:
    """Refuse anything but an int in [low, high]; a bool is no int here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {value!r}.", param=name)
    if value < low or (high is not None and value > high):
        raise InvalidRequest(f"{name} must be {_span(low, high)}, not {_shown(value)}.", param=name)


def optional_integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is not None:
        integer(name, value, low, high)


def number(
    name: str, value: object, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    """Refuse anything but a finite number in [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, not {value!r}.", param=name)
    if not low <= value <= high or (exclusive_low and value == low):  # NaN is in no range
        bound = f"above {low:g} and at most {high:g}" if exclusive_low else _span(low, high)
        raise InvalidRequest(f"{name} must be {bound}, not {_shown(value)}.", param=name)


def _shown(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)


def _span(low: float, high: float | None) -> str:
    if high is None:
        return f"at least {_plain(low)}"
    return f"between {_plain(low)} and {_plain(high)}"


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    _strings("stop", stop)
    _at_most("stop", stop, MAX_STOPS, "strings")
    return tuple(stop or ())


def _at_most(name: str, values: Sized | None, limit: int, what: str) -> None:
    if values is not None and len(values) > limit:
        raise InvalidRequest(
            f"{name} may hold at most {limit:,} {what}, not {len(values):,}.", param=name
        )


def _strings(name: str, values: Sequence[str] | None) -> None:
    if isinstance(values, str) or (values is not None and not isinstance(values, Sequence)):
        raise InvalidRequest(f"{name} must be a list of strings.", param=name)
    for value in values or ():
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must hold non-empty strings, not {value!r}.", param=name)


def _bias(name: str, values: Mapping[int, float] | None) -> None:
    if values is not None and not isinstance(values, Mapping):
        raise InvalidRequest(f"{name} must map token ids to numbers.", param=name)
    _at_most(name, values, MAX_IDS, "ids")
    for key, value in (values or {}).items():
        integer(name, key, 0, None)
        number(name, value, -100.0, 100.0)


def _boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {value!r}.", param=name)


def _ids(name: str, values: Sequence[int] | None, limit: int) -> None:
    if isinstance(values, str) or (values is not None and not isinstance(values, Sequence)):
        raise InvalidRequest(f"{name} must be a list of token ids.", param=name)
    _at_most(name, values, limit, "ids")  # before anything takes time for each of them
    for value in values or ():
        integer(name, value, 0, None)
