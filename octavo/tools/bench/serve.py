"""``octavo bench serve``: load on a server, seen from its clients."""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from octavo.core.errors import StartupError
from octavo.tools.bench.arguments import (
    ENDPOINTS,
    add_output_flags,
    add_serving_flags,
    add_workload_flags,
    goals_of,
    temperature_of,
    workload_of,
)
from octavo.tools.bench.client import Load, Outcome, run_load
from octavo.tools.bench.fleet import run_fleet
from octavo.tools.bench.http import encode_post, split_url
from octavo.tools.bench.named import NAMED
from octavo.tools.bench.report import build_report, device_name, serving_lines, write_report
from octavo.tools.bench.summary import summarise
from octavo.tools.bench.workload import Task, Workload
from octavo.tools.flags import Parser

DEFAULT_URL = "http://127.0.0.1:8000"
GET_TIMEOUT_S = 10.0
FIRST_TIMEOUT_S = 300.0  # some servers compile when the first request comes
HIGH_CPU_SHARE = 0.7
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the requests go
PREEMPTIONS = re.compile(r"^(octavo|vllm):num_preemptions_total(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server's route, and how to ask there. ``with_ids``: prompts go as token ids."""

    base_url: str
    endpoint: str = "completions"
    model: str | None = None
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    with_ids: bool = False

    def encode(self, task: Task) -> bytes:
        """The bytes of the request."""
        body: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": task.text}]
        else:
            body["prompt"] = task.prompt if self.with_ids else task.text
        body |= {
            "max_tokens": task.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        path = ENDPOINTS[self.endpoint]
        return encode_post(self.base_url, path, json.dumps(body).encode(), self.api_key)

    def get(self, path: str) -> str | None:
        """The text at ``path``, None if there is none."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        request = urllib.request.Request(self.base_url.rstrip("/") + path, headers=headers)
        try:
            with closing(DIRECT.open(request, timeout=GET_TIMEOUT_S)) as answer:
                return str(answer.read().decode(errors="replace"))
        except OSError:  # urllib's errors among them
            return None


class Bench:
    """One server under one workload, as often as asked."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        *,
        num_warmups: int = 1,
        client_processes: int = 1,
        timeout_s: float = 3600.0,
        goals: Mapping[str, float] | None = None,
        show_progress: bool = True,
    ) -> None:
        self.target = target
        self.workload = workload
        self._show_progress = show_progress
        self._num_warmups = num_warmups
        self._processes = client_processes
        self._timeout_s = timeout_s
        self._goals = goals or {}

    def measure(self, repetition: int = 0, side: int = 0) -> dict[str, Any]:
        """One repetition: its figures, as :func:`summarise` gives them, and preemptions."""
        tasks = self.workload.tasks(repetition, side)
        requests = [self.target.encode(task) for task in tasks]
        load = Load(
            base_url=self.target.base_url,
            requests=requests,
            due_s=self.workload.arrivals(len(requests), repetition),
            max_concurrency=self.workload.max_concurrency,
            timeout_s=self._timeout_s,
        )
        before = preemptions(self.target)
        outcome = self._run(load, f"Repetition {repetition + 1}")
        after = preemptions(self.target)
        rep = summarise(outcome, self._goals)
        if self.workload.max_concurrency is not None:
            rep["late_ms"] = None  # waiting for others is part of such a load
        rep["preemptions"] = None if before is None or after is None else after - before
        return rep

    def warm_up(self) -> None:
        """Other prompts of the same lengths: what will be measured must not be cached."""
        for task in self.workload.tasks()[: self._num_warmups]:
            prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[::-1]
            error = ask(self.target, Task(prompt, task.output_len), self._timeout_s)
            if error is not None:
                raise StartupError(f"A warm-up request to {self.target.base_url} failed: {error}.")

    def _run(self, load: Load, title: str) -> Outcome:
        from tqdm import tqdm

        hidden = None if self._show_progress else True  # None: where no terminal would show it
        with tqdm(total=len(load.requests), desc=title, unit="req", disable=hidden) as bar:
            return run_fleet(load, self._processes, bar.update)


def ask(target: Target, task: Task, timeout_s: float) -> str | None:
    """One request by itself; what went wrong with it."""
    load = Load(
        base_url=target.base_url, requests=[target.encode(task)], due_s=[0.0], timeout_s=timeout_s
    )
    return run_load(load, time.monotonic(), lambda: None).records[0].error


def preemptions(target: Target) -> int | None:
    """The server's count so far, None if it tells none. Octavo tells it under two names."""
    found: dict[str, float] = {}
    for prefix, value in PREEMPTIONS.findall(target.get("/metrics") or ""):
        found[prefix] = found.get(prefix, 0.0) + float(value)
    return int(next(iter(found.values()))) if found else None


def find_target(base_url: str, args: argparse.Namespace, ignore_eos: bool) -> Target:
    """The server at ``base_url``: its model's name, and whether it takes token ids."""
    split_url(base_url)
    target = Target(
        base_url=base_url,
        endpoint="chat" if "chat" in args.endpoint else "completions",
        model=args.model,
        api_key=args.api_key,
        temperature=temperature_of(args),
        ignore_eos=ignore_eos,
    )
    return with_model(target)


def with_model(target: Target) -> Target:
    """``target`` with what only the server can tell. Raises :class:`StartupError`."""
    if target.model is None:
        target = replace(target, model=first_model(target))
    if target.endpoint == "chat":
        return target
    ids = replace(target, with_ids=True)
    error = ask(ids, Task([100, 101, 102, 103], 1), FIRST_TIMEOUT_S)
    if error is None:
        return ids
    if error.startswith("HTTP 4"):  # it wants text; anything else that is wrong shows later
        return target
    raise StartupError(f"A first request to {target.base_url} failed: {error}.")


def first_model(target: Target) -> str:
    try:
        models = json.loads(target.get("/v1/models") or "")
        return str(models["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise StartupError(
            f"{target.base_url}/v1/models names no model: is a server running there (octavo serve "
            "starts one), and does it want --api-key?"
        ) from None


def server_versions(target: Target) -> dict[str, str]:
    version = _told(target, "/version", "version")
    dtype = _told(target, "/v1/models", "data", 0, "dtype")
    found = {"server": version, "server_dtype": dtype}
    return {name: value for name, value in found.items() if value is not None}


def server_device(target: Target) -> str | None:
    """The name of the server's device where it is this machine's, else what the server calls it
    (cpu or cuda); None if it does not tell."""
    device = _told(target, "/v1/models", "data", 0, "device")
    if device is not None and urlsplit(target.base_url).hostname in LOCAL_HOSTS:
        return device_name(device)
    return device


def _told(target: Target, path: str, *keys: str | int) -> str | None:
    """A text in the JSON at ``path``, None if there is none."""
    try:
        value = json.loads(target.get(path) or "")
        for key in keys:
            value = value[key]
    except (ValueError, LookupError, TypeError):
        return None
    return str(value)


def bench_of(base_url: str, args: argparse.Namespace) -> Bench:
    workload = workload_of(
        args,
        args.seed,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
    )
    workload.tasks()  # a mistake in the data comes before any request
    ignore_eos = workload.has_lengths if args.ignore_eos is None else args.ignore_eos
    return Bench(
        find_target(base_url, args, ignore_eos),
        workload,
        num_warmups=args.num_warmups,
        client_processes=args.client_processes,
        timeout_s=args.request_timeout,
        goals=goals_of(args),
    )


def report_of(bench: Bench, reps: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    target = bench.target
    workload = bench.workload.described() | {
        "endpoint": target.endpoint,
        "model": target.model,
        "prompts_as": "ids" if target.with_ids else "text",
        "ignore_eos": target.ignore_eos,
        "temperature": target.temperature,
    }
    return build_report(name, reps, workload, server_device(target), server_versions(target))


def warnings_of(reps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know before believing the figures."""
    lines = []
    share = max(rep["client_cpu_share"] for rep in reps)
    if share > HIGH_CPU_SHARE:
        lines.append(
            f"A client process used {share:.0%} of a core: the figures may be the client's, not "
            "the server's. Use more --client-processes."
        )
    errors: dict[str, int] = {}
    for rep in reps:
        for kind, number in rep["errors"].items():
            errors[kind] = errors.get(kind, 0) + number
    lines += [f"Failed: {number} × {kind}" for kind, number in errors.items()]
    return lines


def main(argv: Sequence[str]) -> int:
    parser = Parser("octavo bench serve", "Measure a server that speaks OpenAI's protocol.")
    parser.add_argument("--base-url", default=DEFAULT_URL, metavar="URL",
                        help=f"the server (default: {DEFAULT_URL})")  # fmt: skip
    add_serving_flags(parser)
    add_workload_flags(parser)
    add_output_flags(parser, "serve")
    args = parser.read(argv)
    bench = bench_of(args.base_url, args)
    bench.warm_up()
    reps = [bench.measure(repetition) for repetition in range(args.reps)]
    rate = "inf" if args.request_rate is None else f"{args.request_rate:g}"
    if args.dataset_name in NAMED and bench.workload.arrivals(1) != [0.0]:
        rate = args.dataset_name
    given = {"Request rate configured (RPS):": rate}
    if bench.workload.max_concurrency is not None:
        given["Maximum request concurrency:"] = str(bench.workload.max_concurrency)
    print("\n".join([*serving_lines(reps, given), *warnings_of(reps)]))
    if args.json is not None:
        write_report(args.json, report_of(bench, reps, args.name))
    return 0 if all(rep["completed"] for rep in reps) else 1
