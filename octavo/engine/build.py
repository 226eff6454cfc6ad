"""The composition root: the only file that sees the whole Config and builds an engine from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from octavo.config.resolve import Config
from octavo.core.capacity import cache_layout
from octavo.core.groups import layer_groups
from octavo.distributed.comm import SingleCommunicator
from octavo.engine.client import EngineInfo
from octavo.engine.loop import EngineLoop
from octavo.engine.record import open_recorder
from octavo.engine.scheduling import build_scheduler, describe_scheduling, swap_warning
from octavo.engine.startup import read_checkpoint
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.ops import fp8
from octavo.ops.cpu.warm import warm_kernels
from octavo.ops.sampling import select_sampling_ops
from octavo.ops.sampling.reference import SamplingOps
from octavo.ops.select import select_ops
from octavo.runner.kv import allocate_kv
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler
from octavo.runner.select import make_executor, make_runner
from octavo.runner.slots import Slots
from octavo.runner.swap import HostPages
from octavo.runner.warmup import warm_up
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.loader import WeightSlot

log = logging.getLogger("octavo.engine")

Progress = Callable[[str, float], None]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": fp8.KV_DTYPE,
}


def build_engine(config: Config, progress: Progress | None = None) -> tuple[EngineLoop, EngineInfo]:
    """Load the model and return its engine, warm; ``progress(stage, share)`` is kept informed."""
    progress = progress or (lambda stage, share: None)
    start = time.perf_counter()
    recorder = open_recorder(config, time.monotonic())
    checkpoint = read_checkpoint(config)
    runner, page_seconds, notes = _runner(config, checkpoint, progress)
    layout = cache_layout(checkpoint.spec, config.kv_cache_dtype, config.block_size)
    scheduler = build_scheduler(config, layout, page_seconds)
    notes["scheduling"] = describe_scheduling(config, page_seconds)
    log.info("Scheduling: %s", notes["scheduling"])
    if warning := swap_warning(config, layout):
        log.warning(warning)
    info = EngineInfo(
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        device=config.device,
        dtype=config.dtype,
        kv_tokens=config.kv_cache_tokens,
        prefix_caching=config.enable_prefix_caching,
        load_seconds=time.perf_counter() - start,
        notes=notes,
    )
    return EngineLoop(
        scheduler, make_executor(runner, config.pipeline_depth), recorder=recorder
    ), info


def _runner(
    config: Config, checkpoint: Checkpoint, progress: Progress
) -> tuple[Runner, float, dict[str, str]]:
    """The runner, warm; seconds that a page takes to the host; what was chosen."""
    spec = checkpoint.spec
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    kv_dtype = DTYPES[config.kv_cache_dtype]
    ops = select_ops(
        config.device,
        dtype,
        backend=config.ops_backend,
        threads=config.cpu_threads,
        cpu_isa=config.cpu_isa,
    )
    model = build_model(spec, ops, SingleCommunicator(), dtype, device, config.max_model_len)
    weights = _load(model, checkpoint, dtype, progress)
    groups = layer_groups(spec)
    progress("Allocating the KV cache", 0.0)
    kv = allocate_kv(
        config.num_pages,
        [len(group.layers) for group in groups],
        spec.num_kv_heads,
        config.block_size,
        spec.head_dim,
        kv_dtype,
        device,
        ops,
    )
    _log_kv(config)
    slots = Slots(config.max_num_seqs, config.max_model_len, config.block_size, len(groups))
    sampling_ops = SamplingOps() if ops.name == "reference" else select_sampling_ops(device)
    sampler = Sampler(
        max_num_seqs=config.max_num_seqs,
        vocab_size=spec.vocab_size,
        device=device,
        ops=sampling_ops,
    )
    kernels = f"{ops.describe()}; sampling {sampling_ops.name}"
    log.info("Device: %s, %s; %s", config.device, config.dtype, kernels)
    windows = [group.window for group in groups]
    host_pages = HostPages(kv, config.num_host_pages, ops) if config.num_host_pages else None
    runner = make_runner(
        ops,
        model,
        sampler,
        kv,
        windows,
        slots,
        hidden=(spec.hidden_size, dtype),
        max_tokens=config.max_num_batched_tokens,
        depth=config.pipeline_depth,
        graphs=not config.enforce_eager,
        host_pages=host_pages,
        prompt_logprobs_chunk=config.prompt_logprobs_chunk,
    )
    warm_kernels(
        ops,
        spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=config.block_size,
        progress=lambda done, total: progress("Compiling kernels", done / total),
    )
    seconds = warm_up(
        runner,
        sampler,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=min(config.max_num_batched_tokens, config.max_model_len),
        progress=progress,
    )
    log.info("Warm-up took %.1f s", seconds)
    page_seconds = 0.0 if host_pages is None else host_pages.measure()
    return runner, page_seconds, {"kernels": kernels, "weights": weights}


def _load(model: Decoder, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress) -> str:
    start = time.perf_counter()
    stage = f"Loading weights of {checkpoint.name}"
    slots = _counted(model.weight_slots(), lambda share: progress(stage, share))
    with torch.inference_mode():
        report = checkpoint.load(slots, dtype)
        model.after_load()
    text = f"{report.num_bytes / 2**30:.2f} GiB in {time.perf_counter() - start:.1f} s"
    log.info("Weights: %s (%d tensors)", text, report.num_tensors)
    return text


def _counted(slots: dict[str, WeightSlot], tell: Callable[[float], None]) -> dict[str, WeightSlot]:
    """The same slots, telling the share of tensors that have been loaded."""
    done = 0

    def counted(slot: WeightSlot) -> WeightSlot:
        def load(tensor: torch.Tensor) -> None:
            nonlocal done
            slot.load(tensor)
            done += 1
            tell(done / len(slots))

        return WeightSlot(slot.shape, load)

    return {name: counted(slot) for name, slot in slots.items()}


def _log_kv(config: Config) -> None:
    log.info(
        "%s KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        "GPU" if config.device == "cuda" else config.device.upper(),
        f"{config.kv_cache_tokens:,}",
        f"{config.max_model_len:,}",
        config.max_concurrency,
    )
    log.info(
        "KV cache: %d pages of %d tokens in %s, %.2f GiB; max_num_seqs=%d, "
        "max_num_batched_tokens=%d",
        config.num_pages,
        config.block_size,
        config.kv_cache_dtype,
        config.kv_cache_memory / 2**30,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
