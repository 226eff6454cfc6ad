"""What a caller may ask of a model: limits, ids, stops and seeds."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.errors import ContextLengthExceeded, InvalidRequest
from octavo.core.prefix import prompt_hashes, root_hash
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.core.terms import NO_TERMS, Terms
from octavo.core.validation import Limits, check_sequences, choice_seed, make_requests

TINY = Limits(vocab_size=512, max_model_len=512, page_size=16, eos_ids=(2, 7))


def make(
    prompt: list[int],
    *,
    limits: Limits = TINY,
    terms: Terms = NO_TERMS,
    options: Any = None,
    **params: Any,
) -> list[Request]:
    sampling, more = SamplingParams(**params), options or {}
    return make_requests("r", prompt, sampling, limits, terms, draw_seed=lambda: 1234, **more)


def refused(prompt: list[int], param: str, *parts: str, **kwargs: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        make(prompt, **kwargs)
    error = caught.value
    assert error.param == param
    assert error.status == 400
    assert param in error.message
    for part in parts:
        assert part in error.message
    return error


def test_empty_prompt() -> None:
    refused([], "prompt", "0")


@pytest.mark.parametrize("bad", [512, -1, True, 3.0, "a"])
def test_prompt_ids_outside_the_vocabulary(bad: Any) -> None:
    refused([5, bad], "prompt", str(bad))
    make([5, 511, 0])


@pytest.mark.parametrize("length", [512, 513])
def test_prompt_that_leaves_no_room(length: int) -> None:
    error = refused([5] * length, "prompt", str(length), "512", max_tokens=1)
    assert isinstance(error, ContextLengthExceeded)
    assert error.code == "context_length_exceeded"


def test_last_place_of_the_context() -> None:
    assert make([5] * 511, max_tokens=1)[0].max_tokens == 1
    assert make([5] * 500, max_tokens=12)[0].max_tokens == 12
    error = refused([5] * 500, "max_tokens", "500", "13", "512", "12", max_tokens=13)
    assert error.code == "context_length_exceeded"


def test_max_tokens_none_is_all_that_is_left() -> None:
    assert make([5] * 500, max_tokens=None)[0].max_tokens == 12


def test_clamp_max_tokens() -> None:
    clamping = Limits(512, 512, 16, clamp_max_tokens=True)
    assert make([5] * 500, limits=clamping, max_tokens=100)[0].max_tokens == 12
    refused([5] * 512, "prompt", limits=clamping, max_tokens=1)


def test_the_offline_api_takes_what_ends_when_the_context_is_full() -> None:
    offline = {"until_full": True}
    assert make([5] * 500, options=offline, max_tokens=64)[0].max_tokens == 12
    assert make([5] * 500, options=offline, max_tokens=None)[0].max_tokens == 12
    refused([5] * 512, "prompt", "512", options=offline, max_tokens=1)


def test_min_tokens_must_fit() -> None:
    refused([5] * 500, "min_tokens", "13", "12", max_tokens=None, min_tokens=13)
    make([5] * 500, max_tokens=None, min_tokens=12)


def test_absurd_n_is_refused_at_once() -> None:
    begin = time.perf_counter()
    refused([5], "n", "128", "1000000", n=10**6)
    with pytest.raises(InvalidRequest, match=r"1024.*100 × 128 = 12800"):
        check_sequences(100, 128, TINY)
    assert time.perf_counter() - begin < 5  # nothing was built a million times
    check_sequences(8, 128, TINY)
    assert len(make([5], n=128)) == 128


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {512: 5.0}),
        ("stop_token_ids", [3, 512]),
        ("allowed_token_ids", [512]),
    ],
)
def test_ids_outside_the_vocabulary(name: str, value: Any) -> None:
    refused([5], name, "512", "511", **{name: value})


def test_last_id_of_the_vocabulary() -> None:
    request = make([5], logit_bias={511: -100}, allowed_token_ids=[511, 3, 3])[0]
    assert request.sampling.logit_bias == {511: -100.0}
    assert request.sampling.allowed_ids == (3, 511)


def test_bad_words_are_checked_and_kept() -> None:
    assert make([5], options={"bad_words": [[3, 4]]})[0].sampling.bad_words == ((3, 4),)
    refused([5], "bad_words", "512", options={"bad_words": [[512]]})


def test_logprobs_limit_of_the_server() -> None:
    limits = Limits(512, 512, 16, max_logprobs=3)
    assert make([5], limits=limits, logprobs=3, prompt_logprobs=0)[0].sampling.logprobs == 3
    refused([5], "logprobs", "3", "4", limits=limits, logprobs=4)
    refused([5], "prompt_logprobs", "3", "4", limits=limits, prompt_logprobs=4)


def test_masks_that_leave_nothing() -> None:
    refused([5], "allowed_token_ids", allowed_token_ids=[2, 7], min_tokens=1)
    make([5], allowed_token_ids=[2, 7])
    make([5], allowed_token_ids=[2, 7], min_tokens=1, ignore_eos=True)
    refused([5], "allowed_token_ids", allowed_token_ids=[9], options={"bad_words": [[9]]})
    make([5], allowed_token_ids=[9], options={"bad_words": [[9, 9]]})


def test_stop_ids_are_a_union_and_ignore_eos_drops_the_models() -> None:
    assert make([5], stop_token_ids=[9])[0].stop_ids == {2, 7, 9}
    assert make([5], stop_token_ids=[9], ignore_eos=True)[0].stop_ids == {9}
    assert make([5], ignore_eos=True)[0].stop_ids == frozenset()
    assert make([5])[0].sampling.min_tokens_ids == ()
    assert make([5], min_tokens=2, stop_token_ids=[9])[0].sampling.min_tokens_ids == (2, 7, 9)


def test_choices_have_ids_a_parent_and_their_own_seeds() -> None:
    choices = make([5], n=4, seed=7, prompt_logprobs=2)
    assert [c.sampling.prompt_logprobs for c in choices] == [2, None, None, None]
    assert [c.id for c in choices] == ["r-0", "r-1", "r-2", "r-3"]
    assert [c.parent for c in choices] == [None, "r-0", "r-0", "r-0"]
    seeds = [c.sampling.seed for c in choices]
    assert len(set(seeds)) == 4
    assert seeds == [c.sampling.seed for c in make([5], n=4, seed=7)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert make([5], n=1, seed=7)[0].sampling.seed == seeds[0]
    assert make([5], n=1, seed=7)[0].id == "r"


def test_a_seed_is_drawn_only_when_none_is_given() -> None:
    assert make([5])[0].sampling.seed == choice_seed(1234, 0)
    assert make([5], seed=0)[0].sampling.seed == choice_seed(0, 0)
    assert choice_seed(0, 0) == 0xE220A8397B1DCDAF  # first output of splitmix64(0)
    assert 0 <= choice_seed(-5, 3) < 2**64


def test_hashes_travel_with_the_request() -> None:
    prompt = list(range(40))
    request = make(prompt, terms=Terms(cache_salt="tenant"))[0]
    assert request.hash_seed == root_hash("tenant")
    assert request.block_hashes == prompt_hashes(prompt, 16, root_hash("tenant"))
    assert len(request.block_hashes) == 2
    uncached = Limits(512, 512, 16, prefix_caching=False)
    assert make(prompt, limits=uncached)[0].block_hashes == ()


@pytest.mark.parametrize(
    ("own", "server", "rules"),
    [(None, None, None), (3, None, 3), (None, 5, 5), (3, 5, 3), (9, 5, 5)],
)
def test_the_smaller_timeout_rules(own: float, server: float, rules: float) -> None:
    limits = replace(TINY, request_timeout=server, queue_timeout=2)
    for request in make([5], limits=limits, terms=Terms(timeout=own), n=2):
        assert (request.timeout, request.queue_timeout) == (rules, 2)


def test_terms_reach_every_choice() -> None:
    requests = make([5], terms=Terms(priority=-3, tenant="key-1"), n=3)
    assert {(r.priority, r.tenant) for r in requests} == {(-3, "key-1")}


def test_a_priority_that_nobody_heeds_is_refused() -> None:
    limits = replace(TINY, has_priorities=False)
    refused([5], "priority", "-3", "--scheduling-policy", limits=limits, terms=Terms(priority=-3))
    assert make([5], limits=limits, terms=Terms(priority=0))


@pytest.mark.parametrize(
    ("name", "bad", "part"),
    [
        ("priority", 2**31, "2147483647"),
        ("priority", 1.5, "1.5"),
        ("priority", True, "True"),
        ("timeout", 0, "above 0"),
        ("timeout", -1.0, "-1.0"),
        ("timeout", float("nan"), "nan"),
        ("timeout", float("inf"), "inf"),
        ("timeout", "1", "'1'"),
        ("cache_salt", "", "0"),
        ("cache_salt", "x" * 257, "257"),
        ("cache_salt", b"x", "b'x'"),
    ],
)
def test_bad_terms(name: str, bad: Any, part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Terms(**{name: bad})
    assert caught.value.param == name
    assert part in caught.value.message


def test_top_k_off_in_every_spelling() -> None:
    assert [make([5], top_k=k)[0].sampling.top_k for k in (-1, 0, 5, 511, 512, 9999)] == [
        0,
        0,
        5,
        511,
        0,
        0,
    ]
