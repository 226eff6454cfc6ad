"""/v1/models."""

from __future__ import annotations

import time

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Context
from octavo.server.errors import RouteNotFound
from octavo.server.generation import serving_name
from octavo.server.openapi import describe
from octavo.server.routes.body import answer
from octavo.server.schemas.answers import ModelCard, ModelList


def model_routes(app: FastAPI, context: Context) -> None:
    created = int(time.time())

    def card(name: str) -> ModelCard:
        context.gate.check(context.service.health())  # the length is known once an engine is
        service = context.service
        return ModelCard(
            name,
            created,
            service.limits.max_model_len,
            root=context.settings.model_names[0],
            device=service.info.device,
            dtype=service.info.dtype,
        )

    @app.get(
        "/v1/models",
        summary="List the served models",
        openapi_extra=describe("Models", None, ModelList),
    )
    async def models() -> Response:
        """Every name that ``model`` may have in a request."""
        return answer(ModelList([card(name) for name in context.settings.model_names]))

    @app.get(
        "/v1/models/{model:path}",
        summary="One served model",
        openapi_extra=describe("Models", None, ModelCard, path_parameters=("model",)),
    )
    async def model(request: Request) -> Response:
        name = request.path_params["model"]
        if not name:
            raise RouteNotFound(f"There is no route GET {request.url.path}.")
        return answer(card(serving_name(name, context)))
