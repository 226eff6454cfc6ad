"""What the Python API returns: shaped like vLLM's, so that a script changes only its import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.core.plan import TokenLogprobs
from octavo.text.stream import Chunk


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the n choices. ``finish_reason`` is None while it is still being generated."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """Everything known of one prompt. ``prompt_logprobs[0]`` is None: nothing precedes it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int | None = None

    def add(self, index: int, chunk: Chunk, token_text: Callable[[int], str | None]) -> None:
        """Take in a choice's next chunk."""
        choice = self.outputs[index]
        choice.text += chunk.text
        choice.token_ids += chunk.ids
        if chunk.logprobs:
            choice.logprobs = choice.logprobs or []
            choice.logprobs += [logprob_dict(entry, token_text) for entry in chunk.logprobs]
            gained = sum(entry.values[0] for entry in chunk.logprobs)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + gained
        if chunk.prompt_logprobs and index == 0:
            self.prompt_logprobs = self.prompt_logprobs or [None]
            self.prompt_logprobs += [logprob_dict(e, token_text) for e in chunk.prompt_logprobs]
        if chunk.cached_tokens is not None and index == 0:
            self.num_cached_tokens = chunk.cached_tokens
        if chunk.finish is not None:
            choice.finish_reason = chunk.finish
            choice.stop_reason = chunk.stop_reason
            self.finished = all(output.finish_reason for output in self.outputs)

    def snapshot(self) -> RequestOutput:
        """This moment's state; what comes later does not change it."""
        choices = [
            replace(
                choice,
                token_ids=list(choice.token_ids),
                logprobs=None if choice.logprobs is None else list(choice.logprobs),
            )
            for choice in self.outputs
        ]
        return replace(self, outputs=choices)


def logprob_dict(
    entry: TokenLogprobs, token_text: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """The token itself first, then the most probable ones, keyed by id."""
    ranks = [entry.rank, *range(1, len(entry.ids))]
    found: dict[int, Logprob] = {}
    for token, value, rank in zip(entry.ids, entry.values, ranks, strict=True):
        found.setdefault(token, Logprob(value, rank, token_text(token)))
    return found
