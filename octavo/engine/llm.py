"""LLM: the offline engine. Prompts in, outputs out, in this process, without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.core.errors import EngineFault, InvalidRequest
from octavo.core.plan import Delta
from octavo.core.sampling import SamplingParams
from octavo.core.terms import Terms
from octavo.core.validation import make_requests
from octavo.engine.build import build_engine
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.engine.prompts import Prompt, Prompts, as_list, each, params_for, salt_of, split
from octavo.engine.service import draw_seed
from octavo.engine.stagebar import StageBar
from octavo.engine.startup import (
    build_text,
    load_config,
    request_limits,
    sampling_defaults,
)
from octavo.text.stream import Chunk, TextStream

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model and generates with it. Options are those of ``octavo serve``, with underscores:
    ``LLM("org/name", max_model_len=4096, dtype="float32")``; without a model, the embedded one.

    Unlike the server, it takes a request that asks for more than the context has room for: it ends
    with reason "length" when the context is full. With ``skip_tokenizer_init`` prompts and outputs
    are token ids.
    """

    def __init__(
        self, model: str | None = None, *, skip_tokenizer_init: bool = False, **options: Any
    ) -> None:
        self.config = load_config(model, options)
        with StageBar() as bar:
            self._loop, self.info = build_engine(self.config, bar.show)
        self.text = None if skip_tokenizer_init else build_text(self.config)
        self.limits = request_limits(self.config, self.text, self.info)
        self._defaults = sampling_defaults(self.config)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Any:
        return None if self.text is None else self.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What :meth:`generate` uses without parameters: the model's generation config."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts (texts, token-id lists or {"prompt_token_ids": …}).

        ``priority`` (lower runs first) and ``tenant`` are for all prompts or one each, and count
        under the scheduling policies of their names. After ``timeout`` seconds a prompt's output
        ends as it is, with finish reason "timeout".
        Raises :class:`InvalidRequest` before anything runs if one prompt cannot be served.
        """
        items = as_list(prompts)
        batch = _Batch(self)
        default = self.get_default_sampling_params()
        chosen = params_for(sampling_params, default, len(items))
        priorities = each("priority", priority, len(items))
        tenants = each("tenant", tenant, len(items))
        for prompt, params, level, name in zip(items, chosen, priorities, tenants, strict=True):
            batch.add(prompt, params, Terms(level, name, timeout, salt_of(prompt)))
        return batch.run(use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or a list of them.

        Without ``sampling_params`` an answer may be as long as the context allows.
        """
        if self.text is None:
            raise InvalidRequest("This model was loaded without a tokenizer: chat needs one.")
        text = self.text
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        prompts = [
            text.render_now(
                list(conversation),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        params = sampling_params or SamplingParams(**{"max_tokens": None, **self._defaults})
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def audit(self) -> None:
        """Raise AuditError unless pages and slots add up."""
        self._loop.scheduler.audit()

    def close(self) -> None:
        """Give the engine's resources back; the object cannot be used afterwards."""
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Batch:
    """One call of generate: its requests, their text streams, its progress bar."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        # Alone, a request's pages are hashed as it is admitted, while a device computes others.
        self._limits_alone = replace(llm.limits, prefix_caching=False)
        self._outputs: list[RequestOutput] = []
        self._requests: list[Any] = []
        self._streams: dict[str, tuple[RequestOutput, int, TextStream | None]] = {}

    def add(self, prompt: Prompt, params: SamplingParams, terms: Terms) -> None:
        llm = self._llm
        text, ids = split(prompt)
        if ids is None:
            ids = self._encode(text or "")
        request_id = str(next(llm._ids))
        bad_words = llm.text.bad_word_ids(params.bad_words or ()) if llm.text is not None else ()
        limits = self._limits_alone if params.n == 1 else llm.limits
        requests = make_requests(
            request_id, ids, params, limits, terms, bad_words=bad_words,
            draw_seed=draw_seed, until_full=True,
        )  # fmt: skip
        output = RequestOutput(
            request_id, text, ids, [CompletionOutput(i) for i in range(len(requests))]
        )
        self._outputs.append(output)
        self._requests += requests
        for index, request in enumerate(requests):
            stream = None if llm.text is None else llm.text.open_stream(params, ids)
            self._streams[request.id] = (output, index, stream)

    def run(self, use_tqdm: bool) -> list[RequestOutput]:
        loop = self._llm._loop
        bar = _Bar(len(self._requests)) if use_tqdm else None
        try:
            for request in self._requests:
                delta = loop.submit(request, time.monotonic())
                if delta is not None:
                    self._take(delta, bar)
            while self._streams:
                output = loop.step(time.monotonic())
                for request_id, token in zip(output.request_ids, output.tokens, strict=True):
                    self._take(Delta(request_id, [token]), bar)
                for delta in output.deltas:
                    self._take(delta, bar)
        finally:
            for request_id in self._streams:  # an error or Ctrl-C: leave nothing running
                loop.abort(request_id, time.monotonic())
            if bar is not None:
                bar.close()
        return self._outputs

    def _take(self, delta: Delta, bar: _Bar | None) -> None:
        entry = self._streams.get(delta.id)
        if entry is None:
            return
        output, index, stream = entry
        if delta.finish == "error":
            raise EngineFault(delta.error or "The engine failed.", code=delta.error_code)
        chunk = _ids_only(delta) if stream is None else stream.push(delta)
        output.add(index, chunk, self._token_text)
        if chunk.finish is not None:
            if delta.finish is None:  # a stop string: the engine does not know yet
                self._llm._loop.abort(delta.id, time.monotonic(), "stop")
            del self._streams[delta.id]
        if bar is not None:
            bar.update(len(delta.ids), chunk.finish is not None)

    def _encode(self, text: str) -> list[int]:
        if self._llm.text is None:
            raise InvalidRequest(
                "This model was loaded without a tokenizer: give token ids.", param="prompt"
            )
        return self._llm.text.encode_now(text)

    def _token_text(self, token: int) -> str | None:
        return None if self._llm.text is None else self._llm.text.tokenizer.token_text(token)


def _ids_only(delta: Delta) -> Chunk:
    return Chunk(
        ids=delta.ids,
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        finish=delta.finish,
        stop_reason=delta.stop_id,
        cached_tokens=delta.cached_tokens,
    )


class _Bar:
    """A tqdm bar over finished requests, with the output rate beside it."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Processed prompts", unit="req", dynamic_ncols=True)
        self._tokens = 0
        self._start = time.perf_counter()

    def update(self, new_tokens: int, finished: bool) -> None:
        self._tokens += new_tokens
        if finished:
            rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
            self._bar.set_postfix_str(f"{rate:.1f} output tok/s", refresh=False)
            self._bar.update()

    def close(self) -> None:
        self._bar.close()
