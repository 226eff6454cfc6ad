"""SamplingParams refuses what no model could honour; errors know their HTTP status."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core import errors
from octavo.core.errors import InvalidRequest
from octavo.core.sampling import MAX_IDS, MAX_SEED, MAX_STOPS, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-60),
        ("seed", MAX_SEED + 1),
        ("seed", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("stop", ["a", ""]),
        ("stop", ["a"] * (MAX_STOPS + 1)),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [5] * (MAX_IDS + 1)),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", 5),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_IDS + 1), 1.0)),
        ("logit_bias", {"AI": -100}),
        ("logit_bias", {3: 1e9}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", [3]),
        ("temperature", 10**400),
        ("top_k", -(10**400)),
        ("ignore_eos", "no"),
        ("skip_special_tokens", 1),
        ("include_stop_str_in_output", None),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in caught.value.message


def test_edges_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=MAX_SEED, logprobs=0)
    SamplingParams(temperature=0.0, top_p=1e-9, seed=-(2**63), max_tokens=None, min_tokens=99)
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_IDS), 1), repetition_penalty=1e-3)
    SamplingParams(logit_bias={0: -100, 5: 100}, presence_penalty=-2, frequency_penalty=2)


def test_a_limit_is_said_with_the_number_given() -> None:
    with pytest.raises(InvalidRequest, match=r"logit_bias may hold at most 1,024 ids, not 1,025\."):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(InvalidRequest, match=r"between 0\.001 and 32768, not 1e-60"):
        SamplingParams(repetition_penalty=1e-60)


def test_stop_is_a_string_or_a_list() -> None:
    assert SamplingParams(stop="a").stops == ("a",)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")
    assert SamplingParams().stops == ()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest, 400),
        (errors.ContextLengthExceeded, 400),
        (errors.Unauthorized, 401),
        (errors.ModelNotFound, 404),
        (errors.BodyTooLarge, 413),
        (errors.Overloaded, 429),
        (errors.EngineFault, 500),
        (errors.EngineUnavailable, 503),
    ],
)
def test_status_follows_from_the_class(error: type[errors.OctavoError], status: int) -> None:
    assert error("x").status == status
    assert issubclass(error, errors.CallerError if status < 500 else errors.ServerError)
