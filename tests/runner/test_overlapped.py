"""The runner of a GPU gives the plain runner's ids, one plan at a time or two under way.

In Triton's interpreter, where a graph is the body that it would capture.
"""
# ruff: noqa: E402  (without Triton, nothing here can be imported)

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

import tests.fakes.interpreter  # noqa: F401
from octavo.core.capacity import cache_layout
from octavo.core.groups import layer_groups
from octavo.core.pages import PagePool
from octavo.core.plan import Delta, StepOutput
from octavo.core.request import Request, Sampling
from octavo.core.scheduler import Scheduler
from octavo.core.spec import LayerSpec
from octavo.distributed.executor import LocalExecutor, OverlappedExecutor
from octavo.engine.loop import EngineLoop
from octavo.ops.api import Ops
from octavo.ops.sampling.gpu import TritonSamplingOps
from octavo.ops.sampling.reference import SamplingOps
from octavo.ops.triton.backend import TritonOps
from octavo.ops.triton.tiles import Card
from octavo.runner.graphs import graph_sizes, token_sizes
from octavo.runner.kv import allocate_kv
from octavo.runner.overlapped import OverlappedRunner
from octavo.runner.runner import Runner
from octavo.runner.sampler import Sampler
from octavo.runner.slots import Slots
from tests.fakes.tiny_models import tiny_model, tiny_spec

CPU = torch.device("cpu")
MAX_SEQS, MAX_LEN, MAX_TOKENS, PAGE = 5, 64, 24, 16  # 3 rows are padded to 4
SPEC = tiny_spec("qwen3", layers=(LayerSpec(), LayerSpec(mixer="sliding", window=20)))


def parts(ops: Ops, sampling: SamplingOps, num_pages: int) -> dict[str, Any]:
    groups = layer_groups(SPEC)
    kv = allocate_kv(
        num_pages, [len(g.layers) for g in groups], SPEC.num_kv_heads, PAGE, SPEC.head_dim,
        torch.float32, CPU, ops,
    )  # fmt: skip
    return {
        "model": tiny_model(SPEC, ops=ops),
        "sampler": Sampler(
            max_num_seqs=MAX_SEQS, vocab_size=SPEC.vocab_size, device=CPU, ops=sampling
        ),
        "kv": kv,
        "windows": [g.window for g in groups],
        "slots": Slots(MAX_SEQS, MAX_LEN, PAGE, len(groups)),
    }


def overlapped(num_pages: int, depth: int, graphs: bool = True) -> OverlappedRunner:
    runner = OverlappedRunner(
        **parts(TritonOps(Card.of(CPU)), TritonSamplingOps(), num_pages),
        hidden=(SPEC.hidden_size, torch.float32), max_tokens=MAX_TOKENS, depth=depth,
        max_graph_tokens=20 if graphs else None,
    )  # fmt: skip
    runner.capture(lambda share: None)
    return runner


def run(executor: Any, num_pages: int, requests: list[Request]) -> dict[str, list[Delta]]:
    """Deltas by request; a new request arrives at each of the first steps."""
    scheduler = Scheduler(
        pool=PagePool(num_pages, PAGE, cache_layout(SPEC, "float32", PAGE).blocks),
        max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN,
    )  # fmt: skip
    loop = EngineLoop(scheduler, executor)
    waiting, found = list(requests), {request.id: [] for request in requests}
    for request in (waiting.pop(0), waiting.pop(0)):
        loop.submit(request, 0.0)
    while loop.has_work or waiting:
        if waiting:
            loop.submit(waiting.pop(0), 0.0)
        for delta in deltas_of(loop.step(0.0)):
            found[delta.id].append(delta)
    scheduler.audit()
    assert scheduler.stats().pages_referenced == 0
    return found


def deltas_of(output: StepOutput) -> list[Delta]:
    common = zip(output.request_ids, output.tokens, strict=True)
    return [*(Delta(name, [token]) for name, token in common), *output.deltas]


def requests() -> list[Request]:
    samplings = [
        Sampling(temperature=0.0),
        Sampling(seed=4, temperature=0.9, top_k=20),
        Sampling(temperature=0.0, presence_penalty=0.7, logprobs=2, bad_words=((5, 6), (7,))),
        Sampling(temperature=0.0, prompt_logprobs=1),
    ]
    lengths = [5, 33, 1, 20]
    return [
        Request(
            id=str(i),
            prompt=[(7 * i + 3 * j) % SPEC.vocab_size for j in range(lengths[i])],
            sampling=sampling,
            max_tokens=3 + i,
        )
        for i, sampling in enumerate(samplings)
    ]


def ids(found: dict[str, list[Delta]]) -> dict[str, list[int]]:
    return {name: [t for d in deltas for t in d.ids] for name, deltas in found.items()}


def watch_graphs(runner: OverlappedRunner) -> set[str]:
    """Names of the graphs that run from now on."""
    names, run = set(), runner._graphs.run

    def watched(name: str, size: int) -> None:
        names.add(name)
        run(name, size)

    runner._graphs.run = watched  # type: ignore[method-assign]
    return names


@pytest.mark.parametrize(("depth", "graphs"), [(1, False), (2, True)])
def test_ids_are_those_of_the_plain_runner(depth: int, graphs: bool) -> None:
    num_pages = 13
    plain = run(
        LocalExecutor(Runner(**parts(Ops(), SamplingOps(), num_pages))), num_pages, requests()
    )
    runner = overlapped(num_pages, depth, graphs)
    executor = OverlappedExecutor(runner, depth) if depth > 1 else LocalExecutor(runner)
    replayed = watch_graphs(runner)
    found = run(executor, num_pages, requests())
    assert ids(found) == ids(plain)
    assert replayed == ({"decode", "mixed", "head"} if graphs else set())
    for name, deltas in found.items():
        assert deltas[-1].finish == plain[name][-1].finish


def test_graph_sizes() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    sizes = graph_sizes(512)
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert sizes[-3:] == [448, 480, 512]
    assert max(b - a for a, b in pairwise(sizes)) == 32


def test_mixed_steps_are_padded_little() -> None:
    assert token_sizes(0) == []
    assert token_sizes(10) == [10]
    assert token_sizes(70) == [32, 64, 70]
    sizes = token_sizes(2560)
    assert sizes[-1] == 2560
    assert all(b - a <= a / 16 for a, b in pairwise(sizes) if a >= 256)
    assert sorted(set(sizes)) == sizes
    assert len(sizes) < 64
