"""Fair shares: one tenant sends ten times the load of each of nine others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.check import Check
from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.core.waiting import FairShare, Fcfs, Policy
from octavo.tools.simulate.cost import GPU
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace

QUIET_TENANTS = 9
LOUDER = 10  # times
MIN_SHARE = 0.9  # of an equal one
NUM_REQUESTS = 300  # of each quiet tenant
MAX_NUM_SEQS = 64


def lines(check: Check, num_requests: int = NUM_REQUESTS, seeds: int = 3) -> None:
    """The worst of nine shares, the pool being full from the start; fcfs shows what is at stake."""
    fair = [_least_share(FairShare(), num_requests, seed) for seed in range(seeds)]
    check.line("fair_least_share_of_an_equal_one", min(fair), ">=", MIN_SHARE, raw=fair)
    fcfs = [_least_share(Fcfs(), num_requests, seed) for seed in range(seeds)]
    check.line("fcfs_least_share_of_an_equal_one", max(fcfs), "<", MIN_SHARE, raw=fcfs)


def _least_share(policy: Policy, num_requests: int, seed: int) -> float:
    """Tokens served to the worst served quiet tenant over those served to a tenant in the mean,
    from the start until the first quiet one has nothing left to ask for."""
    trace = _trace(num_requests, seed)
    scheduler = Scheduler(
        pool=PagePool(24 * MAX_NUM_SEQS),
        max_num_seqs=2 * MAX_NUM_SEQS,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        policy=policy,
    )
    outcome = Simulator(scheduler, GPU).run(trace)
    tenants = np.array(trace.tenant)
    quiet = [f"quiet-{index}" for index in range(QUIET_TENANTS)]
    end = min(outcome.last_step[tenants == tenant].max() for tenant in quiet)
    tokens = np.where(outcome.last_step <= end, trace.prompt + outcome.num_output, 0)
    served = [_sum(tokens, tenants == tenant) for tenant in quiet]
    return min(served) / (tokens.sum() / (QUIET_TENANTS + 1))


def _sum(values: NDArray[np.int64], where: NDArray[np.bool_]) -> float:
    return float(values[where].sum())


def _trace(num_requests: int, seed: int) -> Trace:
    """All lengths are alike, and the requests come in random order at the same moment."""
    draw = np.random.default_rng([seed, num_requests])
    tenants = ["loud"] * (LOUDER * num_requests)
    tenants += [f"quiet-{index}" for index in range(QUIET_TENANTS)] * num_requests
    count = len(tenants)
    return Trace(
        arrival=np.zeros(count),
        prompt=draw.integers(20, 300, count, endpoint=True),
        output=draw.integers(1, 300, count, endpoint=True),
        max_tokens=np.full(count, 512),
        tenant=[tenants[index] for index in draw.permutation(count)],
    )
