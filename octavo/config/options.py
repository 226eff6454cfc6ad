"""Every option, once. Flag, environment variable, YAML key and help are derived from the field.

The field ``max_model_len`` is ``--max-model-len``, ``OCTAVO_MAX_MODEL_LEN`` and, in the file given
to ``--config``, ``max-model-len``. Names are vLLM's where vLLM has the option. "auto" is for
:mod:`octavo.config.resolve` to turn into a number.
"""
# ruff: noqa: RUF009 - option() is dataclasses.field with metadata, which is meant here

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from octavo.config.kinds import (
    Kind,
    choice,
    count,
    json_object,
    number_of,
    or_auto,
    real,
    size,
    size_in_gib,
    switch,
    text,
)
from octavo.core.sampling import MAX_LOGPROBS

Auto = Literal["auto"]

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
DTYPES = ("float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """What flag, environment, file and help need to know about one option."""

    name: str
    kind: Kind
    group: str
    help: str
    default: Any
    aliases: tuple[str, ...] = ()
    is_list: bool = False
    is_secret: bool = False  # its value appears in no message and no log

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "OCTAVO_" + self.name.upper()


def option(
    default: Any,
    kind: Kind,
    group: str,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    is_secret: bool = False,
) -> Any:
    """A dataclass field that is an option; a tuple as default makes it a list of ``kind``."""
    details = {"kind": kind, "group": group, "help": help, "default": default}
    details |= {"aliases": aliases, "is_secret": is_secret, "is_list": isinstance(default, tuple)}
    return field(default=default, repr=not is_secret, metadata={"option": details})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for. ``sources`` says of each option where its value came from."""

    # Model
    model: str | None = option(
        None,
        text("MODEL"),
        "Model",
        "Hub id (ORG/NAME), folder or .gguf file; none: the embedded SmolLM2-135M-Instruct",
    )
    served_model_name: tuple[str, ...] = option(
        (), text("NAME"), "Model", "Names that clients may use; none: the model as it was given"
    )
    tokenizer: str | None = option(
        None, text("PATH"), "Model", "Hub id or folder of the tokenizer; none: the model's own"
    )
    chat_template: str | None = option(
        None, text("FILE|TEMPLATE"), "Model", "Chat template, as a file or text; none: the model's"
    )
    revision: str | None = option(
        None, text("NAME"), "Model", "Branch, tag or commit on the hub; none: the main branch"
    )
    download_dir: str | None = option(
        None, text("FOLDER"), "Model", "Where downloads are kept; none: the user's cache folder"
    )
    load_format: str = option(
        "auto",
        choice("auto", "safetensors", "gguf", "dummy", "dummy:normal"),
        "Model",
        "How weights are stored; dummy makes random ones (uniform ±1e-3, or normal)",
    )
    hf_overrides: dict[str, Any] | None = option(
        None, json_object(), "Model", "Values that replace those of the checkpoint's config.json"
    )
    generation_config: str = option(
        "auto",
        text("auto|vllm|FOLDER"),
        "Model",
        "Sampling defaults: the model's generation_config.json (auto), neutral ones (vllm), "
        "or a folder's",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, json_object(), "Model", "Sampling defaults that replace those of generation_config"
    )
    seed: int = option(
        0, count(0, 2**64 - 1), "Model", "Seed of random weights (--load-format dummy)"
    )

    # Device and memory
    device: str = option(
        "auto", choice("auto", "cpu", "cuda"), "Device and memory", "Where the model runs"
    )
    dtype: str = option(
        "auto",
        choice("auto", *DTYPES, aliases=DTYPE_ALIASES),
        "Device and memory",
        "Type of weights and sums; auto: the checkpoint's, but bfloat16 for float16 on a CPU",
    )
    max_model_len: int | Auto | None = option(
        None,
        or_auto(count(1), "-1"),
        "Device and memory",
        "Longest prompt and output together, in tokens (32k = 32000, 32K = 32768); none: the "
        "model's own; auto or -1: what fits in the KV cache",
    )
    gpu_memory_utilization: float = option(
        0.92,
        real(0, 1, above_low=True),
        "Device and memory",
        "Share of the GPU's memory that Octavo may use",
        aliases=("device_memory_utilization",),
    )
    kv_cache_memory: int | Auto = option(
        "auto",
        or_auto(size()),
        "Device and memory",
        "Memory for the KV cache (2GiB, 512MB, bytes), on a CPU too",
        aliases=("kv_cache_memory_bytes",),
    )
    kv_cache_tokens: int | Auto = option(
        "auto",
        or_auto(count(1)),
        "Device and memory",
        "Capacity of the KV cache in tokens, instead of --kv-cache-memory; rounded up to a page",
    )
    kv_cache_dtype: str = option(
        "auto",
        choice("auto", "fp8", aliases={"fp8_e4m3": "fp8"}),
        "Device and memory",
        "Type of keys and values; auto: --dtype; fp8: e4m3 with a scale for each token and head, "
        "nearly twice as many tokens in the same memory",
    )
    block_size: int = option(
        16, number_of(16, 32, 64), "Device and memory", "Tokens a page of the KV cache"
    )
    cpu_threads: int | Auto = option(
        "auto",
        or_auto(count(1)),
        "Device and memory",
        "Threads that compute on a CPU; auto: the cores this process may use",
    )
    cpu_isa: str = option(
        "auto",
        choice("auto", "generic", "avx2", "avx512", "amx"),
        "Device and memory",
        "Instructions that kernels on a CPU may use; auto: the best that this machine has",
    )
    ops_backend: str = option(
        "auto",
        text("auto|reference|…"),
        "Device and memory",
        "Kernels to use; reference is the slow, plain PyTorch form of all of them",
        aliases=("attention_backend",),
    )

    enforce_eager: bool = option(
        False, switch(), "Device and memory", "Capture no CUDA graphs: less memory, slower decoding"
    )
    max_graph_tokens: int | Auto = option(
        "auto",
        or_auto(count(0)),
        "Device and memory",
        "Tokens up to which steps that compute prompts are CUDA graphs, too; 0: graphs for "
        "decoding alone; auto: as many as a GPU computes while a host launches them, 512 to 2560",
    )
    async_scheduling: bool = option(
        True, switch(), "Device and memory", "Plan the next step while a GPU computes this one"
    )

    # Scheduling
    max_num_seqs: int | Auto = option(
        "auto",
        or_auto(count(1, 2**16)),
        "Scheduling",
        "Requests that may run at once: a ceiling, the KV cache may admit fewer; auto: one for "
        "each 64 tokens that the KV cache holds, at least 16",
    )
    max_num_batched_tokens: int | Auto = option(
        "auto", or_auto(count(1)), "Scheduling", "Tokens that one step may compute"
    )
    long_prefill_token_threshold: int = option(
        0,
        count(0),
        "Scheduling",
        "Tokens of one prompt that a step may compute at most; 0: as many as fit",
    )
    scheduling_policy: str = option(
        "fcfs",
        choice("fcfs", "priority", "fair"),
        "Scheduling",
        "Who runs first: by arrival, by priority, or whose API key has been served least",
    )
    priority_ageing: float = option(
        60.0,
        real(0, above_low=True),
        "Scheduling",
        "Seconds of waiting that are worth one level of priority",
    )
    target_itl_ms: float | None = option(
        None,
        real(0, above_low=True),
        "Scheduling",
        "Time between two tokens of a stream to keep, in ms: prompts get what it leaves of a "
        "step; none: no target",
    )
    target_ttft_ms: float | None = option(
        None,
        real(0, above_low=True),
        "Scheduling",
        "Time to the first token to aim at, in ms: a prompt that is held back for want of pages is "
        "hurried in time; none: no target",
    )
    preemption_mode: str = option(
        "auto",
        choice("auto", "recompute", "swap"),
        "Scheduling",
        "How a preempted request keeps what it computed: not at all, in host memory, or the "
        "cheaper of the two",
    )
    swap_space: int | Auto = option(
        "auto",
        or_auto(size_in_gib()),
        "Scheduling",
        "Host memory for preempted requests (4, 2GiB, 512MB; a bare number is GiB); 0: none; "
        "auto: a tenth of what is free, at most 4GiB",
    )
    enable_prefix_caching: bool = option(
        True, switch(), "Scheduling", "Keep and reuse the KV pages of common prompt beginnings"
    )
    max_num_queued_reqs: int | Auto = option(
        "auto",
        or_auto(count(1)),
        "Scheduling",
        "Requests that may wait for their first token before new ones get 429; auto: "
        "4 × --max-num-seqs, at least 1024",
    )
    request_timeout: float | None = option(
        None,
        real(0, above_low=True),
        "Scheduling",
        "Seconds after which a request ends with what it has; none: no limit",
    )
    queue_timeout: float | None = option(
        None,
        real(0, above_low=True),
        "Scheduling",
        "Seconds that a request may wait before it runs for the first time; none: no limit",
    )

    # Limits of a request
    max_logprobs: int = option(
        MAX_LOGPROBS,
        count(0, MAX_LOGPROBS),
        "Limits of a request",
        "Most log-probabilities a position that a request may ask for",
    )
    max_n: int = option(
        128, count(1), "Limits of a request", "Most choices (n) that a request may ask for"
    )
    max_choices: int = option(
        1024, count(1), "Limits of a request", "Most prompts × n that a request may ask for"
    )
    max_body_bytes: int = option(
        32 * 2**20, size(), "Limits of a request", "Largest request body (32MiB)"
    )
    clamp_max_tokens: bool = option(
        False,
        switch(),
        "Limits of a request",
        "Shorten a max_tokens that exceeds the context, rather than refuse the request",
    )
    prompt_logprobs_chunk: int = option(
        256,
        count(1),
        "Limits of a request",
        "Prompt positions whose logits are held at once for prompt_logprobs",
    )

    # Server
    host: str = option("127.0.0.1", text("ADDRESS"), "Server", "Address to listen on")
    port: int = option(8000, count(0, 65535), "Server", "Port to listen on; 0: any free one")
    api_key: tuple[str, ...] = option(
        (), text("KEY"), "Server", "Keys that clients must send; none: no key", is_secret=True
    )
    allowed_origins: tuple[str, ...] = option(
        (), text("ORIGIN"), "Server", "Origins that browsers may call from (*: all); none: no CORS"
    )
    root_path: str = option("", text("PATH"), "Server", "Path under which a proxy shows the server")
    disable_fastapi_docs: bool = option(False, switch(), "Server", "No /docs and no /openapi.json")
    shutdown_timeout: float = option(
        30.0, real(0), "Server", "Seconds that running requests get to end after SIGTERM"
    )
    sse_keep_alive_interval: float = option(
        15.0, real(0), "Server", "Seconds of silence before a stream gets a comment line; 0: never"
    )

    # Logging
    log_level: str = option("info", choice(*LOG_LEVELS), "Logging", "Octavo's log level")
    uvicorn_log_level: str = option(
        "info", choice("trace", *LOG_LEVELS), "Logging", "The HTTP library's log level"
    )
    disable_access_log: bool = option(
        False,
        switch(),
        "Logging",
        "No line for each HTTP request",
        aliases=("disable_uvicorn_access_log",),
    )
    enable_log_requests: bool = option(
        False, switch(), "Logging", "A line for each request: its id and parameters, never its text"
    )
    disable_log_stats: bool = option(
        False, switch(), "Logging", "No status line every 10 s under load"
    )
    trace_file: str | None = option(
        None,
        text("FILE"),
        "Logging",
        "Append to FILE what octavo simulate needs of each step and request: lengths and times, "
        "never text",
    )

    config: str | None = option(None, text("FILE"), "File of options", "YAML file of options")

    sources: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def pipeline_depth(self) -> int:
        """Steps that may be under way at once."""
        return 2 if self.async_scheduling else 1

    @property
    def log_stats(self) -> bool:
        return not self.disable_log_stats


DECLARATIONS: dict[str, Declaration] = {
    entry.name: Declaration(name=entry.name, **entry.metadata["option"])
    for entry in fields(Options)
    if "option" in entry.metadata
}
