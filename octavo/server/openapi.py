"""The OpenAPI document, from the same structs that check requests and encode answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.schemas import answers, chat, completion, tokens
from octavo.server.schemas.fields import IGNORED, UNSUPPORTED

REF = "#/components/schemas/{name}"
SCHEMAS: tuple[type[msgspec.Struct], ...] = (
    chat.ChatRequest,
    completion.CompletionRequest,
    completion.GenerateRequest,
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
    answers.ChatCompletion,
    answers.ChatChunk,
    answers.Completion,
    answers.GenerateAnswer,
    answers.ModelList,
    answers.TokenizeAnswer,
    answers.DetokenizeAnswer,
    answers.Status,
    answers.Version,
    answers.ResetAnswer,
    answers.AuditAnswer,
    answers.ErrorBody,
)

DESCRIPTION = f"""An OpenAI-compatible server for large language models.

Errors of every route have one shape: `{{"error": {{"message", "type", "param", "code"}}}}`.

Ignored, because OpenAI's clients send them: {", ".join(f"`{name}`" for name in sorted(IGNORED))}.

Refused by name where a route lacks them: {", ".join(f"`{n}`" for n in sorted(UNSUPPORTED))}.
"""


def describe(
    tag: str,
    request: type[msgspec.Struct] | None,
    response: type[msgspec.Struct],
    example: dict[str, Any] | None = None,
    *,
    stream: type[msgspec.Struct] | None = None,
    path_parameters: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A route's part of the document. ``stream``: what each server-sent event holds."""
    content = {"application/json": {"schema": _ref(response)}}
    if stream is not None:
        content["text/event-stream"] = {"schema": _ref(stream)}
    operation: dict[str, Any] = {
        "tags": [tag],
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {
                "description": "An error",
                "content": {"application/json": {"schema": _ref(answers.ErrorBody)}},
            },
        },
    }
    if request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(request), "example": example or {}}},
        }
    if path_parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in path_parameters
        ]
    return operation


def install(app: FastAPI, *, with_keys: bool, root_path: str = "") -> None:
    """Make ``app.openapi()`` return the document, built once."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(
                title=app.title,
                version=app.version,
                description=app.description,
                routes=app.routes,
                servers=[{"url": root_path}] if root_path else None,
            )
            _, components = msgspec.json.schema_components(SCHEMAS, ref_template=REF)
            parts = built.setdefault("components", {})
            parts.setdefault("schemas", {}).update(components)
            if with_keys:
                parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                built["security"] = [{"key": []}]
            app.openapi_schema = built
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _ref(schema: type[msgspec.Struct]) -> dict[str, Any]:
    return {"$ref": REF.format(name=schema.__name__)}
