"""The real engine under the same loads: what it computes twice, and whether its speed is predicted.

Answers end at lengths that only the client knows, as with a stop string, so the scheduler cannot
read them off a request.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import Check
from octavo.core.admission import Admission, AdmitWhatFits
from octavo.core.request import Request, Sampling
from octavo.engine.loop import EngineLoop
from octavo.tools.bench.steps import StepMeter
from octavo.tools.simulate.outcome import Outcome, weighted_percentile
from octavo.tools.simulate.replay import Recording, load_recording
from octavo.tools.simulate.setting import make_scheduler, resolve_setting
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace, backlog

NUM_REQUESTS = 96
HELD = 16  # mean-length requests in the pool
MAX_TOKENS = 640  # what each client asks for
MAX_OVERHEAD = 1.05
VOCABULARY = range(100, 49_000)
ROOMY_TOKENS = 32_768  # a pool that holds all requests of a recording
MAX_MISPREDICTION = 0.10


def overhead(check: Check) -> None:
    """Computed tokens over prompts and answers; heavy-tailed answers, a pool for 16 of 96. The
    baseline, which admits whatever fits at the moment, shows that the pool is that small."""
    trace = heavy_tailed(NUM_REQUESTS, 0)
    asked = int((trace.prompt + trace.output).sum())
    for name, admission, op in (("engine", None, "<="), ("engine_baseline", AdmitWhatFits(), ">")):
        computed, preemptions = _computed(trace, admission)
        check.note(**{f"{name}_computed_tokens": computed, f"{name}_preemptions": preemptions})
        metric = f"{name}_computed_over_prompt_and_output"
        check.line(metric, computed / asked, op, MAX_OVERHEAD)
    check.note(engine_prompt_and_output_tokens=asked)


def _computed(trace: Trace, admission: Admission | None) -> tuple[int, int]:
    """Tokens, and preemptions, whose pages are not kept elsewhere. None: Octavo's admission."""
    mean = float((trace.prompt + trace.output).mean())
    with closing(_engine(kv_cache_tokens=round(HELD * mean), max_model_len="auto",
                         max_num_seqs=4 * HELD, preemption_mode="recompute")) as llm:  # fmt: skip
        loop = llm._loop
        if admission is not None:
            loop.scheduler._admission = admission
        loop.executor = meter = StepMeter(loop.executor)
        serve(loop, trace)
        llm.audit()
        computed = sum(sum(step.counts) for step in meter.take())
        return computed, loop.stats().preemptions


def prediction(check: Check) -> None:
    """The cost model of one recorded run foretells throughput and longest gaps of another one."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (
            record(trace, Path(folder) / name)
            for name, trace in (("burst", burst(32, 1)), ("stream", stream(48, 2)))
        )
    fit = first.fit()
    check.note(step_time=repr(fit))
    for name, recording in (("same_run", first), ("other_run", second)):
        outcome = replayed(recording, fit)
        predicted = outcome.output_rate
        ratio = predicted / recording.output_rate
        check.note(**{f"{name}_output_tok_s": {"recorded": recording.output_rate,
                                              "predicted": predicted}})  # fmt: skip
        check.line(f"prediction_error_{name}", abs(ratio - 1), "<=", MAX_MISPREDICTION,
                   raw=[ratio])  # fmt: skip
        gaps = [
            _gap_p99(outcome.steps.seconds.tolist(), outcome.steps.decode_rows.tolist()),
            _gap_p99(
                [s.seconds for s in recording.steps], [s.decode_rows for s in recording.steps]
            ),
        ]
        # Without a bound: the longest steps of two cores are those that something else disturbed.
        error = abs(gaps[0] / gaps[1] - 1)
        print("NOTE", check.name, f"prediction_error_{name}_gap_p99 {error:.4g}", flush=True)
        check.note(**{f"prediction_error_{name}_gap_p99": error})


def _gap_p99(seconds: list[float], rows: list[int]) -> float:
    """Of the times between two tokens, where no request pauses: each row of a step is one."""
    return weighted_percentile(np.array(seconds), np.array(rows), 99)


def heavy_tailed(count: int, seed: int) -> Trace:
    draw = np.random.default_rng(seed)
    outputs = np.minimum(20 * (1 - draw.random(count)) ** (-1 / 1.2), MAX_TOKENS)
    return backlog(draw.integers(20, 160, count), outputs.astype(np.int64), MAX_TOKENS)


def burst(count: int, seed: int) -> Trace:
    """All at once; batches of every size, as the answers end one by one."""
    draw = np.random.default_rng(seed)
    return backlog(draw.integers(20, 300, count), draw.integers(20, 200, count), MAX_TOKENS)


def stream(count: int, seed: int) -> Trace:
    """Other lengths, and they keep coming."""
    draw = np.random.default_rng(seed)
    prompts, outputs = draw.integers(50, 500, count), draw.integers(50, 150, count)
    arrival = np.concatenate([[0.0], np.cumsum(draw.exponential(1 / 3, count - 1))])
    return Trace(arrival, prompts, outputs, np.full(count, MAX_TOKENS))


def record(trace: Trace, path: Path) -> Recording:
    """Serve ``trace`` with a recording engine."""
    with closing(_engine(kv_cache_tokens=ROOMY_TOKENS, trace_file=str(path))) as llm:
        serve(llm._loop, trace)
    return load_recording(str(path))


def replayed(recording: Recording, cost: Any) -> Outcome:
    """The recorded requests once more, on the virtual clock."""
    from octavo.config.load import load_options

    config = resolve_setting(load_options({}, {}), recording.start, on_gpu=False)
    return Simulator(make_scheduler(config), cost).run(recording.trace())


def serve(loop: EngineLoop, trace: Trace) -> None:
    """Submit requests as they arrive, and stop each one at the length that its client wants."""
    requests = [_request(number, length) for number, length in enumerate(trace.prompt.tolist())]
    wanted = dict(zip((r.id for r in requests), trace.output.tolist(), strict=True))
    arrivals, submitted, start = trace.arrival.tolist(), 0, time.monotonic()
    while submitted < len(requests) or loop.has_work:
        while submitted < len(requests) and arrivals[submitted] <= time.monotonic() - start:
            loop.submit(requests[submitted], time.monotonic())
            submitted += 1
        if not loop.has_work:
            time.sleep(max(0.0, arrivals[submitted] - (time.monotonic() - start)))
            continue
        output = loop.step(time.monotonic())
        news = [*output.request_ids, *(d.id for d in output.deltas if d.ids)]
        for request_id in news:
            wanted[request_id] -= 1
            if wanted[request_id] == 0:
                loop.abort(request_id, time.monotonic(), "stop")


def _request(number: int, prompt_len: int) -> Request:
    draw: NDArray[np.int64] = np.random.default_rng([number, prompt_len]).integers(
        VOCABULARY.start, VOCABULARY.stop, prompt_len
    )
    return Request(str(number), draw.tolist(), MAX_TOKENS, Sampling(temperature=0.0))


def _engine(**options: Any) -> Any:
    from octavo import LLM

    return LLM(dtype="bfloat16", skip_tokenizer_init=True, **options)
