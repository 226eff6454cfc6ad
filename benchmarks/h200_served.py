"""Rows of the H200 benchmark over HTTP: a server in processes of its own, loopback, real ids."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.check import ROOT
from benchmarks.checks._serving import Server
from benchmarks.gpu_engine import MODELS, TINY
from benchmarks.h200_engine import w5_shape
from benchmarks.h200_mixed import run_mix
from benchmarks.h200_results import Session, read_runs
from benchmarks.h200_table import OFFLINE_W5
from octavo.tools.bench.named import Mix
from octavo.tools.bench.serve import Target, preemptions, with_model

W6 = ("W6 TTFT p99", "W6 ITL p99", "W6 ITL p99.9", "W6 preemptions")
W6_LONG = "W6 TTFT of 16k prompts, median"
UNCHUNKED = "W6 without chunks, ITL p99.9"
CLIENTS = 4  # one would come near the limit of a Python process
WARM_S = 4.0  # of W6 before the run that counts
MIXED_S = 60.0
UNCHUNKED_S = 12.0  # enough to see it miss
SHORT_S = 10.0
# Steps end later than the target where a long prompt has much to read, hence less than the bound.
PACED = ("--target-itl-ms", "10", "--long-prefill-token-threshold", "1024")
# A step has room for the longest prompt and all that runs beside it, and nothing cuts it.
UNCHUNKED_FLAGS = ("--max-num-batched-tokens", "20000")
UNCHUNKED_PATH = Path(__file__).parent / "unchunked"


def served(session: Session) -> None:
    """W5, on a server as it comes."""
    if not session.wants("8B W5", "8B W5 over offline"):
        return
    with session.guard("8B W5"), serving(session.tiny) as url:
        rates = session.repeat("8B W5", lambda: _w5(session, url))
        if rates and session.wants("8B W5 over offline"):
            _over_offline(session, rates)


def mixed(session: Session) -> None:
    """W6, on a server that keeps the time between tokens; then without chunks."""
    if session.wants(*W6, W6_LONG):
        with session.guard(W6[0]), serving(session.tiny, PACED) as url:
            _w6(session, _target(url))
    if session.wants(UNCHUNKED):
        whole = {**os.environ, "PYTHONPATH": _path(UNCHUNKED_PATH, ROOT)}
        with session.guard(UNCHUNKED), serving(session.tiny, UNCHUNKED_FLAGS, whole) as url:
            found = _run_mix(session, _target(url), UNCHUNKED_S, seed=3)
            value = found["itl_ms"]["p99.9"]
            session.put(UNCHUNKED, [value], server=" ".join(UNCHUNKED_FLAGS), found=found)


def _path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def _w6(session: Session, target: Target) -> None:
    _run_mix(session, target, WARM_S, seed=1)
    before = preemptions(target)
    found = _run_mix(session, target, MIXED_S, seed=2)
    after = preemptions(target)
    if before is None or after is None:
        raise RuntimeError("the server tells no preemptions")
    values = (
        found["ttft_ms"]["p99"], found["itl_ms"]["p99"], found["itl_ms"]["p99.9"], after - before,
    )  # fmt: skip
    session.put(W6[0], [values[0]], server=" ".join(PACED), found=found)
    for row, value in zip(W6[1:], values[1:], strict=True):
        session.put(row, [value])
    session.put(W6_LONG, [found["long_ttft_ms"]["p50"]])


@contextmanager
def serving(
    tiny: bool, flags: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of ``octavo serve`` with random weights and a tokenizer of the model's size."""
    with tempfile.TemporaryDirectory() as folder:
        config: dict[str, Any] = (
            TINY if tiny else json.loads((MODELS / "llama3-8b" / "config.json").read_text())
        )
        length = 2000 if tiny else 20_000
        longer = {"max_position_embeddings": length}  # whatever the random weights were made for
        Path(folder, "config.json").write_text(json.dumps(config | longer))
        write_tokenizer(Path(folder), config["vocab_size"])
        small = ("--device", "cpu", "--kv-cache-tokens", "32k") if tiny else ()
        command = [
            sys.executable, "-m", "octavo", "serve", folder, "--load-format", "dummy",
            "--max-model-len", str(length), "--port", "0", "--disable-access-log",
            *small, *flags,
        ]  # fmt: skip
        with Server(command, env=env, limit_s=120) as server:
            print(f"server: ready in {server.ready_s:.1f} s", flush=True)
            yield server.url


def write_tokenizer(folder: Path, size: int, seed: int = 0) -> None:
    """``tokenizer.json`` of byte-level BPE: the 256 bytes, and random words up to ``size``. Without
    merges it cuts texts into bytes; ids become text at the cost of a real vocabulary's."""
    from tokenizers.pre_tokenizers import ByteLevel

    draw = random.Random(seed)
    vocab = {byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}
    letters = [byte for byte in vocab if byte.isalpha()]
    while len(vocab) < size:
        word = "".join(draw.choices(letters, k=draw.randint(3, 9)))
        vocab.setdefault(draw.choice(("", "Ġ")) + word, len(vocab))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def _w5(session: Session, url: str) -> float:
    """Output tokens a second, by ``octavo bench serve``."""
    count, streams, num_input, num_output = w5_shape(session)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "w5.json")
        command = [
            sys.executable, "-m", "octavo", "bench", "serve", "--base-url", url,
            "--num-prompts", count, "--max-concurrency", streams, "--input-len", num_input,
            "--output-len", num_output, "--seed", time.time_ns() % 2**31, "--reps", 1,
            "--vocab-size", _vocab_size(session), "--client-processes", CLIENTS,
            "--json", path,
        ]  # fmt: skip
        subprocess.run([str(word) for word in command], check=True, timeout=300,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        (rep,) = json.loads(path.read_text())["reps"]
    if rep["failed"]:
        raise RuntimeError(f"{rep['failed']} of {count} requests failed: {rep['errors']}")
    return float(rep["output_tok_s"])


def _over_offline(session: Session, rates: list[float]) -> None:
    with session.guard("8B W5 over offline"):
        rows = {row["row"]: row for row in read_runs(session.path)[-1]["rows"]}
        if OFFLINE_W5 not in rows:
            raise RuntimeError("the offline rate of W5's lengths was not measured in this run")
        offline = rows[OFFLINE_W5]["value"]
        session.put("8B W5 over offline", [rate / offline for rate in rates])


def _target(url: str) -> Target:
    return with_model(Target(base_url=url))


def _run_mix(session: Session, target: Target, seconds: float, seed: int) -> dict[str, Any]:
    return run_mix(target, _mix(session, seconds), seed, _vocab_size(session))


def _vocab_size(session: Session) -> int:
    return 1024 if session.tiny else 128_000


def _mix(session: Session, seconds: float) -> Mix:
    if not session.tiny:
        return Mix(seconds=min(seconds, SHORT_S) if session.short else seconds)
    return Mix(2.0, 4.0, 1.0, short=(32, 8), long=(600, 4))
