"""build_app: the HTTP side of a service, put together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo.core.errors import OctavoError
from octavo.engine.service import Service
from octavo.server import errors, openapi
from octavo.server.auth import KeyGuard
from octavo.server.context import Context
from octavo.server.docs import docs_route
from octavo.server.gate import Admission, Gate
from octavo.server.limits import BodyLimit, RequestId, RootPath
from octavo.server.metrics import Metrics
from octavo.server.routes.admin import admin_routes, probe_routes
from octavo.server.routes.chat import chat_routes
from octavo.server.routes.completions import completion_routes
from octavo.server.routes.models import model_routes
from octavo.server.routes.tokens import token_routes
from octavo.server.settings import ServerSettings

ROUTES = (
    chat_routes,
    completion_routes,
    model_routes,
    token_routes,
    probe_routes,
    admin_routes,
)


def build_app(service: Service, settings: ServerSettings, gate: Gate | None = None) -> FastAPI:
    """The app. It may serve before ``service.start()`` has returned: probes say so, and requests
    get 503. ``gate`` is the drain and permit state, for who has to shut the server down."""
    context = Context(
        service,
        settings,
        gate or Gate(settings.max_concurrent_requests, settings.max_waiting_requests),
        Metrics(settings.model_names[0]),
    )
    app = FastAPI(
        title="Octavo",
        version=settings.version,
        description=openapi.DESCRIPTION,
        docs_url=None,  # FastAPI's page needs scripts from elsewhere
        openapi_url="/openapi.json" if settings.enable_docs else None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would answer before the key is checked
    )
    for add_routes in ROUTES:
        add_routes(app, context)
    if settings.enable_docs:
        docs_route(app, settings.root_path)
    openapi.install(app, with_keys=bool(settings.api_keys), root_path=settings.root_path)
    _add_error_handlers(app)
    _wrap(app, context)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(OctavoError, errors.on_octavo_error)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(errors.ClientGone, errors.on_client_gone)
    app.add_exception_handler(Exception, errors.on_octavo_error)


def _wrap(app: FastAPI, context: Context) -> None:
    """The last one added is the outermost: the plain path, an id, then CORS, then the
    key."""
    settings = context.settings
    app.add_middleware(Admission, gate=context.gate, health=context.service.health)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(KeyGuard, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestId)
    if settings.root_path:
        app.add_middleware(RootPath, root_path=settings.root_path)
