"""The composition root: the only file that sees the whole Config and builds an engine from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from octavo.config.facts import HostFacts, read_host_facts
from octavo.config.resolve import Config, resolve_measured
from octavo.core.capacity import cache_layout
from octavo.core.errors import StartupError
from octavo.core.groups import layer_groups
from octavo.core.spec import ModelSpec
from octavo.distributed.comm import SingleCommunicator
from octavo.engine.client import EngineInfo
from octavo.engine.loading import fill_model
from octavo.engine.loop import EngineLoop
from octavo.engine.record import open_recorder
from octavo.engine.scheduling import build_scheduler, describe_scheduling, swap_warning
from octavo.engine.startclock import StartClock
from octavo.engine.startup import read_checkpoint
from octavo.models.registry import build_model
from octavo.ops import fp8
from octavo.ops.sampling import select_sampling_ops
from octavo.ops.sampling.reference import SamplingOps
from octavo.ops.select import select_ops
from octavo.runner.kv import allocate_kv
from octavo.runner.memory import GpuMemory, MemoryMeter, refused_without_memory
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler
from octavo.runner.select import make_executor, make_runner
from octavo.runner.slots import Slots
from octavo.runner.swap import HostPages, locked_memory
from octavo.runner.warmup import StepLimits, rehearse, warm_up
from octavo.weights.checkpoint import Checkpoint

log = logging.getLogger("octavo.engine")

Progress = Callable[[str, float], None]
PROBE_PAGES = 2  # of the pool that a start measures with: all its rows use the null page
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": fp8.KV_DTYPE,
}


def build_engine(config: Config, progress: Progress | None = None) -> tuple[EngineLoop, EngineInfo]:
    """Load the model and return its engine, warm; ``progress(stage, share)`` is kept informed.

    On a GPU the KV cache gets what is left beside the worst step, as measured, so that the context
    may become shorter than ``config`` says, where its length is automatic.
    """
    progress = progress or (lambda stage, share: None)
    clock = StartClock()
    checkpoint = read_checkpoint(config)
    start = _Start(config, checkpoint.spec, clock, progress)
    notes = {"weights": start.load(checkpoint)}
    config = start.size_pool()
    runner = start.build_runner(config)
    page_seconds = 0.0 if start.host_pages is None else start.host_pages.measure()
    layout = cache_layout(checkpoint.spec, config.kv_cache_dtype, config.block_size)
    scheduler = build_scheduler(config, layout, page_seconds)
    notes |= start.notes
    notes["scheduling"] = describe_scheduling(config, page_seconds)
    log.info("Scheduling: %s", notes["scheduling"])
    if warning := swap_warning(config, layout):
        log.warning(warning)
    notes["start"] = str(clock)
    log.info("Start took %s", notes["start"])
    info = EngineInfo(
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        page_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        device=config.device,
        dtype=config.dtype,
        kv_tokens=config.kv_cache_tokens,
        prefix_caching=config.enable_prefix_caching,
        load_seconds=clock.seconds,
        notes=notes,
    )
    recorder = open_recorder(config, time.monotonic())
    return EngineLoop(
        scheduler, make_executor(runner, config.pipeline_depth), recorder=recorder
    ), info


class _Start:
    """One rank on its way: the model, and runners over it."""

    def __init__(
        self, config: Config, spec: ModelSpec, clock: StartClock, progress: Progress
    ) -> None:
        self._config, self._spec, self._clock, self._progress = config, spec, clock, progress
        self._device, self._dtype = torch.device(config.device), DTYPES[config.dtype]
        self._kv_dtype = DTYPES[config.kv_cache_dtype]
        self._facts: HostFacts | None = None
        if config.device == "cuda":
            with clock.part("other processes"):  # before this one has a context there
                self._facts = read_host_facts()
            if not self._facts.gpus:
                raise StartupError("The NVIDIA GPU of this machine is no longer visible.")
        with clock.part("device"), refused_without_memory("hold the weights"):
            self._ops = select_ops(
                config.device,
                self._dtype,
                backend=config.ops_backend,
                threads=config.cpu_threads,
                cpu_isa=config.cpu_isa,
            )
            self._sampling_ops = (
                SamplingOps()
                if self._ops.name == "reference"
                else select_sampling_ops(self._device)
            )
            self._model = build_model(
                spec, self._ops, SingleCommunicator(), self._dtype, self._device,
                config.max_model_len,
            )  # fmt: skip
        layout = cache_layout(spec, config.kv_cache_dtype, config.block_size)
        self._page_bytes = layout.page_bytes
        self._host_memory: Future[torch.Tensor] | None = None
        if self._facts is not None and config.num_host_pages:  # takes seconds, on a core of its own
            self._host_memory = ThreadPoolExecutor(1).submit(
                locked_memory, config.num_host_pages + 1, layout.page_bytes
            )
        self.notes = {"kernels": f"{self._ops.describe()}; sampling {self._sampling_ops.name}"}
        self.host_pages: HostPages | None = None
        self._limits = StepLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.prompt_logprobs_chunk,
        )
        log.info("Device: %s, %s; %s", config.device, config.dtype, self.notes["kernels"])

    def load(self, checkpoint: Checkpoint) -> str:
        """Fill the model; how much it was."""
        with self._clock.part("weights"), refused_without_memory("hold the weights"):
            return fill_model(self._model, checkpoint, self._dtype, self._progress)

    def size_pool(self) -> Config:
        """The configuration with as many pages as the device turns out to have room for."""
        if self._facts is None:
            return self._config
        gpu, memory = self._facts.gpus[0], GpuMemory(self._device)
        meter = MemoryMeter(memory, others=max(0, memory.total() - gpu.free_bytes))
        with refused_without_memory(f"run a step of {self._limits}"):
            self._measure(meter, memory)
        memory.release()
        use = meter.use()
        self.notes["memory"] = str(use)
        log.info("Memory: %s", use)
        facts = replace(self._facts, gpus=(replace(gpu, use=use),))
        return resolve_measured(self._config, facts, self._spec)

    def build_runner(self, config: Config) -> Runner:
        """The runner over all pages, warm."""
        sampler, progress = self._sampler(), self._progress
        with self._clock.part("KV cache"), refused_without_memory("hold the KV cache"):
            progress("Allocating the KV cache", 0.0)
            runner = self._runner(sampler, config.num_pages, config.num_host_pages)
        _log_kv(config)
        if self._facts is None:
            with self._clock.part("warm-up"):
                self._warm_cpu(runner, sampler)
            return runner
        with self._clock.part("graphs"), refused_without_memory("capture graphs"):
            self._capture(runner)
        return runner

    def _measure(self, meter: MemoryMeter, memory: GpuMemory) -> None:
        """Kernels are compiled, worst steps run, some graphs captured, over hardly any pages."""
        sampler = self._sampler()
        runner = self._runner(sampler, PROBE_PAGES, 0)
        if runner.overlaps:
            with self._clock.part("kernels"):
                self._compile(runner)
            memory.release()
        with self._clock.part("memory"):
            meter.steps(
                lambda: warm_up(runner, sampler, self._limits, progress=self._progress),
                PROBE_PAGES * self._page_bytes,
            )
            meter.graphs(runner.captures())

    def _compile(self, runner: Runner) -> None:
        from octavo.ops.triton.compiler import ensure_compiled

        start = time.perf_counter()
        needed, compiled = ensure_compiled(
            lambda: rehearse(runner, self._limits),
            self._config.cpu_threads,
            partial(self._progress, "Compiling kernels"),
        )
        seconds = time.perf_counter() - start
        log.info("Kernels: %d, of which %d were compiled; %.1f s", needed, compiled, seconds)

    def _capture(self, runner: Runner) -> None:
        start, memory = time.perf_counter(), GpuMemory(self._device)
        free = memory.free()
        runner.capture(partial(self._progress, "Capturing graphs"))
        log.info(
            "Graphs: captured in %.1f s, %.2f GiB",
            time.perf_counter() - start, (free - memory.free()) / 2**30,
        )  # fmt: skip

    def _warm_cpu(self, runner: Runner, sampler: Sampler) -> None:
        if self._ops.name == "cpu":
            from octavo.ops.cpu.warm import warm_kernels

            warm_kernels(
                self._ops,
                self._spec,
                dtype=self._dtype,
                kv_dtype=self._kv_dtype,
                page_size=self._config.block_size,
                progress=lambda done, total: self._progress("Compiling kernels", done / total),
            )
        warm_up(runner, sampler, self._limits, progress=self._progress)

    def _taken_host_memory(self, num_pages: int) -> torch.Tensor | None:
        """What was taken while the model was loaded, if that is enough for so many host pages."""
        if self._host_memory is None:
            return None
        try:
            memory = self._host_memory.result()
        except RuntimeError as error:
            log.warning("The --swap-space is taken in another way: locking it failed (%s)", error)
            return None
        return memory if num_pages < len(memory) else None

    def _sampler(self) -> Sampler:
        return Sampler(
            max_num_seqs=self._config.max_num_seqs,
            vocab_size=self._spec.vocab_size,
            device=self._device,
            ops=self._sampling_ops,
        )

    def _runner(self, sampler: Sampler, num_pages: int, num_host_pages: int) -> Runner:
        config, spec = self._config, self._spec
        groups = layer_groups(spec)
        kv = allocate_kv(
            num_pages,
            [len(group.layers) for group in groups],
            spec.num_kv_heads,
            config.block_size,
            spec.head_dim,
            self._kv_dtype,
            self._device,
            self._ops,
        )
        if num_host_pages:
            memory = self._taken_host_memory(num_host_pages)
            self.host_pages = HostPages(kv, num_host_pages, self._ops, memory)
        return make_runner(
            self._ops,
            self._model,
            sampler,
            kv,
            [group.window for group in groups],
            Slots(config.max_num_seqs, config.max_model_len, config.block_size, len(groups)),
            hidden=(spec.hidden_size, self._dtype),
            max_tokens=config.max_num_batched_tokens,
            depth=config.pipeline_depth,
            max_graph_tokens=None if config.enforce_eager else config.max_graph_tokens,
            host_pages=self.host_pages,
            prompt_logprobs_chunk=config.prompt_logprobs_chunk,
        )


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
