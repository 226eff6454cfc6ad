"""Who answers a chat: a server over HTTP, or a model in this process."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from octavo.config.load import OptionError
from octavo.config.options import Options
from octavo.core.errors import CallerError, ServerError, StartupError
from octavo.tools.local import engine_arguments

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput

Message = dict[str, str]
CONNECT_TIMEOUT_S = 10.0
_BROKEN = (OSError, http.client.HTTPException, ValueError)  # what reading an answer may raise


class Talker(Protocol):
    """``answer`` yields pieces of text; closing it early ends the generation. ``num_tokens``: of
    the last answer. Raises :class:`OctavoError` where the conversation can go on, and
    :class:`StartupError` where nobody answers."""

    name: str
    num_tokens: int

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]: ...

    def close(self) -> None: ...


class ServerTalker:
    """A server that speaks OpenAI's protocol. ``sampling`` goes into each request as it is."""

    def __init__(
        self, url: str, sampling: dict[str, Any], model: str | None = None, key: str | None = None
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"--url must be http://HOST:PORT, not {url!r}.")
        self._url = url
        self._parts = parts
        self._sampling = sampling
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.num_tokens = 0
        self.name = model or self._first_model()

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | self._sampling
        connection = self._connect()
        try:
            self.num_tokens = 0
            reply = self._ask(connection, "POST", "/v1/chat/completions", body)
            if reply.status != 200:
                raise CallerError(_refusal(reply.status, reply.read()))
            if connection.sock is not None:
                connection.sock.settimeout(None)  # a model may think as long as it likes
            yield from self._texts(reply)
        except _BROKEN as error:
            raise ServerError(
                f"The answer of {self._url} broke off ({error or type(error).__name__})."
            ) from None
        finally:
            connection.close()

    def _texts(self, reply: http.client.HTTPResponse) -> Iterator[str]:
        for event in events(reply):
            if event.get("error"):
                raise ServerError(str(event["error"].get("message", event["error"])))
            if event.get("usage"):
                self.num_tokens = event["usage"].get("completion_tokens", self.num_tokens)
            for choice in event.get("choices", ()):
                if text := choice.get("delta", {}).get("content"):
                    self.num_tokens += 1  # until the server says better
                    yield text

    def close(self) -> None:
        """Every answer has its own connection: nothing is open."""

    def _first_model(self) -> str:
        connection = self._connect()
        try:
            reply = self._ask(connection, "GET", "/v1/models")
            content = reply.read()
        finally:
            connection.close()
        if reply.status != 200:
            raise StartupError(f"{self._url} says: {_refusal(reply.status, content)}")
        try:
            return str(json.loads(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise StartupError(f"{self._url}/v1/models names no model.") from None

    def _connect(self) -> http.client.HTTPConnection:
        parts = self._parts
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                parts.netloc, timeout=CONNECT_TIMEOUT_S, context=context
            )
        return http.client.HTTPConnection(parts.netloc, timeout=CONNECT_TIMEOUT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, content, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or error or type(error).__name__
            raise StartupError(
                f"No server answers at {self._url} ({reason}). Start one with "
                "octavo serve, give another --url, or chat with a model in this process: "
                "octavo chat MODEL."
            ) from None


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of server-sent events, up to [DONE]. Raises ValueError for other data, and
    at an end without it."""
    for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("an event is no object")
            yield event
    raise ValueError("the stream ended early")


class ModelTalker:
    """A model in this process. ``sampling``: keywords of SamplingParams, over the model's own."""

    def __init__(self, options: Options, sampling: dict[str, Any]) -> None:
        from octavo.core.sampling import SamplingParams
        from octavo.engine.aio import AsyncLLM
        from octavo.engine.startup import sampling_defaults

        self._llm = AsyncLLM(**{"disable_log_stats": True} | engine_arguments(options))
        given = {"max_tokens": None} | sampling_defaults(self._llm.config) | sampling
        self._params = SamplingParams(**given)
        self.name = self._llm.config.served_model_name[0]
        self.num_tokens = 0
        self._runner = asyncio.Runner()
        self._runner.run(self._llm.start())

    def answer(self, messages: Sequence[Message]) -> Generator[str, None, None]:
        outputs = self._llm.chat(list(messages), self._params)
        shown = 0
        try:
            while (output := self._runner.run(_next(outputs))) is not None:
                choice = output.outputs[0]
                self.num_tokens = len(choice.token_ids)
                if len(choice.text) > shown:
                    yield choice.text[shown:]
                    shown = len(choice.text)
        finally:
            self._runner.run(_end(outputs))

    def close(self) -> None:
        self._runner.run(self._llm.close())
        self._runner.close()


async def _next(outputs: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(outputs, None)


async def _end(outputs: Any) -> None:
    """Close an async generator; one that an interrupt has ended stays as it is."""
    await outputs.aclose()


def _refusal(status: int, content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}."
