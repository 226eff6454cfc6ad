"""Everything that can go wrong, in two branches: the caller's fault and ours.

    OctavoError
    ├── CallerError            the request is at fault: the caller can fix it (4xx)
    │   ├── InvalidRequest         a field, its limit and the value given          400
    │   │   └── ContextLengthExceeded  prompt (+ max_tokens) does not fit           400
    │   ├── Unauthorized           no key, or a wrong one                          401
    │   ├── ModelNotFound          no such model is served here                    404
    │   ├── BodyTooLarge           the request body is over its limit              413
    │   └── Overloaded             a queue limit is reached; try again later       429
    └── ServerError            we are at fault (5xx)
        ├── EngineFault            a step failed, or one row of it did             500
        ├── EngineUnavailable      no engine serves right now                      503
        └── RequestTimeout         its time was over before the first token        504
            └── QueueTimeout           it had not even started                     503

    StartupError               the server cannot start; one sentence says what to do

The HTTP status follows from the class, never from the text. A message is one
sentence that names the field, the limit and the value given.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class CallerError(OctavoError):
    """The request cannot be served as it is; the message says what to change."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(CallerError, ValueError):
    """One field is out of its range, unknown, or in conflict with another."""


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and what is asked for, exceeds the context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class Unauthorized(CallerError):
    status = 401
    type = "authentication_error"


class ModelNotFound(CallerError):
    status = 404
    type = "not_found_error"


class BodyTooLarge(CallerError):
    status = 413


class Overloaded(CallerError):
    status = 429
    type = "overloaded_error"


class ServerError(OctavoError):
    """Octavo failed; the request may be fine."""


class EngineFault(ServerError):
    """A step, or one request in it, failed (``code`` says which kind)."""


class EngineUnavailable(ServerError):
    status = 503
    type = "unavailable_error"


class RequestTimeout(ServerError):
    """The request's time was over before its first token."""

    status = 504
    type = "timeout_error"


class QueueTimeout(RequestTimeout):
    """The request waited for too long, and nothing was computed for it."""

    status = 503


class StartupError(Exception):
    """The server cannot start. The message is the last line a person sees."""


class AuditError(AssertionError):
    """Pages or slots are not conserved: a bug in Octavo, never the caller's."""
