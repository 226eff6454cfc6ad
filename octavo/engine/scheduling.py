"""The scheduler that the options ask for."""

from __future__ import annotations

from typing import cast

from octavo.config.resolve import Config
from octavo.core.pacing import PrefillPace
from octavo.core.pages import CacheLayout, PagePool
from octavo.core.preemption import Preemption, PreemptionMode
from octavo.core.scheduler import Scheduler
from octavo.core.waiting import AgedPriority, FairShare, Fcfs, Policy


def build_scheduler(config: Config, layout: CacheLayout, page_seconds: float = 0.0) -> Scheduler:
    """``page_seconds``: what copying a page to the host, or back, takes on this machine."""
    return Scheduler(
        pool=PagePool(config.num_pages, config.block_size, layout.blocks),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        prefix_caching=config.enable_prefix_caching,
        policy=_policy(config),
        preemption=Preemption(cast(PreemptionMode, config.preemption_mode), page_seconds),
        pace=PrefillPace(
            target_itl=_seconds(config.target_itl_ms), target_ttft=_seconds(config.target_ttft_ms)
        ),
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        host_pages=config.num_host_pages,
    )


def describe_scheduling(config: Config, page_seconds: float = 0.0) -> str:
    """What was chosen, and why, for the start log."""
    parts = [config.scheduling_policy]
    if config.scheduling_policy != "fcfs":
        parts[0] += f" (a level of priority is worth {config.priority_ageing:g} s)"
    parts.append(f"at most {config.max_num_seqs} requests at once ({_why(config, 'max_num_seqs')})")
    if config.long_prefill_token_threshold:
        parts.append(f"at most {config.long_prefill_token_threshold} tokens of a prompt a step")
    for name, target in (("ITL", config.target_itl_ms), ("TTFT", config.target_ttft_ms)):
        if target is not None:
            parts.append(f"target {name} {target:g} ms")
    parts.append(f"preemption by {_preemption(config, page_seconds)}")
    return "; ".join(parts)


def swap_warning(config: Config, layout: CacheLayout) -> str | None:
    """A sentence if host memory was insisted on and has no room for the longest request."""
    needed = layout.peak_pages(config.max_model_len, 1)
    if config.preemption_mode != "swap" or config.num_host_pages >= needed:
        return None
    return (
        f"--preemption-mode swap: the --swap-space holds {config.num_host_pages:,} pages and a "
        f"request of {config.max_model_len:,} tokens may take {needed:,}; what has no room there "
        f"when it is preempted is computed again."
    )


def _policy(config: Config) -> Policy:
    if config.scheduling_policy == "priority":
        return AgedPriority(config.priority_ageing)
    if config.scheduling_policy == "fair":
        return FairShare(config.priority_ageing)
    return Fcfs()


def _preemption(config: Config, page_seconds: float) -> str:
    if not config.num_host_pages:
        return config.preemption_mode
    text = (
        f"{'swap or recompute' if config.preemption_mode == 'auto' else config.preemption_mode}, "
        f"{config.num_host_pages:,} host pages ({config.swap_space / 2**30:.2f} GiB: "
        f"{_why(config, 'swap_space')})"
    )
    if page_seconds:
        rate = config.swap_space / config.num_host_pages / page_seconds
        text += f", {page_seconds * 1e6:.0f} µs a page ({rate / 1e9:.1f} GB/s)"
    return text


def _why(config: Config, name: str) -> str:
    return config.sources[name].removeprefix("derived: ")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
