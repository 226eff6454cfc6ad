"""Time of sampling a step on CPU, beside the usual torch version that sorts the vocabulary.

    python benchmarks/sampling.py [--rows 64] [--vocab 49152] [--threads 2] [--step-ms 80]

A whole ``Sampler.sample`` call is timed: gathering parameters, masks, draw, results. The two
sides take turns and the best of all turns counts: the machine may be shared. Logits are synthetic:
"peaked" has the spread of a small chat model's on text (its nuclei at temperature 0.7 and
top_p 0.95 hold 1 to 100 ids), "broad" that of one fed random ids (nuclei of hundreds or
thousands), "flat" is what random weights give, the worst case for a partial selection.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.core.request import Sampling
from octavo.ops.sampling import select_sampling_ops
from octavo.runner.sampler import Sampler

CASES = {
    "greedy": Sampling(temperature=0.0),
    "T=0.7": Sampling(temperature=0.7),
    "T=0.7 top_p .95": Sampling(temperature=0.7, top_p=0.95),
    "T=1 top_p .95": Sampling(temperature=1.0, top_p=0.95),
    "T=0.7 top_p .95 top_k 50": Sampling(temperature=0.7, top_p=0.95, top_k=50),
    "T=0.7 min_p .05": Sampling(temperature=0.7, min_p=0.05),
    "T=0.7 penalties": Sampling(
        temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1
    ),
    "greedy logprobs 5": Sampling(temperature=0.0, logprobs=5),
}


def make_logits(kind: str, rows: int, vocab: int) -> Tensor:
    """Normal logits; broad: of various spreads; peaked: a few ids stand out, in some rows far."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "flat":
        return logits * 0.05
    if kind == "broad":
        return logits * (torch.rand(rows, 1, generator=generator) * 3.0 + 2.0)
    chosen = torch.randint(0, vocab, (rows, 30), generator=generator)
    height = torch.empty(rows, 30).exponential_(1 / 3.0, generator=generator)
    lift = torch.rand(rows, 1, generator=generator) * 8.0 + 10.0
    return (logits * 4.2).scatter_(1, chosen, lift + height)


def naive_sample(logits: Tensor, counts: Tensor, sampling: Sampling) -> Tensor:
    """Sort, cumulative sum, mask, multinomial: what is commonly written in torch."""
    if sampling.logprobs is not None:
        torch.log_softmax(logits, -1).topk(sampling.logprobs, -1)
    if sampling.repetition_penalty != 1.0:
        scaled = torch.where(
            logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
        )
        logits = torch.where(counts > 0, scaled, logits)
        logits = logits - sampling.frequency_penalty * counts
        logits = logits - sampling.presence_penalty * (counts > 0)
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        if sampling.top_k:
            ordered[:, sampling.top_k :] = -torch.inf
        shares = ordered.softmax(-1)
        ordered[shares.cumsum(-1) - shares > sampling.top_p] = -torch.inf
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered)
    shares = logits.softmax(-1)
    if sampling.min_p:
        shares[shares < sampling.min_p * shares.amax(-1, keepdim=True)] = 0.0
    return torch.multinomial(shares, 1)[:, 0]


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compare(logits: Tensor, sampling: Sampling, threads: int, rounds: int) -> tuple[float, float]:
    """Best times of our and the naive sampler, ms a step; each turn gets fresh logits."""
    rows, vocab = logits.shape
    device = torch.device("cpu")
    ops = select_sampling_ops(device, threads=threads)
    sampler = Sampler(max_num_seqs=rows, vocab_size=vocab, device=device, ops=ops)
    slots = list(range(rows))
    known = torch.randint(0, vocab, (rows, 256)).tolist()
    for slot in slots:
        sampler.join(slot, known[slot], 128, sampling)
    counts = torch.zeros(rows, vocab).scatter_(1, torch.tensor(known), 1.0)
    ours, naive = [], []
    for index in range(rounds + 1):
        step = logits.clone()
        ours.append(
            milliseconds(lambda step=step, index=index: sampler.sample(step, slots, [index] * rows))
        )
        naive.append(milliseconds(lambda: naive_sample(logits, counts, sampling)))
    return min(ours[1:]), min(naive[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--step-ms", type=float, default=80.0, help="decode step to compare with")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{args.rows} rows x {args.vocab}, {args.threads} threads; ms a step")
    print(f"{'logits':8}{'sampling':28}{'octavo':>8}{'torch':>9}{'ratio':>8}{'of step':>9}")
    for kind in ("peaked", "broad", "flat"):
        logits = make_logits(kind, args.rows, args.vocab)
        for name, sampling in CASES.items():
            ours, naive = compare(logits, sampling, args.threads, args.rounds)
            share = ours / args.step_ms
            print(f"{kind:8}{name:28}{ours:8.2f}{naive:9.2f}{naive / ours:7.1f}x{share:9.1%}")


if __name__ == "__main__":
    main()
