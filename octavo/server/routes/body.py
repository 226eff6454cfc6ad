"""Reading a request's body, and writing an answer."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.core.errors import InvalidRequest
from octavo.server.context import Context
from octavo.server.errors import BodyTimeout, ClientGone
from octavo.server.schemas.fields import parse

T = TypeVar("T", bound=msgspec.Struct)


async def read(request: Request, schema: type[T], context: Context) -> T:
    """The body as ``schema``. Raises :class:`CallerError` with one sentence."""
    _check_content_type(request)
    limit_s = context.settings.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            body = await request.body()
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {limit_s:g} s.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return parse(body, schema)


def _check_content_type(request: Request) -> None:
    """JSON only. A browser can send other types across origins without asking first, and they
    always name their origin; a plain script that names no type is taken at its word."""
    given = request.headers.get("content-type")
    if given is None and "origin" not in request.headers:
        return
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise InvalidRequest(
            f"Content-Type must be application/json, not {given!r}.", param="Content-Type"
        )


def answer(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
