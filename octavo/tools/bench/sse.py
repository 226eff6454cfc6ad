"""The answer to one streamed request, read event by event as its bytes arrive."""

from __future__ import annotations

from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Counts what arrives. ``stamps``: when each event with output was read, in seconds; events of
    one read share a time. ``usage``: (prompt, output) tokens as the server counts them.
    """

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.usage: tuple[int, int] | None = None
        self.finished = False  # a finish reason or [DONE] was seen
        self.error: str | None = None
        self._rest = b""

    def feed(self, body: bytes, now: float) -> None:
        """Take in bytes that were read at ``now``; lines may be cut anywhere."""
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError:
            self.error = "an event that is not a completion"
            return
        if event.error is not None:
            self.error = f"an error event: {error_message(event.error)}"
        if event.usage is not None:
            self.usage = event.usage.prompt_tokens, event.usage.completion_tokens
        for choice in event.choices:
            ended = choice.finish_reason is not None
            self.finished |= ended
            if has_output(choice) or (ended and not self.stamps):
                self.stamps.append(now)


def has_output(choice: _Choice) -> bool:
    """True if a token stands behind the event. An empty text counts, since its token may wait for
    the rest of a character; a role or a finish reason alone does not."""
    ended = choice.finish_reason is not None
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or (choice.text == "" and not ended)
    if delta.content or delta.reasoning_content or delta.tool_calls is not None:
        return True
    return delta.content == "" and delta.role is None and not ended


def error_message(error: Any) -> str:
    """The message in OpenAI's error object, or what else there is, in at most 100 characters."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:100]
