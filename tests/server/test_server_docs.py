"""/docs: whole without another server, and its examples are what a shell takes."""

from __future__ import annotations

import html
import json
import re
import shlex

import pytest

from octavo.server.docs import render_docs

pytestmark = pytest.mark.anyio


async def test_the_page_needs_nothing_from_elsewhere(serve):
    served = await serve()
    page = (await served.client.get("/docs")).body.decode()
    assert not re.search(r"<(script|link|img|iframe|base)\b|@import|url\(", page)
    assert set(re.findall(r"https?://([^/\s<&]+)", page)) == {"test"}
    assert page.count("<details>") == page.count("</details>") > 10


async def test_it_shows_every_route_and_field(serve):
    served = await serve()
    document = (await served.client.get("/openapi.json")).json()
    page = (await served.client.get("/docs")).body.decode()
    for path, methods in document["paths"].items():
        assert f"<code>{html.escape(path)}</code>" in page
        for operation in methods.values():
            assert html.escape(operation["summary"]) in page
    for field in document["components"]["schemas"]["ChatRequest"]["properties"].values():
        assert html.escape(field.get("description", "")).replace("`", "") in page
    assert "<code>max_completion_tokens</code></td><td>integer or null</td>" in page


async def test_its_commands_work(serve):
    served = await serve(root_path="/api", api_keys=("KEY",))
    key = [("authorization", "Bearer KEY")]
    page = (await served.client.get("/docs", headers=key)).body.decode()
    commands = [shlex.split(html.unescape(text)) for text in re.findall(r"<pre>(.*?)</pre>", page)]
    sent = 0
    for words in commands:
        assert words[0] == "curl"
        if "-d" in words:
            url = next(word for word in words if word.startswith("http://test/api/"))
            body = json.loads(words[words.index("-d") + 1])
            path = url.removeprefix("http://test")
            assert (await served.client.post(path, body, headers=key)).status == 200
            sent += 1
    assert sent >= 5


def test_text_of_the_document_is_no_markup():
    document = {
        "info": {"title": "<b>", "version": "1", "description": "`<i>`"},
        "components": {"schemas": {}},
        "paths": {"/<u>": {"get": {"summary": "<s>", "responses": {}}}},
    }
    page = render_docs(document, "http://<x>")
    assert not re.search("<(b|i|u|s|x)>", page)
    assert "<code>&lt;i&gt;</code>" in page
