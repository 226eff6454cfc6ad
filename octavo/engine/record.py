"""Recording (``--trace-file``): what an engine was asked for, and what each step took.

One JSON object a line: lengths and times only, never ids or text; a tenant is a number that means
nothing elsewhere. ``octavo simulate`` reads it.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from types import NoneType
from typing import Any

from octavo.config.resolve import Config
from octavo.core.errors import StartupError
from octavo.core.plan import Delta, StepOutput, StepPlan
from octavo.core.request import Request

VERSION = 1
BUFFER_BYTES = 1 << 20

log = logging.getLogger("octavo.engine")


@dataclass
class Start:
    """An engine has started. What it can run at once; ``num_pages`` counts the null page."""

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool
    version: int = VERSION


@dataclass
class Step:
    """``start`` is when the step before was over or, if no request was left then, when this one was
    planned; ``seconds`` later this one was over. So they count all that the engine's thread did,
    and steps that were under way together share no time. See :mod:`octavo.core.steptime`."""

    start: float
    seconds: float
    prefill_tokens: int
    decode_rows: int
    context_tokens: int


@dataclass
class Ended:
    """A request that has ended. ``cached`` tokens of its prompt came out of the prefix cache;
    ``first`` is when its first token came, None if none did. Times are on the clock of the steps.
    """

    arrival: float
    prompt: int
    cached: int
    output: int
    max_tokens: int
    finish: str
    tenant: int
    priority: int
    first: float | None
    end: float


Entry = Start | Step | Ended
_KINDS: dict[str, type[Entry]] = {"start": Start, "step": Step, "request": Ended}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_TYPES = {
    "int": (int,),
    "float": (int, float),
    "float | None": (int, float, NoneType),
    "bool": (bool,),
    "str": (str,),
}
_LEAST = dict.fromkeys((*(field.name for field in fields(Start)), "prompt", "max_tokens"), 1) | {
    "num_pages": 2,
    "prefix_caching": 0,
    "priority": -(2**53),
}  # others 0
_MOST = 2**53


def to_line(entry: Entry) -> bytes:
    """Times to the microsecond."""
    values = {
        name: round(value, 6) if type(value) is float else value
        for name, value in vars(entry).items()
    }
    return json.dumps({"kind": _NAMES[type(entry)], **values}).encode() + b"\n"


def from_line(line: bytes) -> Entry:
    """Raises ValueError if it is none."""
    values: Any = json.loads(line)
    kind = _KINDS.get(values.pop("kind", None)) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError("it has no known kind")
    types = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    if values.keys() != types.keys():
        raise ValueError(f"it must have {', '.join(types)}")
    for name, value in values.items():
        in_range = not isinstance(value, int | float) or _LEAST.get(name, 0) <= value <= _MOST
        if type(value) not in types[name] or not in_range:
            raise ValueError(f"{name} cannot be {value!r:.40}")
    return kind(**values)


class Recorder:
    """Writes a recording, appending to ``path``. Times are seconds since it was opened at ``now``.

    It must be told of everything in the order in which it happens. A full disk ends the recording,
    not the engine. Raises :class:`StartupError` if the file cannot be written.
    """

    def __init__(self, path: Path, start: Start, now: float) -> None:
        try:
            self._file = path.open("ab", buffering=BUFFER_BYTES)
            self._file.write(to_line(start))
            self._file.flush()
        except OSError as error:
            raise StartupError(f"--trace-file: cannot write {path}: {error.strerror}.") from None
        self._origin = now
        self._live: dict[str, Ended] = {}
        self._salt = secrets.token_bytes(16)
        self._open: deque[Step] = deque()  # planned and not over, oldest first
        self._over: float | None = None  # when the latest step was, if requests were left then
        self._closed = False

    def submitted(self, request: Request, delta: Delta | None, now: float) -> None:
        """A request was taken; ``delta`` if it ended at once."""
        self._live[request.id] = Ended(
            arrival=now - self._origin,
            prompt=len(request.prompt),
            cached=0,
            output=len(request.generated),
            max_tokens=request.max_tokens,
            finish="",
            tenant=self._number(request.tenant),
            priority=request.priority,
            first=None,
            end=0.0,
        )
        if delta is not None:
            self.told([delta], now)

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step starts, perhaps while others are under way."""
        self._open.append(Step(now - self._origin, 0.0, *plan.size()))

    def applied(self, output: StepOutput, now: float) -> None:
        """The oldest step under way is over; its news."""
        step, since = self._open.popleft(), now - self._origin
        if self._over is not None:
            step.start = self._over
        step.seconds = since - step.start
        self._over = since
        self._write(to_line(step))
        for request_id in output.request_ids:
            if (entry := self._live.get(request_id)) is not None:
                entry.output += 1
        self.told(output.deltas, now)

    def told(self, deltas: list[Delta], now: float) -> None:
        """News of requests, in or outside of a step."""
        for delta in deltas:
            self._take(delta, now - self._origin)
        if not self._live and not self._open:
            self._over = None
            self.flush()

    def forget_all(self) -> None:
        """Requests and the steps under way came to nothing: nobody will hear of them."""
        self._live.clear()
        self._open.clear()
        self._over = None

    def flush(self) -> None:
        self._write(b"", flush=True)

    def close(self) -> None:
        self.flush()
        self._closed = True
        self._file.close()

    def _take(self, delta: Delta, since: float) -> None:
        entry = self._live.get(delta.id)
        if entry is None:
            return
        entry.cached += delta.cached_tokens or 0
        entry.output += len(delta.ids)
        if delta.ids and entry.first is None:
            entry.first = since
        if delta.finish is not None:
            entry.finish, entry.end = delta.finish, since
            del self._live[delta.id]
            self._write(to_line(entry))

    def _number(self, tenant: str) -> int:
        """Equal for equal tenants; nothing is kept for each, however many come."""
        digest = blake2b(tenant.encode(), digest_size=6, key=self._salt).digest()
        return int.from_bytes(digest)

    def _write(self, line: bytes, flush: bool = False) -> None:
        if self._closed:
            return
        try:
            self._file.write(line)
            if flush:
                self._file.flush()
        except OSError as error:
            log.error("The recording in %s ends here: %s", self._file.name, error.strerror)
            self._closed = True


def open_recorder(config: Config, now: float) -> Recorder | None:
    """What ``--trace-file`` asks for."""
    if config.trace_file is None:
        return None
    start = Start(
        num_pages=config.num_pages,
        page_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
    )
    return Recorder(Path(config.trace_file), start, now)


def read_recording(path: Path) -> Iterator[Entry]:
    """Entries of the latest recording in a file. Raises ValueError with the number of a bad line,
    OSError if the file cannot be read."""
    entries: list[Entry] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                entry = from_line(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break  # cut off when the engine died
                raise ValueError(f"line {number} is not part of a recording: {error}") from None
            if isinstance(entry, Start):
                entries.clear()
                if entry.version != VERSION:
                    raise ValueError(f"line {number} has version {entry.version}, not {VERSION}")
            entries.append(entry)
    if not entries or not isinstance(entries[0], Start):
        raise ValueError("it does not begin as a recording does")
    return iter(entries)
