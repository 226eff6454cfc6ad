"""``octavo simulate``: read the flags, run, print."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from octavo.config.kinds import choice, count, real
from octavo.config.load import OptionError
from octavo.config.resolve import Config
from octavo.tools.bench.workload import arrival_times
from octavo.tools.flags import Parser, add_named_options, options_of
from octavo.tools.simulate.cost import COST_MODELS, CostModel
from octavo.tools.simulate.lengths import FORMS, parse_lengths
from octavo.tools.simulate.replay import Recording, load_recording
from octavo.tools.simulate.report import result_lines, summarise
from octavo.tools.simulate.setting import (
    DEFAULT_KV_TOKENS,
    OPTIONS,
    make_scheduler,
    resolve_setting,
)
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace
from octavo.tools.values import value_of

EPILOG = f"""\
What the scheduler would do, without a model and faster than real time: the engine's own scheduler
on a virtual clock. Times come from a cost model of the hardware: a named one, or one fitted from
the steps of a recording (octavo serve --trace-file FILE). What a recorded engine could run at once
holds where no flag says otherwise; without a recording the KV cache keeps {DEFAULT_KV_TOKENS}
tokens. Preempted requests are recomputed, never swapped."""
SYNTHETIC = ("prompt", "output", "max_tokens", "request_rate", "burstiness", "tenants")


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    recording = _recording(args)
    on_gpu = recording is None and args.cost == "gpu"
    options = options_of(args)
    config = resolve_setting(options, None if recording is None else recording.start, on_gpu)
    trace = _trace(args, recording)
    _check_lengths(trace, config)
    trace = replace(trace, timeout=config.request_timeout, queue_timeout=config.queue_timeout)
    cost = _cost(args, recording)
    simulator = Simulator(make_scheduler(config), cost)
    with tqdm(total=len(trace), desc="Simulated", unit="req", disable=None) as bar:
        outcome = simulator.run(trace, lambda ended: _advance(bar, ended))
    figures = summarise(trace, outcome)
    if recording is not None and args.fit is not None:
        figures["recorded_output_tok_s"] = recording.output_rate
        figures["predicted_over_recorded"] = figures["output_tok_s"] / recording.output_rate
    figures["cost_model"] = asdict(cost)  # type: ignore[call-overload]
    print("\n".join(result_lines(figures)))
    if args.json is not None:
        _write(args.json, figures)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "octavo simulate", "Run the scheduler without a model.", EPILOG,
        usage="octavo simulate [TRACE | --requests N …] [flags]",
    )  # fmt: skip
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="recording to replay")
    add = parser.add_argument_group("Requests, without a TRACE").add_argument
    lengths: dict[str, Any] = {"type": parse_lengths, "metavar": "LENGTHS"}
    add("--requests", type=value_of(count(1)), metavar="N", help="how many")
    add("--prompt", **lengths, help=f"tokens a prompt: {FORMS} (default: 512)")
    add("--output", **lengths, help="tokens an answer, likewise (default: 128)")
    add("--max-tokens", type=value_of(count(1)), metavar="N",
        help="what each client asks for (default: the longest --output)")  # fmt: skip
    add("--request-rate", type=value_of(real(0, above_low=True)), metavar="X",
        help="arrivals a second (default: all at once)")  # fmt: skip
    add("--burstiness", type=value_of(real(0, above_low=True)), metavar="X",
        help="gaps between arrivals: 1 Poisson, below 1 in bursts (default: 1)")  # fmt: skip
    add("--tenants", type=value_of(count(1)), metavar="N", help="API keys, in turns (default: 1)")
    add("--seed", type=value_of(count(0)), default=0, metavar="N", help="of lengths (default: 0)")
    add = parser.add_argument_group("Hardware").add_argument
    add(
        "--cost", type=value_of(choice(*COST_MODELS)), metavar="|".join(COST_MODELS),
        help="8 billion parameters on an H200, or SmolLM2-135M on two cores (default: gpu)",
    )  # fmt: skip
    add(
        "--fit", nargs="?", const="", metavar="FILE",
        help="fit the cost from the steps of TRACE, or of FILE, and compare with TRACE",
    )  # fmt: skip
    add = parser.add_argument_group("Result").add_argument
    add("--json", metavar="FILE", help="write the figures to FILE")
    add_named_options(parser, OPTIONS)
    return parser


def _recording(args: argparse.Namespace) -> Recording | None:
    """The TRACE. Raises :class:`OptionError` where flags exclude each other."""
    if args.trace is None:
        if args.requests is None:
            raise OptionError("octavo simulate needs a TRACE or --requests.")
        if args.fit == "":
            raise OptionError("--fit without a TRACE needs a FILE.")
    else:
        for name in ("requests", *SYNTHETIC):
            if getattr(args, name) is not None:
                flag = name.replace("_", "-")
                raise OptionError(f"--{flag} has no effect on a TRACE: it says what was asked for.")
    if args.fit is not None and args.cost is not None:
        raise OptionError("Give one of --fit and --cost, not both.")
    args.cost = args.cost or "gpu"
    return None if args.trace is None else load_recording(args.trace)


def _trace(args: argparse.Namespace, recording: Recording | None) -> Trace:
    if recording is not None:
        return recording.trace()
    prompt, output = args.prompt or parse_lengths("512"), args.output or parse_lengths("128")
    draw, number = np.random.default_rng(args.seed), args.requests
    arrivals = arrival_times(
        number, args.request_rate, args.burstiness or 1.0, random.Random(args.seed)
    )
    return Trace(
        arrival=np.array(arrivals),
        prompt=prompt.draw(draw, number),
        output=output.draw(draw, number),
        max_tokens=np.full(number, args.max_tokens or output.longest),
        tenant=[str(index % (args.tenants or 1)) for index in range(number)],
    )


def _check_lengths(trace: Trace, config: Config) -> None:
    longest = int(trace.prompt.max())
    if longest >= config.max_model_len:
        raise OptionError(
            f"A prompt of {longest} tokens leaves no room for an answer within "
            f"{config.max_model_len} (--max-model-len, --kv-cache-tokens)."
        )


def _cost(args: argparse.Namespace, recording: Recording | None) -> CostModel:
    if args.fit is None:
        return COST_MODELS[args.cost]
    if args.fit == "" and recording is not None:
        return recording.fit()
    return load_recording(args.fit).fit()


def _advance(bar: tqdm, ended: int) -> None:
    bar.update(ended - bar.n)


def _write(path: str, figures: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None
