"""KeyGuard: every route needs a key, except a short public list."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.core.errors import Unauthorized
from octavo.server.errors import error_response

PUBLIC_PATHS = frozenset({"/live", "/health", "/ready", "/ping", "/version"})


class KeyGuard:
    """Pure ASGI. A path is public only if it is, byte for byte, in :data:`PUBLIC_PATHS`.

    Routes learn which key was given, by its place in the list: see :func:`tenant_of`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (
            scope["type"] == "http" and (scope["path"] in PUBLIC_PATHS or self._admits(scope))
        ):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            error = Unauthorized(
                "A valid key is needed: send the header 'Authorization: Bearer <key>'.",
                code="invalid_api_key",
            )
            await error_response(error)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _admits(self, scope: Scope) -> bool:
        place = self._place(scope)
        if place is None:
            return False
        scope.setdefault("state", {})["tenant"] = f"key-{place}"
        return True

    def _place(self, scope: Scope) -> int | None:
        """Exactly one Authorization header, scheme Bearer, and one of the keys.

        Digests have one length and all are compared, so time tells nothing about a key.
        """
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:
            return None
        scheme, _, key = values[0].partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            return None
        given = _digest(key)
        equal = [hmac.compare_digest(given, digest) for digest in self._digests]
        return equal.index(True) if any(equal) else None


def tenant_of(request: Request) -> str:
    """Whom the request's work is charged to: "key-0" for the first key; "" if no key is needed."""
    return str(request.scope.get("state", {}).get("tenant", ""))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
