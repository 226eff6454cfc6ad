"""Whatever a client sends, the server is not at fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.server.schemas.chat import MESSAGE_FIELDS, ROLES, ChatRequest
from octavo.server.schemas.completion import CompletionRequest
from octavo.server.schemas.fields import IGNORED, UNSUPPORTED
from octavo.server.schemas.tokens import DetokenizeRequest, TokenizeRequest

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
small = st.integers(-2, 30)
plausible = {
    "n": small,
    "max_tokens": small,
    "min_tokens": small,
    "top_k": small,
    "logprobs": small | st.booleans(),
    "top_logprobs": small,
    "prompt_logprobs": small,
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(small.map(str), st.floats(-101, 101), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "prompt": st.text(max_size=8) | st.lists(st.integers(-1, 520), max_size=6),
    "echo": st.booleans(),
    "tokens": st.lists(st.integers(-1, 520), max_size=6),
    "messages": st.lists(
        st.dictionaries(
            st.sampled_from(sorted(MESSAGE_FIELDS)),
            st.sampled_from(ROLES) | json_values,
            max_size=4,
        ),
        max_size=3,
    ),
}


def bodies(schema: type) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted({*schema.__struct_fields__, *IGNORED, *UNSUPPORTED})
    fields = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), plausible.get(name, json_values) | json_values)
    )
    required = {
        "messages": st.just([{"role": "user", "content": "hi"}]),
        "prompt": st.just("hi"),
        "tokens": st.just([5, 6]),
    }
    base = {name: required[name] for name in required if name in schema.__struct_fields__}
    return st.builds(
        lambda start, more: {**start, **dict(more)},
        st.fixed_dictionaries({}, optional=base),
        st.lists(fields, max_size=5),
    )


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        ("/v1/chat/completions", ChatRequest),
        ("/v1/completions", CompletionRequest),
        ("/tokenize", TokenizeRequest),
        ("/detokenize", DetokenizeRequest),
    ],
)
def test_no_body_is_the_servers_fault(serve: Callable[..., Any], path: str, schema: type) -> None:
    with asyncio.Runner() as runner:
        served = runner.run(serve())
        statuses = set()

        @settings(
            max_examples=100,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies(schema) | json_values)
        def check(body: Any) -> None:
            reply = runner.run(served.client.post(path, body if body is not None else {}))
            statuses.add(reply.status)
            if reply.headers["content-type"].startswith("text/event-stream"):
                assert b'"error"' not in reply.body, reply.body
                assert reply.body.endswith(b"data: [DONE]\n\n")
            elif reply.status != 200:
                assert reply.status in (400, 404), (json.dumps(body), reply.body)
                assert reply.error["message"].count("\n") == 0
            assert not served.engine.open
            assert served.gate.active == 0

        check()
        assert statuses >= {200, 400}, "the fuzzer must reach both sides"


def test_no_bytes_are_the_servers_fault(serve: Callable[..., Any]) -> None:
    with asyncio.Runner() as runner:
        served = runner.run(serve())

        @settings(
            max_examples=100,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
        def check(raw: bytes) -> None:
            headers = [("content-type", "application/json")]
            reply = runner.run(served.client.post("/v1/completions", parts=[raw], headers=headers))
            assert reply.status in (400, 404)
            assert reply.error["message"]

        check()
