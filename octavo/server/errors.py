"""Errors as HTTP: one body shape on every route, the status from the error's class."""

from __future__ import annotations

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from octavo.core.errors import (
    CallerError,
    EngineFault,
    EngineUnavailable,
    OctavoError,
    Overloaded,
    QueueTimeout,
    Unauthorized,
)
from octavo.server.schemas.answers import ErrorBody, ErrorDetail

log = logging.getLogger("octavo.server")
RETRY_AFTER_SECONDS = b"1"


class RouteNotFound(CallerError):
    status = 404
    type = "not_found_error"


class MethodNotAllowed(CallerError):
    status = 405


class BodyTimeout(CallerError):
    """The body did not arrive in time."""

    status = 408


class ClientGone(Exception):
    """The client hung up: there is nobody to answer."""


def encode_error(error: OctavoError) -> bytes:
    """The JSON of an error. ``code`` is the error's own, else its HTTP status."""
    detail = ErrorDetail(error.message, error.type, error.param, error.code or error.status)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(error: OctavoError) -> Response:
    response = Response(encode_error(error), error.status, media_type="application/json")
    if isinstance(error, Unauthorized):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, Overloaded | EngineUnavailable | QueueTimeout):
        response.headers["retry-after"] = RETRY_AFTER_SECONDS.decode()
    if isinstance(error, BodyTimeout):  # what may still come belongs to the refused request
        response.headers["connection"] = "close"
    return response


def as_octavo_error(error: Exception) -> OctavoError:
    """Anything raised below, as an error that may be shown; the unforeseen goes to the log."""
    if isinstance(error, OctavoError):
        return error
    log.error("Unexpected error while serving a request.", exc_info=error)
    return EngineFault("Internal error; the server's log has the details.")


async def on_octavo_error(request: Request, error: Exception) -> Response:
    return error_response(as_octavo_error(error))


async def on_http_error(request: Request, error: Exception) -> Response:
    """The router's own errors: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = _methods(request)
        use = " or ".join(allowed)
        response = error_response(MethodNotAllowed(f"{where} is not allowed; use {use}."))
        response.headers["allow"] = ", ".join(allowed)
        return response
    if error.status_code == 404:
        return error_response(RouteNotFound(f"There is no route {where}."))
    failure = CallerError(str(error.detail))
    failure.status = error.status_code
    return error_response(failure)


def _methods(request: Request) -> list[str]:
    """Those of all routes of the path: the router's own error names the first route's only."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


async def on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # never seen by anyone but the access log
