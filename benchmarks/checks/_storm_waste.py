"""Waste: how much of the pages that chats hold is empty, as each ends within its last page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import Check
from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.tools.simulate.cost import COST_MODELS, CostModel
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import backlog

HISTOGRAM = Path(__file__).parents[1] / "data" / "chat_lengths.json"
PAGE_SIZE = 16
MAX_WASTE = 0.04
MAX_TOKENS = 2048
NUM_REQUESTS = 4000

Lengths = NDArray[np.int64]


def lines(check: Check, num_requests: int = NUM_REQUESTS) -> None:
    """Internal fragmentation, averaged over time; whether a step computes or waits."""
    for cost, model in COST_MODELS.items():
        waste = measure(model, num_requests)
        check.line(f"{cost}_internal_fragmentation", waste, "<=", MAX_WASTE)


def measure(model: CostModel, num_requests: int, page_size: int = PAGE_SIZE) -> float:
    """1 - tokens kept / (pages held × page size). In a step that leaves a running sequence out
    (until its prompt's turn comes) that sequence's tokens are not counted: an upper bound."""
    prompts, answers = draw_chats(num_requests, seed=0)
    scheduler = Scheduler(
        pool=PagePool(64 * 1024 // page_size, page_size),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
    )
    steps = Simulator(scheduler, model).run(backlog(prompts, answers, MAX_TOKENS)).steps
    held = steps.referenced * page_size
    return float(1 - (steps.context_tokens @ steps.seconds) / (held @ steps.seconds))


def draw_chats(count: int, seed: int) -> tuple[Lengths, Lengths]:
    """Tokens of questions and of answers, as often as in the histogram; uniform in a bucket."""
    known = json.loads(HISTOGRAM.read_text())
    buckets = np.array(known["counts"])
    draw = np.random.default_rng(seed)
    drawn = draw.choice(len(buckets), count, p=buckets[:, 2] / buckets[:, 2].sum())
    columns = []
    for column, name in enumerate(("prompt_edges", "output_edges")):
        edges, index = np.array(known[name]), buckets[drawn, column]
        columns.append(draw.integers(edges[index], edges[index + 1]))
    return columns[0], columns[1]
