"""Ids into text as they come: whole characters only, and nothing of a stop string.

The text of a choice does not depend on how its ids were cut into deltas: the pieces of
all chunks together are ``Tokenizer.decode`` of all ids, up to the stop string; where they continue
a text, what that decode adds to the text's own.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from octavo.core.errors import InvalidRequest
from octavo.core.plan import Delta, FinishReason, TokenLogprobs
from octavo.text.tokenizer import Tokenizer

MAX_STOP_CHARS = 8_192  # of all stop strings of a request together

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(slots=True)
class Chunk:
    """News of one choice for its client, text included.

    ``ids`` are all new ids, also those whose text is held back, skipped or cut; the last is the
    one that completes a stop string, if one is found.
    ``stop_reason`` is the stop string, or the stop id unless that is an EOS of the tokenizer.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None


class StopMatcher:
    """Finds the stop string that ends first, one character at a time (Aho and Corasick 1975).

    A state is the longest end of the text so far that begins some stop; ``depth`` is its
    length, and ``match`` the length of the longest stop that ends there (0: none). Immutable,
    so that all choices of a request share one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match = [0]
        self.fail = [0]
        for stop in stops:
            self.match[self._add(stop)] = len(stop)
        self.first_chars = frozenset(self.next[0])
        self._link()

    def _add(self, stop: str) -> int:
        state = 0
        for char in stop:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
                self.fail.append(0)
            state = self.next[state][char]
        return state

    def _link(self) -> None:
        """Breadth first: a state's fail link is always shorter than the state."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        while char not in self.next[state]:
            if state == 0:
                return 0
            state = self.fail[state]
        return self.next[state][char]


@lru_cache(maxsize=16)
def _matcher(stops: tuple[str, ...]) -> StopMatcher:
    total = sum(map(len, stops))
    if total > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"stop may hold at most {MAX_STOP_CHARS} characters in all, not {total}.", param="stop"
        )
    return StopMatcher(stops)


class TextStream:
    """One choice: deltas in, chunks out, until a chunk has ``finish`` set.

    The stop that ends first wins, the longer one if two end together. Without
    ``include_stop`` the text ends before it; what ends up held back, because it might
    have become a stop, comes with the last chunk. A stop string that is complete
    within the first ``min_tokens`` tokens does not count.

    The text of a stop token (EOS or one of stop_token_ids) is left out, unless
    ``include_stop``; a special one is then still left out if ``skip_special``.

    ``continues``: a text precedes it, so a first space is text too. SentencePiece writes one before
    the first word of a text, which decoding drops.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = tokenizer.whole_texts(skip_special=skip_special)
        self._num_texts = len(self._texts)
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _Utf8Decoder("replace")
        self._in_character = False  # the decoder holds bytes of an unfinished character
        self._at_start = tokenizer.strips_first_space and not continues
        self._matcher = _matcher(tuple(stops)) if stops else None
        self._state = 0
        self._held = ""  # its length is the state's depth
        self._include_stop = include_stop
        self._tokens_to_go = min_tokens  # before stop strings count
        self._is_simple = not stops and not self._at_start

    def push(self, delta: Delta) -> Chunk:
        """The chunk for a delta; ``finish`` is "stop" if a stop string was found."""
        ids = delta.ids
        if self._is_simple and len(ids) == 1 and delta.finish is None and not self._in_character:
            id = ids[0]
            text = self._texts[id] if id < self._num_texts else ""
            if text is None:
                text = self._decode(id)
            found = None
        else:
            text, found, count = self._advance(delta)
            if count < len(ids):  # what follows a stop string is not part of the answer
                ids = ids[:count]
        chunk = Chunk(
            text,
            ids,
            delta.logprobs if len(ids) == len(delta.ids) else delta.logprobs[: len(ids)],
            delta.prompt_logprobs,
            delta.finish,
            None,
            delta.cached_tokens,
        )
        if found is not None and delta.finish != "error":
            chunk.finish, chunk.stop_reason = "stop", found
        elif delta.stop_id is not None and delta.stop_id not in self._tokenizer.eos_ids:
            chunk.stop_reason = delta.stop_id
        return chunk

    def _advance(self, delta: Delta) -> tuple[str, str | None, int]:
        """(text to release, stop string found, number of ids until then)."""
        ids = delta.ids
        if delta.stop_id is not None and not self._include_stop:
            ids = ids[:-1]
        released = []
        for i, id in enumerate(ids, 1):
            text, found = self._release(self._decode(id))
            released.append(text)
            if found is not None:
                return "".join(released), found, i
        if delta.finish is None:
            return "".join(released), None, len(delta.ids)
        text, found = self._release(self._decoder.decode(b"", final=True))
        released.append(text)
        if found is None:
            released.append(self._held)
            self._held = ""
        return "".join(released), found, len(delta.ids)

    def _decode(self, id: int) -> str:
        """The characters that a token completes."""
        if not self._in_character:
            text = self._texts[id] if id < self._num_texts else ""
        else:
            text = None
        if text is None:
            data = b"" if id in self._skipped else self._tokenizer.token_bytes(id)
            text = self._decoder.decode(data)
            self._in_character = bool(self._decoder.getstate()[0])
        if self._at_start and text:
            self._at_start = False
            self._is_simple = self._matcher is None
            text = text.removeprefix(" ")
        return text

    def _release(self, text: str) -> tuple[str, str | None]:
        """What of ``held + text`` can go out, and the stop string that it completes, if any."""
        if self._matcher is None:
            return text, None
        matcher, state = self._matcher, self._state
        self._tokens_to_go -= 1
        if state == 0 and matcher.first_chars.isdisjoint(text):
            return text, None
        known = self._held + text
        for i, char in enumerate(text, len(self._held) + 1):
            state = matcher.step(state, char)
            length = matcher.match[state]
            if length:
                if self._tokens_to_go < 0:
                    stop = known[i - length : i]
                    self._held, self._state = "", 0
                    return known[: i if self._include_stop else i - length], stop
                while matcher.match[state]:
                    state = matcher.fail[state]
        kept = matcher.depth[state]
        self._state = state
        self._held = known[len(known) - kept :]
        return known[: len(known) - kept], None
