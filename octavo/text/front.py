"""TextFront: the slow text work of a front, off the event loop and bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from octavo.core.errors import ContextLengthExceeded, InvalidRequest
from octavo.core.sampling import SamplingParams
from octavo.text.chat import NO_TEMPLATE, ChatTemplate
from octavo.text.stream import TextStream
from octavo.text.tokenizer import Tokenizer

MAX_BAD_WORDS = 1024
THREADS = 4

T = TypeVar("T")


class TextFront:
    """Tokenizer and chat template of one model.

    Each ``…_now`` method is the work itself; its async twin runs it on one of ``threads``
    threads (tokenizers releases the GIL). No text longer than ``max_chars`` is tokenized.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        max_model_len: int,
        threads: int = THREADS,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="octavo-text")

    @property
    def max_chars(self) -> int:
        """What the context can hold if every token were the longest one."""
        return self.max_model_len * self.tokenizer.max_token_chars

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return await self.run(lambda: self.encode_now(text, add_special=add_special))

    def encode_now(self, text: str, *, add_special: bool = True) -> list[int]:
        """Raises :class:`ContextLengthExceeded` for a text that cannot fit."""
        if len(text) > self.max_chars:
            raise ContextLengthExceeded(
                f"The prompt has {len(text)} characters; at most {self.max_chars} can fit in the "
                f"context of {self.max_model_len} tokens.",
                param="prompt",
            )
        return self.tokenizer.encode(text, add_special=add_special)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return await self.run(
            lambda: self.render_now(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=kwargs,
            )
        )

    def render_now(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a chat. BOS is the template's business: none is added here."""
        if self.template is None:
            raise InvalidRequest(NO_TEMPLATE, param="messages")
        text = self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
            max_chars=self.max_chars,
        )
        return self.tokenizer.encode(text, add_special=False)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences to ban: each word as at the start of a text and after a space."""
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words may hold at most {MAX_BAD_WORDS} words, not {len(words)}.",
                param="bad_words",
            )
        total = sum(map(len, words))
        if total > self.max_chars:
            raise InvalidRequest(
                f"bad_words may hold at most {self.max_chars} characters in all, not {total}.",
                param="bad_words",
            )
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self.tokenizer.encode(word.lstrip(), add_special=False))
            spaced = tuple(self.tokenizer.encode(" " + word.lstrip(), add_special=False))
            if not plain:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens.", param="bad_words")
            found[plain] = None
            if spaced[-len(plain) :] != plain:  # else the plain form bans both
                found[spaced] = None
        return tuple(found)

    def open_stream(self, params: SamplingParams, prompt: Sequence[int] = ()) -> TextStream:
        """One for each choice of a request."""
        return TextStream(
            self.tokenizer,
            stops=params.stops,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            continues=self.continues(prompt),
        )

    def continues(self, prompt: Sequence[int]) -> bool:
        """Whether an answer goes on with a text: not after a special token, as a chat's header."""
        return bool(prompt) and prompt[-1] not in self.tokenizer.special_ids

    async def warm_up(self) -> None:
        """Do everything once that is slow the first time, so that no request pays for it."""
        await self.run(self.warm_up_now)

    def warm_up_now(self) -> None:
        for skip_special in (True, False):
            self.tokenizer.whole_texts(skip_special=skip_special)
        self.encode_now("Hello, world")
        if self.template is not None:
            # A template may want other messages; then each request is told so.
            with contextlib.suppress(InvalidRequest):
                self.render_now([{"role": "user", "content": "Hello"}])

    async def run(self, work: Callable[[], T]) -> T:
        """``work()``, on one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
