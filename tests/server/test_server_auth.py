"""Keys, request ids, body limits and CORS: what stands before the routes."""

from __future__ import annotations

import json

import pytest

from octavo.core.errors import StartupError
from octavo.server.auth import PUBLIC_PATHS
from octavo.server.settings import ServerSettings
from tests.server.conftest import chat, prompt

pytestmark = pytest.mark.anyio
KEYS = ("k1-secret", "k2-secret")


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[str, str]]:
    return [("authorization", f"{scheme} {key}")]


async def test_every_route_but_the_public_ones_needs_a_key(serve):
    served = await serve(api_keys=KEYS)
    seen = set()
    for route in served.app.routes:
        for method in route.methods:
            path = route.path.replace("{model:path}", "TINY")
            status = (await served.client.request(method, path)).status
            assert (status == 401) == (path not in PUBLIC_PATHS), (method, path, status)
            seen.add(path)
    assert seen >= PUBLIC_PATHS
    assert {"/metrics", "/docs", "/openapi.json", "/tokenize", "/debug/audit"} <= seen


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/metrics", "/tokenize", "/docs", "/openapi.json", "//v1/models"),
        *("/v1/models/", "/V1/models", "/%761/models", "/health/../v1/models", "/health/"),
        *("/Health", "/health%2f..", "/invocations", "", "/live/x", "*"),
    ],
)
async def test_no_way_around(serve, path):
    served = await serve(api_keys=KEYS)
    for method in ("GET", "POST", "OPTIONS", "HEAD"):
        assert (await served.client.request(method, path)).status in (401, 404), method


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("k1-secret"), 200),
        (bearer("k2-secret"), 200),
        (bearer("k1-secret", "bearer"), 200),
        ([], 401),
        (bearer(""), 401),
        (bearer(" k1-secret"), 401),
        (bearer("k1-secret "), 401),
        (bearer("k1-secre"), 401),
        (bearer("k1-secrett"), 401),
        (bearer("K1-SECRET"), 401),
        (bearer("k1-secret,k2-secret"), 401),
        (bearer("k1-secret", "Basic"), 401),
        ([("authorization", "k1-secret")], 401),
        ([("authorization", "")], 401),
        (bearer("k1-secret") * 2, 401),
        (bearer("k1-secret") + bearer("wrong"), 401),
        (bearer("schlüssel"), 401),
        ([("x-api-key", "k1-secret")], 401),
    ],
)
async def test_the_header(serve, headers, status):
    served = await serve(api_keys=KEYS)
    reply = await served.client.get("/v1/models", headers=headers)
    assert reply.status == status
    if status == 401:
        assert reply.error["type"] == "authentication_error"
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "k1" not in reply.body.decode()


async def test_no_keys_means_no_check(serve):
    served = await serve()
    assert (await served.client.get("/v1/models")).status == 200


def test_an_empty_key_is_no_key():
    with pytest.raises(StartupError):
        ServerSettings(("m",), api_keys=("",))


async def test_websockets_are_refused(serve):
    served = await serve(api_keys=KEYS)
    sent = []

    async def send(message):
        sent.append(message["type"])

    scope = {"type": "websocket", "path": "/health", "headers": [], "query_string": b""}
    await served.app(scope, None, send)
    assert sent == ["websocket.close"]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3_X", True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_request_id_is_echoed_if_well_formed(serve, given, kept):
    served = await serve()
    reply = await served.client.post("/v1/completions", prompt(), headers=[("x-request-id", given)])
    assert (reply.headers["x-request-id"] == given) is kept
    assert reply.json()["id"] == "cmpl-" + reply.headers["x-request-id"]


async def test_equal_request_ids_do_not_meet_in_the_engine(serve):
    served = await serve()
    for _ in range(2):
        answer = (await served.client.post("/v1/completions", prompt(request_id="same"))).json()
        assert answer["id"] == "cmpl-same"
    assert len(served.engine.submitted) == 2


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_over_the_limit(serve, announced):
    served = await serve(max_body_bytes=1000)
    raw = json.dumps(prompt("x" * 2000)).encode()
    headers = [("content-type", "application/json")]
    if announced:
        headers.append(("content-length", str(len(raw))))
    parts = [raw[i : i + 100] for i in range(0, len(raw), 100)]
    reply = await served.client.post("/v1/completions", parts=parts, headers=headers)
    assert reply.status == 413
    assert "1000" in reply.error["message"]
    assert (await served.client.post("/v1/completions", prompt())).status == 200


async def test_a_compressed_body(serve):
    served = await serve()
    for encoding, status in (("gzip", 400), ("br", 400), ("identity", 200)):
        reply = await served.client.post(
            "/v1/completions", prompt(), headers=[("content-encoding", encoding)]
        )
        assert reply.status == status
        if status == 400:
            assert encoding in reply.error["message"]


async def test_a_body_that_never_arrives(serve):
    served = await serve(body_timeout_s=0.02)
    reply = await served.client.post("/v1/completions", parts=[b'{"prompt"', None])
    assert reply.status == 408
    assert "0.02 s" in reply.error["message"]
    assert reply.headers["connection"] == "close"


async def test_cors_is_off_by_default(serve):
    served = await serve()
    reply = await served.client.get("/v1/models", headers=[("origin", "http://a.example")])
    assert "access-control-allow-origin" not in reply.headers


async def test_cors_for_listed_origins(serve):
    served = await serve(allowed_origins=("http://a.example",), api_keys=KEYS)
    preflight = [
        ("origin", "http://a.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization,content-type"),
    ]
    reply = await served.client.request("OPTIONS", "/v1/chat/completions", headers=preflight)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "http://a.example"
    for origin, status in (("http://a.example", 200), ("http://b.example", 200)):
        reply = await served.client.post(
            "/v1/chat/completions", chat(), headers=[("origin", origin), *bearer(KEYS[0])]
        )
        assert reply.status == status
        allowed = reply.headers.get("access-control-allow-origin")
        assert allowed == (origin if origin.startswith("http://a") else None)
