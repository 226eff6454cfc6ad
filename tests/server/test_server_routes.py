"""Probes, models, tokens, /generate, and the shape of errors on every route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.routing import APIRoute

from octavo.server.schemas.chat import ChatRequest
from octavo.server.schemas.completion import CompletionRequest
from tests.fakes.engine import Script
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio


async def test_probes_before_during_and_after(serve):
    served = await serve(ready=False)
    starting = asyncio.create_task(served.service.start())

    async def statuses() -> list[int]:
        return [
            (await served.client.get(p)).status for p in ("/live", "/health", "/ping", "/ready")
        ]

    assert await statuses() == [200, 503, 503, 503]
    health = (await served.client.get("/health")).json()
    assert health == {"status": "unavailable", "state": "starting"}
    served.engine.become_ready()
    await starting
    assert await statuses() == [200, 200, 200, 200]
    assert (await served.client.get("/health")).json() == {"status": "ok", "state": "ready"}
    served.gate.draining = True
    assert await statuses() == [200, 200, 200, 503]
    assert (await served.client.get("/ready")).json()["state"] == "draining"
    served.gate.draining = False
    served.engine.die("out of memory")
    assert await statuses() == [200, 503, 503, 503]
    assert (await served.client.get("/health")).json()["detail"] == "out of memory"


WORKING = [
    ("POST", "/v1/chat/completions", chat()),
    ("POST", "/v1/completions", prompt()),
    ("POST", "/generate", prompt()),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/TINY", None),
    ("POST", "/tokenize", prompt()),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/debug/audit", None),
    ("POST", "/reset_prefix_cache", None),
]


@pytest.mark.parametrize(("method", "path", "body"), WORKING)
async def test_503_while_no_engine_serves(serve, method, path, body):
    served = await serve(ready=False)
    reply = await served.client.request(method, path, body)
    assert reply.status == 503
    assert "starting" in reply.error["message"]
    assert reply.error["type"] == "unavailable_error"
    assert reply.headers["retry-after"] == "1"


@pytest.mark.parametrize(("method", "path", "body"), WORKING)
async def test_200_when_one_does(serve, method, path, body):
    served = await serve()
    assert (await served.client.request(method, path, body)).status == 200


async def test_wrong_routes_and_methods_have_the_error_shape(serve):
    served = await serve()
    for path in ("/", "/nope", "/v1", "/v1/models/", "//v1/models", "/v1/chat/completions/"):
        reply = await served.client.get(path)
        assert reply.status == 404
        assert reply.error["code"] in (404, "model_not_found")
    for route in served.app.routes:
        assert isinstance(route, APIRoute) or route.path == "/openapi.json"
        reply = await served.client.request("DELETE", route.path)
        assert reply.status == 405, route.path
        assert "DELETE" in reply.error["message"]
        assert reply.headers["allow"] in ("GET", "POST", "GET, HEAD", "GET, POST")


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("/debug/audit", "GET or POST"),
        ("/health", "GET or HEAD"),
        ("/v1/models/TINY", "GET"),
        ("/generate", "POST"),
    ],
)
async def test_a_wrong_method_is_told_all_that_a_path_takes(serve, path, use):
    reply = await (await serve()).client.request("DELETE", path)
    assert reply.error["message"] == f"DELETE {path} is not allowed; use {use}."
    assert reply.headers["allow"] == use.replace(" or ", ", ")


async def test_an_unforeseen_error_is_a_500_in_the_same_shape(serve, monkeypatch):
    served = await serve()

    async def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.service.text, "encode", broken)
    exchange = await served.client.open("POST", "/v1/completions", prompt())
    assert exchange.status == 500
    body = await exchange.body_part()
    assert b"Internal error" in body
    assert b"secret" not in body
    with pytest.raises(ZeroDivisionError):  # re-raised for the server's log
        await exchange.finish()


async def test_models(serve):
    served = await serve(model_names=("TINY", "org/alias"), max_model_len=256)
    models = (await served.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["TINY", "org/alias"]
    assert {model["max_model_len"] for model in models["data"]} == {256}
    assert (await served.client.get("/v1/models/org/alias")).json()["id"] == "org/alias"
    assert (await served.client.get("/v1/models/other")).status == 404


async def test_generate_repeats_the_prompt(serve):
    served = await serve(Script([107, 108]))
    reply = await served.client.post("/generate", prompt("Say ", max_tokens=4, temperature=0))
    assert reply.json() == {"text": ["Say hi"]}
    reply = await served.client.post("/generate", prompt("Say ", n=2))
    assert reply.json() == {"text": ["Say hi", "Say hi"]}
    reply = await served.client.post("/generate", prompt("x", stream=True))
    assert reply.status == 400
    assert reply.error["param"] == "stream"


async def test_tokenize_and_back(serve):
    served = await serve()
    told = (await served.client.post("/tokenize", prompt("hé", return_token_strs=True))).json()
    assert told["tokens"] == [1, 107, 198, 172]
    assert told["token_strs"][:2] == ["<s>", "h"]
    assert told["max_model_len"] == 512
    back = (await served.client.post("/detokenize", {"tokens": told["tokens"][1:]})).json()
    assert back == {"prompt": "hé"}
    bare = (await served.client.post("/tokenize", prompt("h", add_special_tokens=False))).json()
    assert bare["tokens"] == [107]
    for body in ({}, {**prompt(), **chat()}, {"messages": []}, {"prompt": 5}, {"promt": "x"}):
        assert (await served.client.post("/tokenize", body)).status == 400
    for tokens in ([512], [-1], ["a"], 5, None, [1.5]):
        assert (await served.client.post("/detokenize", {"tokens": tokens})).status == 400


async def test_engine_verbs(serve):
    served = await serve()
    audit = (await served.client.get("/debug/audit")).json()
    assert audit == {
        "pages": {"total": 256, "free": 250, "cached": 2, "referenced": 4},
        "host_pages": {"total": 40, "free": 30},
        "slots": {"total": 64, "running": 0},
        "waiting": 0,
        "swapped": 0,
        "audit_failures": 0,
    }
    assert (await served.client.post("/debug/audit")).json() == audit
    assert (await served.client.post("/reset_prefix_cache")).json() == {"pages_forgotten": 2}
    assert served.engine.controls == ["audit", "audit", "reset_prefix_cache"]


async def test_an_audit_that_fails_says_what_is_lost(serve):
    served = await serve()
    served.engine.broken["audit"] = "AuditError: pages [3] are referenced otherwise"
    reply = await served.client.post("/debug/audit")
    assert (reply.status, reply.error["code"]) == (500, "audit_failed")
    assert "pages [3]" in reply.error["message"]


async def test_the_document_describes_every_field(serve):
    served = await serve()
    document = (await served.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for schema in (ChatRequest, CompletionRequest):
        assert set(schemas[schema.__name__]["properties"]) == set(schema.__struct_fields__)
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    content = body["content"]["application/json"]
    assert content["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert content["example"]["messages"]
    assert "422" not in str(document["paths"])
    for reference in str(document).split("'#/components/schemas/")[1:]:
        assert reference.split("'")[0] in schemas
    assert (await served.client.get("/docs")).status == 200


async def test_the_documents_examples_work(serve):
    served = await serve()
    document = (await served.client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            example = methods["post"]["requestBody"]["content"]["application/json"]["example"]
            assert (await served.client.post(path, example)).status == 200, path


async def test_docs_can_be_switched_off(serve):
    served = await serve(enable_docs=False)
    assert (await served.client.get("/docs")).status == 404
    assert (await served.client.get("/openapi.json")).status == 404


async def test_version(serve):
    served = await serve(version="1.2.3")
    assert (await served.client.get("/version")).json() == {"version": "1.2.3"}


@pytest.mark.parametrize("ready", [True, False])
async def test_probes_answer_head(serve, ready):
    served = await serve(ready=ready, api_keys=("k",))
    for path in ("/live", "/health", "/ready", "/ping", "/version"):
        asked = await served.client.request("HEAD", path)
        assert asked.status == (await served.client.get(path)).status, path


async def test_models_tell_how_they_run(serve):
    served = await serve()
    card = (await served.client.get("/v1/models")).json()["data"][0]
    assert (card["device"], card["dtype"]) == ("fake", "float32")


async def test_requests_are_logged_when_asked_for(serve, caplog):
    served = await serve(log_requests=True)
    with caplog.at_level("INFO", logger="octavo.server"):
        await served.client.post("/v1/completions", prompt("secret"))
    assert "secret" not in caplog.text
    assert "priority=0, timeout=None, cache_salt=none" in caplog.text


async def test_a_logged_request_has_the_answers_id_and_its_terms(serve, caplog):
    served = await serve(log_requests=True)
    terms = {"timeout": 9, "cache_salt": "pepper"}
    with caplog.at_level("INFO", logger="octavo.server"):
        for path, body in (("/v1/chat/completions", chat(**terms)), ("/generate", prompt(**terms))):
            reply = await served.client.post(path, body)
            line = caplog.messages[-1]
            assert line.startswith(f"Received request {reply.headers['x-request-id']}: ")
            assert "timeout=9.0, cache_salt=given" in line
    assert "pepper" not in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("return_token_ids", True),
        ("prompt_logprobs", 1),
        ("request_id", "x"),
        ("stream", True),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 1),
    ],
)
async def test_generate_refuses_what_its_answer_has_no_place_for(serve, name, value):
    served = await serve()
    reply = await served.client.post("/generate", prompt("x", **{name: value}))
    assert reply.status == 400
    assert reply.error["param"] == name
    assert "not supported" in reply.error["message"]
    assert (await served.client.post("/generate", prompt("x", **{name: None}))).status == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"prompt": "x", "tools": []}, "tools"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": False},
            "add_special_tokens",
        ),
    ],
)
async def test_tokenize_refuses_fields_of_the_other_form(
    serve: Any, body: dict[str, Any], name: str
) -> None:
    served = await serve()
    answer = await served.client.post("/tokenize", body)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == name


@pytest.mark.anyio
async def test_detokenize_is_bounded(serve: Any) -> None:
    served = await serve()
    answer = await served.client.post("/detokenize", {"tokens": [5] * (2**17 + 1)})
    assert answer.status == 400
    assert "131072" in answer.json()["error"]["message"]
