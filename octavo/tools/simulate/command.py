"""``octavo simulate``: read the flags, run, print."""

from __future__ import annotations

import argparse
import json
import os
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
from octavo.tools.simulate.lengths import FORMS, MOST, parse_lengths
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
SYNTHETIC = ("prompt", "output", "max_tokens", "request_rate", "burstiness", "tenants", "seed")
MOST_REQUESTS = 10_000_000


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    recording = _recording(args)
    on_gpu = recording is None and args.cost == "gpu"
    options = options_of(args)
    config = resolve_setting(options, None if recording is None else recording.start, on_gpu)
    trace = _trace(args, recording)
    _check_lengths(trace, config, recording)
    trace = replace(trace, timeout=config.request_timeout, queue_timeout=config.queue_timeout)
    cost = _cost(args, recording)
    compared = {} if recording is None or args.fit is None else _recorded_figures(recording)
    if args.json is not None:
        _check_writable(args.json)
    simulator = Simulator(make_scheduler(config), cost)
    with tqdm(total=len(trace), desc="Simulated", unit="req", disable=None) as bar:
        outcome = simulator.run(trace, lambda ended: _advance(bar, ended))
    figures = summarise(trace, outcome)
    if compared:
        predicted, recorded = figures["output_tok_s"], compared["recorded_output_tok_s"]
        figures |= compared | {"predicted_over_recorded": predicted / recorded}
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
    add("--requests", type=value_of(count(1, MOST_REQUESTS)), metavar="N", help="how many")
    add("--prompt", **lengths, help=f"tokens a prompt: {FORMS} (default: 512)")
    add("--output", **lengths, help="tokens an answer, likewise (default: 128)")
    add("--max-tokens", type=value_of(count(1, MOST)), metavar="N",
        help="what each client asks for (default: the longest --output)")  # fmt: skip
    add("--request-rate", type=value_of(real(1e-6, 1e6)), metavar="X",
        help="arrivals a second (default: all at once)")  # fmt: skip
    add("--burstiness", type=value_of(real(1e-6, 1e6)), metavar="X",
        help="gaps between arrivals: 1 Poisson, below 1 in bursts (default: 1)")  # fmt: skip
    add("--tenants", type=value_of(count(1)), metavar="N", help="API keys, in turns (default: 1)")
    add("--seed", type=value_of(count(0)), metavar="N",
        help="of lengths and arrivals (default: 0)")  # fmt: skip
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
    if args.burstiness is not None and args.request_rate is None:
        raise OptionError("--burstiness needs a --request-rate: all requests arrive at once.")
    if args.fit is not None and args.cost is not None:
        raise OptionError("Give one of --fit and --cost, not both.")
    args.cost = args.cost or "gpu"
    return None if args.trace is None else load_recording(args.trace)


def _trace(args: argparse.Namespace, recording: Recording | None) -> Trace:
    if recording is not None:
        return recording.trace()
    prompt, output = args.prompt or parse_lengths("512"), args.output or parse_lengths("128")
    seed, number = args.seed or 0, args.requests
    draw = np.random.default_rng(seed)
    arrivals = arrival_times(number, args.request_rate, args.burstiness or 1.0, random.Random(seed))
    return Trace(
        arrival=np.array(arrivals),
        prompt=prompt.draw(draw, number),
        output=output.draw(draw, number),
        max_tokens=np.full(number, args.max_tokens or output.longest),
        tenant=[str(index % (args.tenants or 1)) for index in range(number)],
    )


def _check_lengths(trace: Trace, config: Config, recording: Recording | None) -> None:
    """Prompts fit; where only the KV cache limits what was recorded, answers do, too."""
    if recording is not None and config.sources["max_model_len"].startswith("derived"):
        longest = int((trace.prompt + trace.output).max())
        if longest > config.max_model_len:
            raise OptionError(
                f"The longest recorded request has {longest} tokens, and the KV cache holds "
                f"{config.max_model_len} (--kv-cache-tokens); --max-model-len cuts answers off."
            )
    longest = int(trace.prompt.max())
    if longest >= config.max_model_len:
        raise OptionError(
            f"A prompt of {longest} tokens leaves no room for an answer within "
            f"{config.max_model_len} (--max-model-len, --kv-cache-tokens)."
        )


def _recorded_figures(recording: Recording) -> dict[str, float]:
    """What a prediction is compared with, and what that leaves out."""
    figures: dict[str, float] = {"recorded_output_tok_s": recording.output_rate}
    if recording.num_steps_left_out:
        figures["recorded_steps_left_out"] = recording.num_steps_left_out
        figures["recorded_rows_left_out"] = recording.share_of_rows_left_out
    return figures


def _cost(args: argparse.Namespace, recording: Recording | None) -> CostModel:
    if args.fit is None:
        return COST_MODELS[args.cost]
    if args.fit == "" and recording is not None:
        return recording.fit()
    return load_recording(args.fit).fit()


def _advance(bar: tqdm, ended: int) -> None:
    bar.update(ended - bar.n)


def _check_writable(path: str) -> None:
    """Before a long run, not after it."""
    target = Path(path)
    if target.is_dir():
        raise OptionError(f"Cannot write {path}: it is a folder.")
    if not target.parent.is_dir():
        raise OptionError(f"Cannot write {path}: there is no folder {target.parent}.")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise OptionError(f"Cannot write {path}: permission denied.")


def _write(path: str, figures: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror}.") from None
