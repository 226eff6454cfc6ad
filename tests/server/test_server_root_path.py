"""A path under which a proxy shows the server, kept or removed by it, changes no rule."""

from __future__ import annotations

import pytest

from tests.fakes.engine import Script
from tests.server.conftest import chat

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("prefix", ["", "/api"])
async def test_the_limit_drain_and_readiness_hold(serve, prefix):
    served = await serve(Script(stall_at=2), max_concurrent_requests=1, root_path="/api")
    first = await served.client.open("POST", prefix + CHAT, chat(stream=True))
    assert first.status == 200
    assert (await served.client.post(prefix + CHAT, chat())).status == 429
    served.gate.draining = True
    assert (await served.client.post(prefix + CHAT, chat())).status == 503
    await first.hang_up()
    starting = await serve(ready=False, root_path="/api")
    assert (await starting.client.post(prefix + CHAT, chat())).status == 503


@pytest.mark.parametrize("prefix", ["", "/api"])
async def test_probes_are_public_and_the_rest_is_not(serve, prefix):
    served = await serve(api_keys=("k",), root_path="/api")
    assert (await served.client.get(prefix + "/health")).status == 200
    assert (await served.client.get(prefix + "/v1/models")).status == 401
    key = [("authorization", "Bearer k")]
    assert (await served.client.get(prefix + "/v1/models", headers=key)).status == 200
    assert (await served.client.get("/apix/health", headers=key)).status == 404


async def test_the_document_names_the_path(serve):
    served = await serve(root_path="/api")
    document = (await served.client.get("/api/openapi.json")).json()
    assert document["servers"] == [{"url": "/api"}]
