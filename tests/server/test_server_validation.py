"""What a client may send: each refusal is a 400 that names the field, before any work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.schemas.chat import ChatRequest
from octavo.server.schemas.completion import CompletionRequest
from octavo.server.schemas.fields import IGNORED, UNSUPPORTED
from tests.fakes.bytetok import write_byte_tokenizer
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def refused(served: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a refused request; the engine has not heard of it."""
    before = len(served.engine.submitted)
    reply = await served.client.post(path, body)
    assert reply.status == status, reply.body
    assert len(served.engine.submitted) == before
    return reply.error


async def answered(served: Any, path: str, body: Any) -> dict[str, Any]:
    reply = await served.client.post(path, body)
    assert reply.status == 200, reply.body
    return reply.json()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", -1, ("max_tokens", "-1")),
        ("max_tokens", 0, ("max_tokens", "0")),
        ("max_tokens", 12.0, ("max_tokens", "integer", "12.0")),
        ("max_tokens", True, ("max_tokens", "integer", "true")),
        ("max_tokens", "12", ("max_tokens", "integer", '"12"')),
        ("temperature", -0.1, ("temperature", "-0.1")),
        ("temperature", "hot", ("temperature", "number", '"hot"')),
        ("temperature", [1], ("temperature", "number")),
        ("top_p", 0, ("top_p", "0")),
        ("top_p", 1.5, ("top_p", "1.5")),
        ("top_k", -2, ("top_k", "-2")),
        ("min_p", 2, ("min_p", "2")),
        ("presence_penalty", 3, ("presence_penalty", "3")),
        ("repetition_penalty", 0, ("repetition_penalty", "0")),
        ("seed", "x", ("seed", "integer")),
        ("seed", 2**70, ("seed",)),
        ("n", 0, ("n", "0")),
        ("n", 1.5, ("n", "1.5")),
        ("stop", 7, ("stop", "string", "7")),
        ("stop", [""], ("stop", "non-empty")),
        ("stop", ["a"] * 65, ("stop", "64", "65")),
        ("stop", ["a" * 20_000], ("stop", "20000")),
        ("stop_token_ids", ["a"], ("stop_token_ids",)),
        ("stop_token_ids", [512], ("stop_token_ids", "511", "512")),
        ("allowed_token_ids", [], ("allowed_token_ids",)),
        ("allowed_token_ids", [-1], ("allowed_token_ids", "-1")),
        ("bad_words", [""], ("bad_words",)),
        ("bad_words", "no", ("bad_words", "list")),
        ("min_tokens", 600, ("min_tokens", "600")),
        ("priority", 2**40, ("priority", str(2**40))),
        ("timeout", 0, ("timeout", "above 0")),
        ("timeout", "5", ("timeout", "a number")),
        ("cache_salt", "", ("cache_salt", "0")),
        ("cache_salt", "x" * 300, ("cache_salt", "300")),
        ("request_id", "a b", ("request_id",)),
        ("truncate_prompt_tokens", 0, ("truncate_prompt_tokens", "0")),
        ("stream", "yes", ("stream", "true or false")),
        ("logit_bias", {"512": 5}, ("logit_bias", "511", "512")),
        ("logit_bias", {"AI": -100}, ("logit_bias", "AI")),
        ("logit_bias", {"-1": 1}, ("logit_bias", "-1")),
        ("logit_bias", {"3": 1e9}, ("logit_bias", "100")),
        ("logit_bias", {"3": "x"}, ("logit_bias", "number")),
        ("logit_bias", [1], ("logit_bias", "an object")),
        ("model", 3, ("model", "string")),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_bad_value_is_named(serve, path, field, value, words):
    served = await serve()
    body = chat() if path == CHAT else prompt()
    error = await refused(served, path, {**body, field: value})
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert all(word in error["message"] for word in words), error["message"]
    assert "\n" not in error["message"]
    await answered(served, path, {**body, "max_tokens": 1})  # and the next one is served


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_is_the_same_as_absent(serve, path):
    served = await serve()
    required = "messages" if path == CHAT else "prompt"
    schema = ChatRequest if path == CHAT else CompletionRequest
    names = {*schema.__struct_fields__, *IGNORED, *UNSUPPORTED} - {required}
    body = {**dict.fromkeys(names), required: (chat() if path == CHAT else prompt())[required]}
    await answered(served, path, body)


async def test_bias_at_the_edges_is_taken(serve):
    served = await serve()
    await answered(served, COMPLETIONS, prompt(logit_bias={"511": -100, "0": 100}))
    assert served.requests[0].sampling.logit_bias == {511: -100.0, 0: 100.0}


async def test_unknown_field(serve):
    served = await serve()
    error = await refused(served, CHAT, chat(temprature=0.5))
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]
    error = await refused(served, CHAT, chat(zzzzzz=1))
    assert "Unknown field" in error["message"]


async def test_what_openai_clients_send_is_ignored(serve):
    served = await serve()
    for name in IGNORED:
        for path, body in ((CHAT, chat()), (COMPLETIONS, prompt())):
            await answered(served, path, {**body, name: "x", "max_tokens": 1})


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
async def test_known_but_unsupported(serve, name):
    served = await serve()
    schemas = {CHAT: (ChatRequest, chat()), COMPLETIONS: (CompletionRequest, prompt())}
    for path, (schema, body) in schemas.items():
        if name in schema.__struct_fields__:
            continue
        error = await refused(served, path, {**body, name: {"some": "thing"}})
        assert error["param"] == name
        assert name in error["message"]
        for neutral in UNSUPPORTED[name]:
            await answered(served, path, {**body, name: neutral, "max_tokens": 1})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
            "tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options"),
    ],
)
async def test_chat_fields_that_are_refused(serve, more, param):
    served = await serve()
    error = await refused(served, CHAT, chat(**more))
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "contnet": "y"}],
            "messages[1].contnet",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "A"},
                        {"type": "image_url", "image_url": {}},
                    ],
                }
            ],
            "messages[0].content[1]",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], "messages[0].tool_calls[0]"),
    ],
)
async def test_bad_messages(serve, messages, param):
    served = await serve()
    error = await refused(served, CHAT, {"model": "TINY", "messages": messages})
    assert error["param"] == param


@pytest.mark.parametrize(
    "body", [{"model": "TINY"}, {"model": "TINY", "messages": None}, {"prompt": "x"}]
)
async def test_messages_are_required(serve, body):
    served = await serve()
    error = await refused(served, CHAT, body)
    assert error["param"] in ("messages", "prompt")


@pytest.mark.parametrize(
    "value",
    [[], ["a", 1], [1, [2]], [["a"]], [[]], ["a", ""], {"a": 1}, 5, [True], [1.5], [512], [-1]],
)
async def test_bad_prompts(serve, value, tmp_path):
    folder = write_byte_tokenizer(tmp_path / "no_bos", add_bos=False)
    served = await serve(folder=folder)
    error = await refused(served, COMPLETIONS, prompt(value))
    assert error["param"].startswith("prompt")


async def test_empty_prompt(serve, tmp_path):
    with_bos = await serve()
    answer = await answered(with_bos, COMPLETIONS, prompt("", max_tokens=2))
    assert answer["usage"]["prompt_tokens"] == 1
    without = await serve(folder=write_byte_tokenizer(tmp_path / "no_bos", add_bos=False))
    assert (await refused(without, COMPLETIONS, prompt("")))["param"] == "prompt"
    assert (await refused(without, COMPLETIONS, prompt(["ok", ""])))["param"] == "prompt[1]"


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_over_the_limit(serve, stream):
    served = await serve()
    error = await refused(served, COMPLETIONS, prompt([5] * 513, max_tokens=1, stream=stream))
    assert error["code"] == "context_length_exceeded"
    assert "512" in error["message"]
    assert "513" in error["message"]
    await refused(served, COMPLETIONS, prompt([5] * 512, max_tokens=1, stream=stream))
    await answered(served, COMPLETIONS, prompt([5] * 511, max_tokens=1))
    error = await refused(served, CHAT, chat("x" * 600, stream=stream))
    assert error["code"] == "context_length_exceeded"


async def test_max_tokens_at_the_edge(serve):
    served = await serve()
    answer = await answered(served, COMPLETIONS, prompt([5] * 500, max_tokens=12, ignore_eos=True))
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12
    error = await refused(served, COMPLETIONS, prompt([5] * 500, max_tokens=13))
    assert all(number in error["message"] for number in ("500", "13", "512"))


async def test_default_max_tokens(serve):
    served = await serve()
    await answered(served, COMPLETIONS, prompt(ignore_eos=True))
    await answered(served, CHAT, chat(ignore_eos=True))
    completion, whole = served.requests
    assert completion.max_tokens == 16
    assert whole.max_tokens == 512 - len(whole.prompt)


async def test_truncation_only_when_asked_for(serve):
    served = await serve()
    long = [5 + i % 200 for i in range(600)]
    answer = await answered(
        served, COMPLETIONS, prompt(long, truncate_prompt_tokens=7, max_tokens=1)
    )
    assert answer["usage"]["prompt_tokens"] == 7
    assert served.requests[0].prompt == long[-7:]
    answer = await answered(
        served, COMPLETIONS, prompt(long, truncate_prompt_tokens=-1, max_tokens=12)
    )
    assert answer["usage"]["prompt_tokens"] == 500
    answer = await answered(served, CHAT, chat("x" * 300, truncate_prompt_tokens=20, max_tokens=1))
    assert answer["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        (prompt("a", n=1_000_000, max_tokens=1), ("128", "1000000")),
        (prompt(["a"] * 100, n=128, max_tokens=1), ("1024", "100", "128")),
        (prompt(["a"] * 1025, max_tokens=1), ("1024", "1025")),
        (prompt("a", best_of=1_000_000, max_tokens=1), ("best_of",)),
    ],
)
async def test_absurd_n(serve, body, numbers):
    served = await serve()
    error = await refused(served, COMPLETIONS, body)
    assert all(number in error["message"] for number in numbers), error["message"]


async def test_unknown_model(serve):
    served = await serve(model_names=("TINY", "alias"))
    for path, body in ((CHAT, chat()), (COMPLETIONS, prompt()), ("/generate", prompt())):
        error = await refused(served, path, {**body, "model": "gpt-4"}, 404)
        assert error["param"] == "model"
        assert "gpt-4" in error["message"]
        assert "alias" in error["message"]
    answer = await answered(served, CHAT, chat() | {"model": "alias"})
    assert answer["model"] == "alias"
    answer = await answered(served, CHAT, chat() | {"model": None})
    assert answer["model"] == "TINY"


DEEP = b'{"messages":' + b"[" * 50_000
BAD_BODIES = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"nonsense",
    b"{'prompt': 'x'}",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x"} {"prompt": "y"}',
    DEEP,
    b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}",
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("raw", BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_bad_json(serve, path, raw):
    served = await serve()
    reply = await served.client.post(
        path, parts=[raw], headers=[("content-type", "application/json")]
    )
    assert reply.status == 400
    assert reply.error["message"]
    assert len(reply.error["message"]) < 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("content-type", "application/json; charset=utf-8")], 200),
        ([("content-type", "application/vnd.api+json")], 200),
        ([], 200),
        ([("origin", "http://evil.example")], 400),
        ([("content-type", "text/plain")], 400),
        ([("content-type", "application/x-www-form-urlencoded")], 400),
        ([("content-type", "multipart/form-data; boundary=x")], 400),
    ],
)
async def test_content_type(serve, headers, status):
    served = await serve()
    raw = json.dumps(prompt(max_tokens=1)).encode()
    reply = await served.client.post(COMPLETIONS, parts=[raw], headers=headers)
    assert reply.status == status
    if status == 400:
        assert reply.error["param"] == "Content-Type"


async def test_defaults_come_from_the_generation_config(serve):
    served = await serve(default_sampling={"temperature": 0.25, "top_k": 7, "eos_token_id": 2})
    await answered(served, CHAT, chat(top_k=3))
    sampling = served.requests[0].sampling
    assert sampling.temperature == 0.25
    assert sampling.top_k == 3
    assert sampling.top_p == 1.0


async def test_parameters_arrive(serve):
    served = await serve()
    sent = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
    }
    more = {"stop_token_ids": [9], "allowed_token_ids": [2, 100], "seed": 3}
    more |= {"priority": -4, "timeout": 7}
    await answered(
        served, COMPLETIONS, prompt(**sent, **more, cache_salt="tenant", bad_words=["q"])
    )
    request = served.requests[0]
    for name, value in sent.items():
        assert getattr(request.sampling, name) == value
    assert request.stop_ids == {2, 9}
    assert request.sampling.allowed_ids == (2, 100)
    assert (request.priority, request.timeout, request.tenant) == (-4, 7, "")
    assert request.sampling.bad_words
    assert request.hash_seed != b""


async def test_special_tokens_before_a_text(serve):
    served = await serve()
    await answered(served, COMPLETIONS, prompt("hi", add_special_tokens=False))
    await answered(served, COMPLETIONS, prompt("hi"))
    without, with_bos = (request.prompt for request in served.requests)
    assert with_bos == [1, *without]
