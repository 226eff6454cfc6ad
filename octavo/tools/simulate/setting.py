"""The scheduler that options ask for, without the model they would need."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.config.facts import Gpu, HostFacts
from octavo.config.load import FLAG, OptionError
from octavo.config.options import Options
from octavo.config.resolve import Config, resolve
from octavo.core.capacity import cache_layout
from octavo.core.errors import StartupError
from octavo.core.scheduler import Scheduler
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.engine.record import Start
from octavo.engine.scheduling import build_scheduler

OPTIONS = (
    "kv_cache_tokens",
    "max_model_len",
    "block_size",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "scheduling_policy",
    "priority_ageing",
    "target_itl_ms",
    "target_ttft_ms",
    "request_timeout",
    "queue_timeout",
    "config",
)  # fmt: skip
DEFAULT_KV_TOKENS = 65_536
REFUSED = {  # what a file of options or the environment may ask for, and no simulation can do
    "preemption_mode": "preempted requests are recomputed",
    "swap_space": "preempted requests are recomputed",
    "kv_cache_memory": "without a model nobody knows what a token takes; use --kv-cache-tokens",
}
_PLENTY = 2**50  # bytes: a simulation has all the memory it needs
_FACTS = HostFacts(cpu_count=1, total_bytes=_PLENTY, available_bytes=_PLENTY)
_GPU_FACTS = dataclasses.replace(_FACTS, gpus=(Gpu("simulated", _PLENTY, _PLENTY),))
_SPEC = ModelSpec(
    family="llama", architecture="simulated", num_layers=1, hidden_size=64, intermediate_size=64,
    num_heads=1, num_kv_heads=1, head_dim=64, vocab_size=64, max_position=2**30, norm_eps=1e-5,
    rope=RopeSpec(10_000.0, 64), layers=(LayerSpec(),),
)  # fmt: skip


def resolve_setting(options: Options, recorded: Start | None, on_gpu: bool) -> Config:
    """What holds: what was given, else what was recorded, else what a CPU's or a GPU's default is.
    A recorded ``max_model_len`` gives way to a smaller KV cache. Raises :class:`OptionError`."""
    for name, reason in REFUSED.items():
        if options.sources[name] != "default":
            raise OptionError(
                f"octavo simulate does not take the {options.sources[name]}: {reason}."
            )
    values: dict[str, Any] = {"device": "auto", "preemption_mode": "recompute", "swap_space": 0}
    if options.max_model_len is None:
        values["max_model_len"] = "auto"
    if options.kv_cache_tokens == "auto":
        values["kv_cache_tokens"] = DEFAULT_KV_TOKENS
    spec, filled_in = _SPEC, {}
    if recorded is not None:
        filled_in = {
            name: value
            for name, value in _recorded(recorded).items()
            if options.sources[name] == "default"
        }
        if options.max_model_len is None:
            spec = dataclasses.replace(spec, max_position=recorded.max_model_len)
    options = dataclasses.replace(
        options,
        **(values | filled_in),
        sources=options.sources | dict.fromkeys(filled_in, "recorded"),
    )
    try:
        return resolve(options, _GPU_FACTS if on_gpu else _FACTS, spec)
    except StartupError as error:
        raise OptionError(f"{error}{_told_recorded(str(error), filled_in)}") from None


def make_scheduler(config: Config) -> Scheduler:
    return build_scheduler(config, cache_layout(_SPEC, page_size=config.block_size))


def _recorded(start: Start) -> dict[str, Any]:
    return {
        "kv_cache_tokens": (start.num_pages - 1) * start.page_size,
        "block_size": start.page_size,
        "max_num_seqs": start.max_num_seqs,
        "max_num_batched_tokens": start.max_num_batched_tokens,
        "enable_prefix_caching": start.prefix_caching,
    }


def _told_recorded(message: str, filled_in: dict[str, Any]) -> str:
    """Which of the flags that a message speaks of nobody gave."""
    flags = {FLAG.spell(name): value for name, value in filled_in.items()}
    named = [f"{flag} {value}" for flag, value in flags.items() if f"{flag} " in message]
    return f" Recorded: {', '.join(named)}." if named else ""
