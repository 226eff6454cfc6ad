"""Log-probabilities in the shapes of the two OpenAI schemas and of vLLM's prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.core.plan import TokenLogprobs
from octavo.server.schemas.answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TopLogprob,
)
from octavo.text.stream import Chunk
from octavo.text.tokenizer import Tokenizer

FLOOR = -9999.0  # OpenAI's documented value for "impossible"; JSON has no -Infinity


def visible(chunk: Chunk, *, include_stop: bool) -> list[TokenLogprobs]:
    """A chunk's entries without that of the stop token, whose text is not in the answer."""
    ended_by_token = chunk.finish == "stop" and not isinstance(chunk.stop_reason, str)
    return chunk.logprobs[:-1] if ended_by_token and not include_stop else chunk.logprobs


def best(entries: Iterable[TokenLogprobs], num_top: int | None) -> list[TokenLogprobs]:
    """``entries`` with at most ``num_top`` alternatives each."""
    end = 1 + (num_top or 0)
    return [TokenLogprobs(e.ids[:end], e.values[:end], e.rank) for e in entries]


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                *_token(entry.ids[0], entry.values[0], tokenizer),
                [
                    TopLogprob(*_token(i, value, tokenizer))
                    for i, value in zip(entry.ids[1:], entry.values[1:], strict=True)
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> PromptLogprobList:
    """``entries`` start at position 1; position 0 has none."""
    return [None, *(_by_id(entry, tokenizer) for entry in entries)]


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    ranks = [entry.rank, *range(1, len(entry.ids))]
    shown: dict[str, PromptLogprob] = {}
    for token, value, rank in zip(entry.ids, entry.values, ranks, strict=True):
        shown.setdefault(
            str(token), PromptLogprob(_finite(value), rank, tokenizer.token_text(token))
        )
    return shown


class CompletionLogprobWriter:
    """The legacy schema's four lists, kept in step over the chunks of one choice.

    ``continues``: the text written goes on with one that is not written.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._unwritten = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters written before the next token
        self._at_start = tokenizer.strips_first_space and not continues

    def write(self, entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._add(lists, entry.ids[0], _finite(entry.values[0]), self._top(entry))
        return lists

    def write_prompt(self, ids: list[int], entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """The echoed prompt: nothing precedes its first token, so that has null."""
        lists = CompletionLogprobs([], [], [], [])
        self._add(lists, ids[0], None, None)
        for entry in entries:
            self._add(lists, entry.ids[0], _finite(entry.values[0]), self._top(entry))
        return lists

    def _add(
        self,
        lists: CompletionLogprobs,
        token: int,
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        lists.tokens.append(_legacy_text(self._tokenizer.token_bytes(token)))
        lists.token_logprobs.append(logprob)
        lists.top_logprobs.append(top)
        lists.text_offset.append(self._offset)
        if token in self._unwritten:
            return
        text = self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        self._offset += len(text)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The best tokens, and the token itself if it is not among them."""
        order = [*range(1, len(entry.ids)), 0]
        shown: dict[str, float] = {}
        for k in order:
            text = _legacy_text(self._tokenizer.token_bytes(entry.ids[k]))
            shown.setdefault(text, _finite(entry.values[k]))
        return shown


def join(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


def _token(token: int, value: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token), _finite(value), list(tokenizer.token_bytes(token))


def _legacy_text(data: bytes) -> str:
    """A token's text; parts of characters are spelt out, so that they stay distinct keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """At least :data:`FLOOR`; NaN counts as impossible."""
    return value if value > FLOOR else FLOOR
