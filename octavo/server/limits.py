"""RootPath, BodyLimit and RequestId: pure ASGI classes around the routes."""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.errors import BodyTooLarge, InvalidRequest
from octavo.server.errors import error_response

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RootPath:
    """Takes the path under which a proxy shows the server off the request's, once and for all.

    Whether the proxy left it there or not, everything inside compares plain paths.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self.root_path or path.startswith(self.root_path + "/"):
            scope = {**scope, "path": path.removeprefix(self.root_path) or "/"}
        await self.app(scope, receive, send)


class BodyLimit:
    """Refuses bodies over ``max_bytes``, announced or chunked, and compressed ones.

    A compressed body may unfold without bound, so no Content-Encoding is taken.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            self._check_headers(scope)
        except (BodyTooLarge, InvalidRequest) as error:
            await error_response(error)(scope, receive, send)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.max_bytes:
                    raise self._too_large(f"more than {self.max_bytes}")
            return message

        await self.app(scope, limited_receive, send)

    def _check_headers(self, scope: Scope) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self.max_bytes:
                raise self._too_large(value.decode())
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                shown = value.decode("latin-1")
                raise InvalidRequest(
                    f"Content-Encoding {shown!r} is not accepted; send the body uncompressed.",
                    param="Content-Encoding",
                )

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"The request body may have at most {self.max_bytes} bytes, not {size}.",
            code="body_too_large",
        )


class RequestId:
    """Gives each request an id, the caller's if it is well formed, and echoes it in a header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"").decode(
            "latin-1"
        )
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self.app(scope, receive, send_with_id)
