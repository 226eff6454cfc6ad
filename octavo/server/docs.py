"""/docs: the OpenAPI document as one HTML page that needs no script and no other server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em }
pre { background: #8882; padding: 0.7rem; overflow-x: auto; white-space: pre-wrap }
table { border-collapse: collapse } td { border-top: 1px solid #8884; padding: 0.2rem 0.8rem 0 0;
vertical-align: top } summary { cursor: pointer } b.verb { color: #06c; margin-right: 0.5rem }
"""
MAX_DEPTH = 3  # of types shown in words: a list of objects by name, and no further


def docs_route(app: FastAPI, root_path: str) -> None:
    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        base = f"{request.url.scheme}://{request.url.netloc}{root_path}"
        return HTMLResponse(render_docs(app.openapi(), base))


def render_docs(document: Mapping[str, Any], base_url: str) -> str:
    """The page. ``base_url`` is where its examples send their requests."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    paragraphs = escape(info.get("description", "")).strip().split("\n\n")
    body = "".join(f"<p>{_code(text)}</p>" for text in paragraphs)
    body += "".join(_sections(document, base_url))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{body}</body></html>"
    )


def _sections(document: Mapping[str, Any], base_url: str) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    tag = None
    with_key = bool(document.get("security"))
    for path, methods in document["paths"].items():
        for verb, operation in methods.items():
            heading = operation.get("tags", ["Other"])[0]
            if heading != tag:
                yield f"<h2>{escape(heading)}</h2>"
                tag = heading
            yield _route(verb.upper(), path, operation, schemas)
            yield f"<pre>{escape(_curl(verb.upper(), base_url + path, operation, with_key))}</pre>"
            yield "</details>"


def _route(verb: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    parts = [
        f'<details><summary><b class="verb">{verb}</b><code>{escape(path)}</code> '
        f"{escape(operation.get('summary', ''))}</summary>"
    ]
    if text := operation.get("description"):
        parts.append(f"<p>{_code(escape(text))}</p>")
    if request := operation.get("requestBody"):
        parts.append("<h4>Request</h4>" + _fields(request["content"]["application/json"], schemas))
    for kind, content in operation["responses"].get("200", {}).get("content", {}).items():
        if "$ref" in content.get("schema", {}):
            parts.append(f"<h4>Answer, {escape(kind)}</h4>{_fields(content, schemas)}")
    return "".join(parts)


def _fields(content: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A row for each field of an object: name, type, what it is."""
    schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    rows = []
    for name, field in schema.get("properties", {}).items():
        text = field.get("description", "")
        if name in required:
            text = f"Required. {text}"
        rows.append(
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
            f"<td>{_code(escape(text))}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _type(schema: Mapping[str, Any], depth: int = MAX_DEPTH) -> str:
    """The type in words: "integer or null", "list of string"."""
    if not depth:
        return "…"
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each, depth) for each in schema["anyOf"]))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and schema.get("items"):
        return f"list of {_type(schema['items'], depth - 1)}"
    return {"array": "list"}.get(kind, str(kind))


def _curl(verb: str, url: str, operation: Mapping[str, Any], with_key: bool) -> str:
    words = ["curl", url if verb == "GET" else f"-X {verb} {url}"]
    if with_key:
        words.append("-H 'Authorization: Bearer KEY'")
    if "requestBody" in operation:
        example = json.dumps(operation["requestBody"]["content"]["application/json"]["example"])
        quoted = example.replace("'", "'\\''")
        words.append(f"-H 'Content-Type: application/json' -d '{quoted}'")
    return " ".join(words)


def _code(escaped: str) -> str:
    """Text between backquotes as code."""
    parts = escaped.split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))
