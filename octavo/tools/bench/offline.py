"""What throughput and latency share: an engine in this process, its steps, its machine's peak."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config.options import Options
from octavo.core.sampling import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.outputs import RequestOutput
from octavo.engine.startup import read_checkpoint
from octavo.tools.bench.cost import step_cost, total
from octavo.tools.bench.probe import measure_peak
from octavo.tools.bench.steps import Step, StepMeter, cuda_mark, device_seconds
from octavo.tools.bench.workload import Task
from octavo.tools.local import engine_arguments


@dataclass(frozen=True, slots=True)
class Run:
    """One call of generate. ``started``: Unix time; ``start_at``: on the meter's clock."""

    outputs: list[RequestOutput]
    steps: list[Step]
    started: float
    start_at: float
    seconds: float
    preemptions: int


class OfflineEngine:
    """An :class:`LLM` whose steps are metered, and what its machine can do at best."""

    def __init__(self, options: Options) -> None:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        self.llm = LLM(**engine_arguments(options))
        self._loop = self.llm._loop
        self.device, self.dtype = self.llm.info.device, self.llm.info.dtype
        mark = cuda_mark if self.device == "cuda" else None
        self._meter = StepMeter(self._loop.executor, mark)
        self._loop.executor = self._meter
        self.spec = read_checkpoint(self.llm.config).spec
        self.peak = measure_peak(self.device, self.dtype)

    def run(
        self, tasks: Sequence[Task], *, temperature: float, ignore_eos: bool, show: bool = True
    ) -> Run:
        """Generate for all ``tasks`` at once, with an empty prefix cache."""
        scheduler = self._loop.scheduler
        scheduler.reset_prefix_cache()
        self._meter.take()
        preempted = scheduler.stats().preemptions
        params = [
            SamplingParams(
                temperature=temperature, max_tokens=task.output_len, ignore_eos=ignore_eos
            )
            for task in tasks
        ]
        started, start_at = time.time(), time.perf_counter()
        outputs = self.llm.generate([task.prompt for task in tasks], params, use_tqdm=show)
        seconds = time.perf_counter() - start_at
        return Run(
            outputs,
            self._meter.take(),
            started,
            start_at,
            seconds,
            scheduler.stats().preemptions - preempted,
        )

    def close(self) -> None:
        self.llm.close()

    def described(self) -> dict[str, Any]:
        """What ran, and on what."""
        config = self.llm.config
        return {
            "model": config.served_model_name[0],
            "dtype": self.dtype,
            "kv_cache_dtype": config.kv_cache_dtype,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "kernels": self.llm.info.notes.get("kernels"),
            "peak_read_bytes_s": self.peak.read_bytes_s,
            "peak_flops": self.peak.flops,
        }

    def shares(self, steps: Sequence[Step], seconds: float) -> dict[str, float]:
        """The least that ``steps`` cost, against what the machine does at best in ``seconds``."""
        kv_dtype = self.llm.config.kv_cache_dtype
        cost = total(
            step_cost(self.spec, self.dtype, step.starts, step.counts, step.num_samples, kv_dtype)
            for step in steps
        )
        return {
            "bandwidth_share": cost.num_bytes / (seconds * self.peak.read_bytes_s),
            "flops_share": cost.flops / (seconds * self.peak.flops),
        }


def summarise_run(run: Run) -> dict[str, Any]:
    """A repetition: counts and rates; where the time went.

    ``host_s``: outside the executor (scheduling, text). ``idle_share``: of the time in which the
    device computed nothing, as far as marks on its stream or, on a CPU, ``host_s`` can tell.
    """
    prompt_tokens = sum(len(output.prompt_token_ids) for output in run.outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in run.outputs)
    host_s = run.seconds - sum(step.seconds for step in run.steps)
    gpu_s = device_seconds(run.steps)
    return {
        "started": run.started,
        "seconds": run.seconds,
        "completed": len(run.outputs),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "request_s": len(run.outputs) / run.seconds,
        "output_tok_s": output_tokens / run.seconds,
        "input_tok_s": prompt_tokens / run.seconds,
        "steps": len(run.steps),
        "preemptions": run.preemptions,
        "host_s": host_s,
        "gpu_s": gpu_s,
        "idle_share": (host_s if gpu_s is None else run.seconds - gpu_s) / run.seconds,
    }
