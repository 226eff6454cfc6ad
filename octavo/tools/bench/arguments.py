"""Flags that the measuring commands share. Names are vLLM's where vLLM has the flag."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping
from typing import Any

from octavo.config.kinds import choice, count, real
from octavo.config.load import OptionError
from octavo.tools.bench.named import NAMED
from octavo.tools.bench.workload import DATASETS, DEFAULT_NUM_PROMPTS, Workload
from octavo.tools.values import value_of

DATASET_ALIASES = {"custom": "jsonl", **{name.lower(): name for name in NAMED}}
ENDPOINTS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
    "/v1/chat/completions": "/v1/chat/completions",
}
GOAL_NAMES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2el": "e2e_ms"}


NUMBER = value_of(count(1))


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Workload")
    add = group.add_argument
    add(
        "--dataset-name", type=value_of(choice(*DATASETS, aliases=DATASET_ALIASES)),
        default="random", metavar="|".join(DATASETS),
        help="random token ids; prompts of a JSONL file; random ids with lengths drawn from a "
        "file; W1 to W6: lengths, arrivals and temperature of docs/performance.md (default: "
        "random)",
    )  # fmt: skip
    add("--dataset-path", metavar="FILE", help='JSONL of {"prompt": …, "output_len": n}; or JSON '
        "or CSV of input length, output length[, weight]")  # fmt: skip
    add("--num-prompts", type=NUMBER, metavar="N",
        help=f"requests (default: {DEFAULT_NUM_PROMPTS}; of JSONL and W1 to W6, all)")  # fmt: skip
    add("--input-len", "--random-input-len", type=NUMBER, default=512, metavar="N",
        help="tokens a random prompt (default: 512)")  # fmt: skip
    add("--output-len", "--random-output-len", type=NUMBER, default=128, metavar="N",
        help="tokens to generate, where the data does not say (default: 128)")  # fmt: skip
    add("--range-ratio", "--random-range-ratio", type=value_of(real(0, 1)), default=0.0,
        metavar="X", help="random lengths lie within ± this share (default: 0)")  # fmt: skip
    add("--vocab-size", type=value_of(count(16)), metavar="N",
        help="random ids are below this (default: the model's, or a server's 32000)")  # fmt: skip


def workload_of(
    args: argparse.Namespace, seed: int, vocab_size: int = 32_000, **more: Any
) -> Workload:
    """``vocab_size`` is what holds where the flag is not given; ``more``: of a load on a server.
    Raises :class:`OptionError`."""
    if args.dataset_name in NAMED:
        more = _named_load(args.dataset_name, more)
    return Workload(
        dataset=args.dataset_name,
        path=args.dataset_path,
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        range_ratio=args.range_ratio,
        vocab_size=args.vocab_size or vocab_size,
        seed=seed,
        **more,
    )


def _named_load(name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """``more`` for a named workload, which keeps to its own concurrency unless told another."""
    named = NAMED[name](random.Random(0))
    if not more and (named.due_s is not None or named.max_concurrency is not None):
        raise OptionError(f"{name} is a load on a server: octavo bench serve measures it.")
    if named.due_s is not None and more.get("request_rate") is not None:
        raise OptionError(f"{name} has its own arrivals: it takes no --request-rate.")
    streams = more.get("max_concurrency") or named.max_concurrency
    return {**more, "max_concurrency": streams}


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("Generation").add_argument
    add("--temperature", type=value_of(real(0)), metavar="X", help="default: 0; of W1, 0.6")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=None,
        help="generate all tokens asked for (default: yes, but not for JSONL)")  # fmt: skip


def temperature_of(args: argparse.Namespace) -> float:
    if args.temperature is not None:
        return float(args.temperature)
    named = NAMED.get(args.dataset_name)
    return named(random.Random(0)).temperature if named else 0.0


def add_serving_flags(parser: argparse.ArgumentParser) -> None:
    """Everything about a server's load but the server itself."""
    add_generation_flags(parser)
    group = parser.add_argument_group("Requests")
    add = group.add_argument
    add("--model", metavar="NAME", help="name to ask for (default: the first of /v1/models)")
    add("--endpoint", type=value_of(choice(*ENDPOINTS)), default="completions",
        metavar="completions|chat", help="route to measure (default: completions)")  # fmt: skip
    add("--api-key", metavar="KEY", help="key to send")
    add("--request-rate", type=_rate, metavar="X|inf",
        help="arrivals a second, whatever the server does (default: inf, all at once)")  # fmt: skip
    add("--burstiness", type=value_of(real(0, above_low=True)), default=1.0, metavar="X",
        help="gaps between arrivals: 1 Poisson, below 1 in bursts (default: 1)")  # fmt: skip
    add("--max-concurrency", type=NUMBER, metavar="N", help="requests under way at once, at most")
    add("--seed", type=value_of(count(0)), default=0, metavar="N", help="of the data (default: 0)")
    add("--num-warmups", type=value_of(count(0)), default=1, metavar="N",
        help="requests before the measurement begins, not counted (default: 1)")  # fmt: skip
    add("--client-processes", type=NUMBER, default=1, metavar="N",
        help="processes that send, where one is the limit (default: 1)")  # fmt: skip
    add("--request-timeout", type=value_of(real(0, above_low=True)), default=3600.0, metavar="S",
        help="seconds a request may take (default: 3600)")  # fmt: skip
    add("--goodput", type=_goal, nargs="+", action="extend", metavar="NAME:MS", default=[],
        help="count requests that keep these bounds: ttft, tpot, itl, e2el in ms")  # fmt: skip


def add_output_flags(parser: argparse.ArgumentParser, name: str, reps: int = 1) -> None:
    group = parser.add_argument_group("Result")
    group.add_argument("--reps", type=NUMBER, default=reps, metavar="N",
                       help=f"repetitions (default: {reps})")  # fmt: skip
    group.add_argument("--json", metavar="FILE", help="write the figures, raw ones too, to FILE")
    group.add_argument("--name", default=name, help=f"name of the measurement (default: {name})")


def _rate(given: str) -> float | None:
    value = (
        None if given.lower() in ("inf", "infinity") else value_of(real(0, above_low=True))(given)
    )
    return value if value is None else float(value)


def _goal(given: str) -> tuple[str, float]:
    name, _, bound = given.partition(":")
    try:
        limit = float(bound)
    except ValueError:
        limit = math.nan
    if name not in GOAL_NAMES or not limit > 0:
        names = ", ".join(GOAL_NAMES)
        raise argparse.ArgumentTypeError(f"must be NAME:MS with one of {names}, not {given!r}")
    return GOAL_NAMES[name], limit


def goals_of(args: argparse.Namespace) -> Mapping[str, float]:
    return dict(args.goodput)
