"""resolve(): every "auto" becomes a number, and every number knows where it came from.

Pure: the same options, facts and model give the same :class:`Config`, so that a plan printed
before a start and the start itself cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.config.facts import HostFacts
from octavo.config.load import OptionError
from octavo.config.options import DECLARATIONS, DTYPES, Options
from octavo.config.room import GIB, Room, cpu_room, gib, gpu_room
from octavo.core.capacity import (
    BYTES_PER_ELEMENT,
    cache_layout,
    largest_model_len,
    max_concurrency,
    pages_from_bytes,
    pages_from_tokens,
    tokens_from_pages,
)
from octavo.core.errors import StartupError
from octavo.core.pacing import TOKENS_BESIDE
from octavo.core.pages import CacheLayout
from octavo.core.spec import ModelSpec

CPU_KV_BYTES = 4 * GIB  # more is seldom needed on a CPU, and memory belongs to others too
CPU_KV_SHARE = 0.4  # of what is available after the weights
CPU_KV_CEILING = 0.8  # of the same, where one sequence of the longest length needs more
CPU_BATCHED_TOKENS = 2048
GPU_BATCHED_TOKENS = 8192
CPU_MAX_SEQS = 256  # more rows make a step on a CPU slower than they save
GPU_MAX_SEQS = 1024
# Parameters × tokens that a GPU computes while a host launches a step one kernel after the other.
GPU_MEANWHILE = 3_000_000_000_000
LEAST_GRAPH_TOKENS = 512
MOST_GRAPH_TOKENS = TOKENS_BESIDE + 512  # prompts beside answers and those answers
GPU_LOGITS_BYTES = GIB // 4  # of a step, in fp32: sampling keeps a few times that much
MIN_SEQS = 16
SHORT_REQUEST_TOKENS = 64  # how many requests may run: as many of this length as the pool holds
SWAP_SHARE = 0.1  # of the host memory that weights and KV cache leave
SWAP_BYTES = 4 * GIB  # the most taken unasked
QUEUED_PER_SEQ = 4  # requests that may wait, for each that may run
MIN_QUEUED_REQS = 1024
STEP_SIZES = ("max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Options):
    """Options without "auto", and what follows from them.

    ``num_pages`` counts the null page. ``kv_cache_tokens`` and ``kv_cache_memory`` are what
    these pages hold and cost. ``weight_bytes`` is the estimate used for them. ``swap_space`` are
    the bytes of ``num_host_pages`` more pages in host memory. ``fits_length``: ``max_model_len`` is
    what the pages keep, at most.
    """

    device: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    kv_cache_memory: int
    kv_cache_tokens: int
    cpu_threads: int
    max_graph_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    swap_space: int
    num_pages: int
    num_host_pages: int
    weight_bytes: int
    max_concurrency: float  # sequences of max_model_len tokens that fit at once
    fits_length: bool = False


def resolve(options: Options, facts: HostFacts, spec: ModelSpec) -> Config:
    """Raises :class:`StartupError` where what was asked for cannot be, with the figures."""
    return _Resolver(options, facts, spec).config()


def resolve_measured(config: Config, facts: HostFacts, spec: ModelSpec) -> Config:
    """``config`` again, from facts that tell what its GPU's memory is used for.

    What was derived is derived anew, but for the sizes of a step: they were measured.
    """
    derived = {
        name
        for name in DECLARATIONS
        if name not in STEP_SIZES and config.sources.get(name, "").startswith("derived")
    }
    asked = {name: getattr(config, name) for name in DECLARATIONS if name not in derived}
    if config.fits_length:
        asked["max_model_len"] = "auto"
    sources = config.sources | dict.fromkeys(derived, "default")
    return resolve(Options(**asked, sources=sources), facts, spec)


class _Resolver:
    """One pass over the options; ``_values`` and ``_sources`` grow from device to sequences."""

    _room: Room  # of the device, once its weights are known

    def __init__(self, options: Options, facts: HostFacts, spec: ModelSpec) -> None:
        self._options = options
        self._facts = facts
        self._spec = spec
        self._values: dict[str, Any] = {name: getattr(options, name) for name in DECLARATIONS}
        self._sources = dict(options.sources)

    def config(self) -> Config:
        self._policies()
        self._device()
        self._dtype()
        layout = cache_layout(self._spec, self._values["kv_cache_dtype"], self._options.block_size)
        self._step_tokens()
        self._pool(layout)
        self._swap(layout)
        self._length(layout)
        self._budgets(layout)
        return Config(**self._values, sources=self._sources)

    def _set(self, name: str, value: Any, reason: str) -> None:
        self._values[name] = value
        self._sources[name] = f"derived: {reason}"

    def _policies(self) -> None:
        """Refuse what would have no effect beside the rest."""
        options, sources = self._options, self._sources
        if options.scheduling_policy == "fcfs" and sources["priority_ageing"] != "default":
            raise OptionError(
                f"The {sources['priority_ageing']} needs --scheduling-policy priority or fair: "
                "under fcfs requests have no priority."
            )
        whole, queue = options.request_timeout, options.queue_timeout
        if whole is not None and queue is not None and queue >= whole:
            raise OptionError(
                f"--queue-timeout {queue:g} would never act: --request-timeout {whole:g} ends "
                "a request before."
            )
        if options.preemption_mode == "swap" and options.swap_space == 0:
            raise OptionError("--preemption-mode swap needs a --swap-space above 0.")
        if options.preemption_mode == "recompute" and options.swap_space not in ("auto", 0):
            raise OptionError(
                f"The {sources['swap_space']} has no use with --preemption-mode recompute."
            )

    def _device(self) -> None:
        facts = self._facts
        if self._options.device == "auto":
            device = "cuda" if facts.gpus else "cpu"
            self._set("device", device, facts.gpus[0].name if facts.gpus else "no NVIDIA GPU here")
        elif self._options.device == "cuda" and not facts.gpus:
            raise StartupError("--device cuda: no NVIDIA GPU is visible on this machine.")
        if self._options.cpu_threads == "auto":
            self._set("cpu_threads", facts.cpu_count, "cores this process may use")

    def _dtype(self) -> None:
        own = self._spec.dtype
        if self._options.dtype == "auto":
            if own not in DTYPES:
                self._set("dtype", "bfloat16", f"the checkpoint's {own} is only a storage type")
            elif own == "float16" and self._on_cpu:
                self._set("dtype", "bfloat16", "the checkpoint's float16 is slow on a CPU")
            else:
                self._set("dtype", own, "the checkpoint's")
        if self._options.kv_cache_dtype == "auto":
            self._set("kv_cache_dtype", self._values["dtype"], "that of --dtype")
        weights = self._spec.num_params * BYTES_PER_ELEMENT[self._values["dtype"]]
        self._set("weight_bytes", weights, "parameters × bytes each")

    @property
    def _on_cpu(self) -> bool:
        return str(self._values["device"]) == "cpu"

    def _pool(self, layout: CacheLayout) -> None:
        """Pages of the KV cache: from tokens, from bytes, or from what the device has left."""
        options, sources = self._options, self._sources
        if self._on_cpu:
            self._room = cpu_room(self._facts, self._values)
        else:
            self._room = gpu_room(self._facts.gpus[0], options, self._values)
        room = self._room.size
        if options.kv_cache_tokens != "auto":
            if options.kv_cache_memory != "auto":
                raise OptionError(
                    f"Give one of {sources['kv_cache_tokens']} and {sources['kv_cache_memory']}, "
                    "not both."
                )
            pages = self._pages_of(layout, options.kv_cache_tokens, self._asked_length)
            reason = sources["kv_cache_tokens"]
        elif options.kv_cache_memory != "auto":
            pages = pages_from_bytes(layout, options.kv_cache_memory)
            reason = sources["kv_cache_memory"]
        elif self._on_cpu:
            pages, reason = self._cpu_pages(layout, room)
        else:
            pages = pages_from_bytes(layout, room)
            reason = (
                f"--gpu-memory-utilization {options.gpu_memory_utilization:g}, less the weights"
            )
        size = pages * layout.page_bytes
        if size > room:
            raise StartupError(
                f"A KV cache of {gib(size)} ({reason}) is {gib(size - room)} more than the "
                f"{gib(room)} left after {self._room.beside}."
            )
        self._set("num_pages", pages, reason)

    def _swap(self, layout: CacheLayout) -> None:
        """Pages in host memory, and the mode that is left without any."""
        mode, asked = self._options.preemption_mode, self._options.swap_space
        room = self._host_room(layout)
        if mode == "recompute":
            size, reason = 0, "--preemption-mode recompute"
        elif asked == "auto":
            pool = self._values["num_pages"] * layout.page_bytes
            size, reason = min((int(room * SWAP_SHARE), f"{SWAP_SHARE:.0%} of the memory left"),
                               (SWAP_BYTES, f"{gib(SWAP_BYTES)}, the most taken unasked"),
                               (pool, "as large as the KV cache"))  # fmt: skip
        else:
            size, reason = asked, self._sources["swap_space"]
        if size > room:
            raise StartupError(
                f"--swap-space {gib(size)} is more than the {gib(room)} of host memory left."
            )
        pages = size // layout.page_bytes
        if not pages and (mode == "swap" or asked not in ("auto", 0)):
            raise StartupError(
                f"--swap-space has no room for a page of {layout.page_bytes} bytes ({reason})."
            )
        self._set("num_host_pages", pages, reason)
        self._values["swap_space"] = pages * layout.page_bytes
        if asked == "auto":
            self._sources["swap_space"] = f"derived: {reason}"
        if mode == "auto" and not pages:
            self._set("preemption_mode", "recompute", "there is no --swap-space")

    def _host_room(self, layout: CacheLayout) -> int:
        """Bytes of host memory that are not spoken for."""
        if not self._on_cpu:
            return self._facts.available_bytes
        pool: int = self._values["num_pages"] * layout.page_bytes
        return self._room.size - pool

    def _cpu_pages(self, layout: CacheLayout, room: int) -> tuple[int, str]:
        """A moderate share of the memory, but one sequence of full length, and no more than
        all sequences of full length need."""
        length, asked = self._options.max_model_len, self._asked_length
        one = self._pages_of(layout, asked, asked)
        seqs = self._options.max_num_seqs
        most = self._pages_of(layout, asked * (CPU_MAX_SEQS if seqs == "auto" else seqs), asked)
        share = pages_from_bytes(layout, min(CPU_KV_BYTES, int(room * CPU_KV_SHARE)))
        if most <= share:
            return most, "what --max-num-seqs sequences of --max-model-len tokens need"
        if one > share and length != "auto":
            ceiling = pages_from_bytes(layout, int(room * CPU_KV_CEILING))
            return min(one, ceiling), "one sequence of --max-model-len tokens"
        if room * CPU_KV_SHARE > CPU_KV_BYTES:
            return share, f"{gib(CPU_KV_BYTES)}, the most taken unasked on a CPU"
        return share, f"{CPU_KV_SHARE:.0%} of the memory left after the weights"

    @property
    def _asked_length(self) -> int:
        """The context length before it is known what the pool keeps."""
        length = self._options.max_model_len
        return length if isinstance(length, int) else self._spec.max_position

    def _pages_of(self, layout: CacheLayout, tokens: int, length: int) -> int:
        return pages_from_tokens(layout, tokens, length, self._values["max_num_batched_tokens"])

    def _length(self, layout: CacheLayout) -> None:
        """The context length, and whether the pool keeps one sequence of it."""
        pages, own = self._values["num_pages"], self._spec.max_position
        largest = largest_model_len(layout, pages, self._values["max_num_batched_tokens"])
        if largest < 1:
            raise StartupError(
                f"The KV cache has no page for a request; {layout.peak_pages(1, 1)} of "
                f"{layout.page_bytes} bytes are the least, and page 0 is never used."
            )
        asked = self._options.max_model_len
        self._values["fits_length"] = asked == "auto"
        if asked == "auto":
            reason = "the model's" if largest >= own else "what the KV cache holds"
            self._set("max_model_len", min(own, largest), reason)
            return
        if asked is None:
            self._set("max_model_len", own, "the model's")
        elif asked > own:
            raise OptionError(
                f"The {self._sources['max_model_len']} asks for {asked} tokens, and the model "
                f"supports {own}; a longer context needs RoPE scaling in --hf-overrides."
            )
        if self._values["max_model_len"] > largest:
            raise StartupError(
                f"The KV cache holds {largest} tokens, less than one request of "
                f"{self._values['max_model_len']}; use --max-model-len {largest} (or auto), or a "
                f"larger {self._pool_option}."
            )

    @property
    def _pool_option(self) -> str:
        """The flag that more pages come from."""
        if self._options.kv_cache_tokens != "auto":
            return "--kv-cache-tokens"
        if self._options.kv_cache_memory != "auto" or self._on_cpu:
            return "--kv-cache-memory"
        return "--gpu-memory-utilization"

    def _budgets(self, layout: CacheLayout) -> None:
        """What the pages come to; then sequences a step."""
        pages, length = self._values["num_pages"], self._values["max_model_len"]
        chunk = self._values["max_num_batched_tokens"]
        self._values["kv_cache_memory"] = pages * layout.page_bytes
        self._values["kv_cache_tokens"] = tokens_from_pages(layout, pages, length, chunk)
        for name in ("kv_cache_memory", "kv_cache_tokens"):
            if getattr(self._options, name) == "auto":
                self._sources[name] = "derived: what num_pages pages come to"
        concurrency = max_concurrency(layout, pages, length, chunk)
        self._set("max_concurrency", concurrency, "kv_cache_tokens over max_model_len")
        if self._options.max_num_seqs == "auto":
            self._set("max_num_seqs", *self._auto_seqs(layout))
        if self._options.max_num_queued_reqs == "auto":
            most = max(MIN_QUEUED_REQS, QUEUED_PER_SEQ * self._values["max_num_seqs"])
            reason = f"{QUEUED_PER_SEQ} × max_num_seqs, at least {MIN_QUEUED_REQS}"
            self._set("max_num_queued_reqs", most, reason)

    def _step_tokens(self) -> None:
        """Tokens a step: what a sequence keeps of a window depends on it."""
        seqs, batched = self._options.max_num_seqs, self._options.max_num_batched_tokens
        if batched == "auto":
            default = CPU_BATCHED_TOKENS if self._on_cpu else GPU_BATCHED_TOKENS
            at_least = default if seqs == "auto" else max(default, seqs)
            self._set("max_num_batched_tokens", at_least, f"suits a {self._values['device']}")
        elif seqs != "auto" and seqs > batched:
            raise OptionError(
                f"--max-num-batched-tokens {batched} is less than --max-num-seqs {seqs}: each "
                "running request needs at least one token of a step."
            )
        if self._options.max_graph_tokens == "auto":
            tokens = GPU_MEANWHILE // self._spec.num_params // 64 * 64
            tokens = min(max(tokens, LEAST_GRAPH_TOKENS), MOST_GRAPH_TOKENS)
            self._set("max_graph_tokens", tokens, "what a GPU computes while a host launches it")
        chunk = self._options.long_prefill_token_threshold
        if chunk >= self._values["max_num_batched_tokens"]:
            raise OptionError(
                f"--long-prefill-token-threshold {chunk} would never act: a step computes at "
                f"most {self._values['max_num_batched_tokens']} tokens (--max-num-batched-tokens)."
            )

    def _auto_seqs(self, layout: CacheLayout) -> tuple[int, str]:
        pages, chunk = self._values["num_pages"], self._values["max_num_batched_tokens"]
        most = CPU_MAX_SEQS if self._on_cpu else GPU_MAX_SEQS
        short = min(SHORT_REQUEST_TOKENS, self._values["max_model_len"])
        seqs = max(MIN_SEQS, int(max_concurrency(layout, pages, short, chunk)))
        reason = f"requests of {short} tokens that the KV cache holds, at least {MIN_SEQS}"
        if most < seqs:
            seqs, reason = most, f"the most that suits a {self._values['device']}"
        for bound, name in (
            ((pages - 1) // layout.peak_pages(1, 1), "pages of the KV cache"),
            (self._values["max_num_batched_tokens"], "max_num_batched_tokens"),
            (self._most_rows, f"rows whose logits take {GPU_LOGITS_BYTES >> 20} MiB"),
        ):
            if bound < seqs:
                seqs, reason = bound, name
        return seqs, reason

    @property
    def _most_rows(self) -> int:
        """Sequences whose logits fit beside the activations of a step."""
        if self._on_cpu:
            return CPU_MAX_SEQS
        return max(MIN_SEQS, GPU_LOGITS_BYTES // (4 * self._spec.vocab_size))
