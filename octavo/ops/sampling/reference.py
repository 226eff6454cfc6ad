"""Sampling operations in plain torch: the definition, and what any device can run.

**Truncation.** Ids are ordered by descending logit, lowest id first on ties. ``top_k`` keeps
the first k. ``top_p`` then keeps the smallest prefix whose share of the remaining mass
reaches p (within a factor ``1 - TOP_P_SLACK``, so that sums in another order cut at the same
id when probabilities are round numbers), always at least one. ``min_p`` keeps ids at
least min_p times as probable as the best. All in float64 on the given fp32 logits.

**The draw.** The winner is the retained id of highest *perturbed score*
``s_i - log E_i``, with ``s_i = (logit_i - max) / temperature`` and E_i independent
exponentials: the Gumbel-max trick. E_i is a pure function of (seed, index, id), so a sample
depends neither on the batch nor on which ids were retained, and small errors of the
logits change it only if the two best scores are closer than those errors.

Ids share a draw in blocks of ``BLOCK``: of n independent Exp(1), the smallest is Exp(n), its
holder is uniform, and the others exceed it by fresh Exp(1) (memorylessness). So
``E_i = m`` for the holder and ``m + e_i`` for the others, with m, the holder and e_i from
Philox 4x32-10 (see :func:`philox`). A fast backend draws m for every block and skips what
cannot win with it, which leaves a few hundred draws out of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
TOP_P_SLACK = 1e-9

# Row status.
OK = 0
NON_FINITE = 1  # a NaN or +inf among the logits
ALL_MASKED = 2  # every logit is -inf

# Prompt ids are marked, output ids are counted, in one int32 an id.
PROMPT_FLAG = 1 << 30

_WORD = 0xFFFFFFFF
_TOKEN_STREAM = 0
_BLOCK_STREAM = 1
_CHUNK_ELEMENTS = 1 << 22  # bounds the float64 temporaries of a draw


@dataclass(slots=True)
class DrawParams:
    """Parameters of N rows, one entry each, on the device of the logits.

    ``temperature`` float64 (0 = greedy), ``top_k`` int64 (0 = off), ``top_p`` and ``min_p``
    float64, ``seed`` int64 (the bits of an unsigned seed), ``index`` int64 (number of ids the
    request has generated before). ``all_greedy`` is known on the host.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    index: Tensor
    all_greedy: bool = False

    def __getitem__(self, rows: slice) -> DrawParams:
        return DrawParams(
            self.temperature[rows], self.top_k[rows], self.top_p[rows],
            self.min_p[rows], self.seed[rows], self.index[rows],
        )  # fmt: skip


@dataclass(slots=True)
class PenaltyParams:
    """Rows to penalise: row ``rows[j]`` of the logits with row ``count_rows[j]`` of the counts.

    ``rows`` and ``count_rows`` int64 [M]; the penalties fp32 [M].
    """

    rows: Tensor
    count_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(slots=True)
class TopLogprobs:
    """Of N rows: ``target`` float64 [N] log-probability and ``rank`` int64 [N] (1-based) of the
    row's target id; ``ids`` int64 and ``values`` float64 [N, k], best first."""

    target: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor


class SamplingOps:
    """What the sampler may ask of a device. ``logits`` are fp32 [N, vocab], contiguous."""

    name = "reference"

    def warm_up(self) -> None:
        """Compile what would otherwise be compiled by the first request."""

    def status(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Status (OK, NON_FINITE, ALL_MASKED) of rows ``rows`` int64 [M]: int8 [M]."""
        return _status(logits[rows].amax(-1))

    def penalise(self, logits: Tensor, counts: Tensor, params: PenaltyParams) -> None:
        """Repetition (prompt and output), then frequency and presence (output only), in place.

        ``counts`` int32 [C, vocab]: how often the id is in the output, plus PROMPT_FLAG if it is in
        the prompt. Repetition: Keskar et al. 2019, divides positive logits and multiplies others.
        """
        count = counts[params.count_rows]
        z = logits[params.rows]
        repetition = params.repetition[:, None]
        z = torch.where(count != 0, torch.where(z > 0, z / repetition, z * repetition), z)
        output = (count & (PROMPT_FLAG - 1)).float()
        z = z - params.frequency[:, None] * output
        z = z - params.presence[:, None] * (output > 0)
        logits[params.rows] = z

    def draw(self, logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        """One id a row, int64 [N], and its status int8 [N]; without OK the id is arbitrary."""
        ids = logits.argmax(-1)
        status = _status(logits.gather(-1, ids[:, None])[:, 0])
        if params.all_greedy:
            return ids, status
        step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        drawn = [
            perturbed_scores(logits[at : at + step], params[at : at + step]).argmax(-1)
            for at in range(0, len(logits), step)
        ]
        return torch.where(params.temperature > 0, torch.cat(drawn), ids), status

    def top_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        """Log-softmax at ``targets`` int64 [N] and at the k best ids of each row."""
        own = logits.gather(-1, targets[:, None])
        total = logits.double().logsumexp(-1, keepdim=True)
        ids = torch.arange(logits.shape[1], device=logits.device)
        better = (logits > own) | ((logits == own) & (ids < targets[:, None]))
        best = logits.argsort(dim=-1, descending=True, stable=True)[:, :k]
        values = logits.gather(-1, best).double() - total
        return TopLogprobs((own - total)[:, 0], 1 + better.sum(-1), best, values)


def _status(largest: Tensor) -> Tensor:
    """From the largest logit of each row, which is NaN if any is."""
    bad = largest.isnan() | (largest == torch.inf)
    masked = largest == -torch.inf
    return (bad * NON_FINITE + masked * ALL_MASKED).to(torch.int8)


def retained(logits: Tensor, params: DrawParams) -> Tensor:
    """Ids that may be drawn, bool [N, vocab]. Rows are finite or -inf, not all -inf."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    scores = _scaled(ordered.double(), params)
    position = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.where(params.top_k > 0, params.top_k, logits.shape[1])
    keep = position < top_k[:, None]
    mass = (scores.exp() * keep).cumsum(-1)
    target = mass[:, -1:] * (params.top_p * (1.0 - TOP_P_SLACK))[:, None]
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    keep &= (before < target) | (params.top_p >= 1.0)[:, None] | (position == 0)
    keep &= scores >= params.min_p.log()[:, None]
    return torch.zeros_like(keep).scatter(-1, order, keep)


def perturbed_scores(logits: Tensor, params: DrawParams) -> Tensor:
    """``s_i - log E_i`` of the retained ids, -inf of the others: float64 [N, vocab]."""
    scores = _scaled(logits.double(), params)
    noise = exponentials(params.seed, params.index, logits.shape[1]).log()
    return torch.where(retained(logits, params), scores - noise, -torch.inf)


def score_gap(logits: Tensor, params: DrawParams) -> Tensor:
    """By how much the best perturbed score leads the second: float64 [N]; inf if it is alone.

    For greedy rows, by how much the best logit leads. A sample from logits that
    differ by less than half of it (in units of the temperature) must be the same.
    """
    greedy = (params.temperature == 0)[:, None]
    scores = torch.where(greedy, logits.double(), perturbed_scores(logits, params))
    best = scores.topk(2, -1).values
    return best[:, 0] - best[:, 1]


def _scaled(logits: Tensor, params: DrawParams) -> Tensor:
    temperature = torch.where(params.temperature > 0, params.temperature, 1.0)
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def exponentials(seed: Tensor, index: Tensor, size: int) -> Tensor:
    """E of every id below ``size``: float64 [N, size], a pure function of its arguments.

    Counters are (id or block, index, stream, 0), the key is the seed.
    """
    seed, index = seed[:, None], index[:, None]
    zero = torch.zeros_like(seed)
    ids = torch.arange(size, device=seed.device)[None]
    block = ids[0] // BLOCK
    words = philox(seed, (ids[:, : int(block[-1]) + 1], index, zero + _BLOCK_STREAM, zero))
    smallest = (_exponential(words[0], words[1]) / BLOCK)[:, block]
    holder = (words[2] % BLOCK)[:, block]
    words = philox(seed, (ids, index, zero + _TOKEN_STREAM, zero))
    excess = _exponential(words[0], words[1])
    return torch.where(ids % BLOCK == holder, smallest, smallest + excess)


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox 4x32-10 (Salmon et al., "Parallel random numbers", 2011): four words a counter.

    ``key`` is 64 bits, low word first; the counter's words and the result are int64 in [0, 2^32).
    """
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # int64 products wrap; their bits are those of the unsigned product.
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _exponential(high: Tensor, low: Tensor) -> Tensor:
    """Exp(1) from two 32-bit words, by 52 bits that are never 0 or 1."""
    bits = (high << 20) | (low >> 12)
    return -((bits.double() + 0.5) * 2.0**-52).log()
