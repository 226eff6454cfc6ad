"""Answers, in OpenAI's shapes with vLLM's additions. UNSET fields are left out of the JSON."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field


class ErrorDetail(Struct):
    """``code`` is a word where there is one, else the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(Struct):
    """Every error of every route has this shape."""

    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int = 0


class Usage(Struct):
    """``completion_tokens`` counts every sampled token, the one that ended the answer included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = field(default_factory=PromptTokensDetails)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


# One entry per prompt token, keyed by token id; null for the first, which nothing precedes.
PromptLogprobList = list[dict[str, PromptLogprob] | None]


class ChatMessage(Struct):
    role: str
    content: str | None
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(Struct):
    """Four lists, one entry per token. ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class GenerateAnswer(Struct):
    """Each text is the prompt with what was generated after it."""

    text: list[str]


class ModelCard(Struct):
    """``device`` and ``dtype`` say how it runs: cpu or cuda, float32 or bfloat16 or float16."""

    id: str
    created: int
    max_model_len: int
    root: str
    device: str
    dtype: str
    object: str = "model"
    owned_by: str = "octavo"
    parent: None = None


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Struct):
    prompt: str


class Status(Struct):
    """``status`` is "ok" or "unavailable"; ``state`` says where the engine is."""

    status: str
    state: str
    detail: str | UnsetType = UNSET


class Version(Struct):
    version: str


class ResetAnswer(Struct):
    """Pages whose contents can no longer be found."""

    pages_forgotten: int


class AuditPages(Struct):
    """Pages of the KV cache: ``free + cached + referenced`` is the total."""

    total: int
    free: int
    cached: int
    referenced: int


class AuditHostPages(Struct):
    total: int
    free: int


class AuditSlots(Struct):
    total: int
    running: int


class AuditAnswer(Struct):
    """What was recounted, and adds up. ``audit_failures``: audits of the idle engine that
    did not, since it started."""

    pages: AuditPages
    host_pages: AuditHostPages
    slots: AuditSlots
    waiting: int
    swapped: int
    audit_failures: int
