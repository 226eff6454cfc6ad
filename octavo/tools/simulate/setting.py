"""The scheduler that options ask for, without the model they would need."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.config.facts import Gpu, HostFacts
from octavo.config.options import Options
from octavo.config.resolve import Config, resolve
from octavo.core.capacity import cache_layout
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
    Raises :class:`~octavo.config.load.OptionError` as ``octavo serve`` does."""
    values: dict[str, Any] = {"preemption_mode": "recompute", "swap_space": 0}
    if options.max_model_len is None:
        values["max_model_len"] = "auto"
    if options.kv_cache_tokens == "auto":
        values["kv_cache_tokens"] = DEFAULT_KV_TOKENS
    if recorded is not None:
        values |= {
            name: value
            for name, value in _recorded(recorded).items()
            if options.sources[name] == "default"
        }
    options = dataclasses.replace(options, **values)
    return resolve(options, _GPU_FACTS if on_gpu else _FACTS, _SPEC)


def make_scheduler(config: Config) -> Scheduler:
    return build_scheduler(config, cache_layout(_SPEC, page_size=config.block_size))


def _recorded(start: Start) -> dict[str, Any]:
    return {
        "kv_cache_tokens": (start.num_pages - 1) * start.page_size,
        "block_size": start.page_size,
        "max_model_len": start.max_model_len,
        "max_num_seqs": start.max_num_seqs,
        "max_num_batched_tokens": start.max_num_batched_tokens,
        "enable_prefix_caching": start.prefix_caching,
    }
