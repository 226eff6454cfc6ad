"""The sampler: every parameter is honoured, and only in the rows that ask for it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.core.plan import TokenLogprobs
from octavo.core.request import Sampling
from octavo.ops.cpu.jit import default_cache_dir
from octavo.ops.sampling.cpu import CpuSamplingOps
from octavo.ops.sampling.reference import SamplingOps
from octavo.runner.sampler import Sampler
from octavo.runner.sampling_state import SlotEdits

VOCAB = 64
GREEDY = Sampling(temperature=0.0)
CPU = CpuSamplingOps(threads=1, cache_dir=default_cache_dir())


@pytest.fixture(params=["reference", "numba"])
def sampler(request) -> Sampler:
    return make_sampler(SamplingOps() if request.param == "reference" else CPU)


def make_sampler(ops: SamplingOps = CPU, *, slots: int = 8, vocab: int = VOCAB) -> Sampler:
    return Sampler(max_num_seqs=slots, vocab_size=vocab, device=torch.device("cpu"), ops=ops)


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def descending(*best: int) -> Tensor:
    """One row of logits whose best ids are these, in this order, one apart."""
    row = torch.zeros(1, VOCAB)
    for place, token in enumerate(best):
        row[0, token] = 20.0 - place
    return row


def generate(
    sampler: Sampler, slot: int, row: Tensor, count: int, first_index: int = 0
) -> list[int]:
    """Ids of ``count`` steps that all see the same logits."""
    found = []
    for index in range(first_index, first_index + count):
        output = sampler.sample(row.clone(), [slot], [index])
        assert not output.faults
        found.append(int(output.ids[0]))
    return found


def join(sampler: Sampler, slot: int, prompt: list[int], output: list[int] = (), **values) -> None:
    sampling = replace(GREEDY, **values)
    sampler.join(slot, [*prompt, *output], len(prompt), sampling)


# --- masks and biases ----------------------------------------------------------------------


def test_greedy_is_the_argmax(sampler):
    logits = random_logits(3)
    for slot in range(3):
        join(sampler, slot, [1])
    expected = logits.argmax(-1)
    output = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert torch.equal(output.ids, expected)
    assert output.ids.dtype == torch.int64
    assert not output.logprobs
    assert not output.faults


def test_allowed_ids_are_all_there_is(sampler):
    join(sampler, 0, [1], allowed_ids=(5, 40))
    assert generate(sampler, 0, descending(3, 40, 5), 1) == [40]
    join(sampler, 1, [1], allowed_ids=(5, 40), temperature=50.0)
    assert set(generate(sampler, 1, descending(3, 40, 5), 60)) == {5, 40}


def test_bias_is_added_and_minus_100_bans(sampler):
    join(sampler, 0, [1], logit_bias={9: 100.0, VOCAB - 1: 0.5})
    assert generate(sampler, 0, descending(3), 1) == [9]
    join(sampler, 1, [1], logit_bias={VOCAB - 1: 1.5})
    assert generate(sampler, 1, descending(3, VOCAB - 1), 1) == [VOCAB - 1]
    join(sampler, 2, [1], logit_bias={3: -100.0, 4: -99.0}, temperature=2.0**15)
    row = torch.zeros(1, VOCAB)
    row[0, 3] = 1e6  # so far ahead that 100 less would change nothing
    assert 3 not in generate(sampler, 2, row, 50)


def test_minimum_length_holds_back_its_ids_until_it_is_reached(sampler):
    join(sampler, 0, [1], min_tokens=3, min_tokens_ids=(2, 7))
    assert generate(sampler, 0, descending(2, 7, 9), 5) == [9, 9, 9, 2, 2]
    # A request that resumes after two ids is held back for one more.
    join(sampler, 0, [1], output=[9, 9], min_tokens=3, min_tokens_ids=(2, 7))
    assert generate(sampler, 0, descending(2, 7, 9), 2, first_index=2) == [9, 2]


def test_bad_words_ban_their_last_id_after_their_first_ones(sampler):
    join(sampler, 0, [1], bad_words=((5,), (6, 7), (6, 6, 8)))
    assert generate(sampler, 0, descending(5, 6), 1) == [6]  # one id: always banned
    assert generate(sampler, 0, descending(7, 6), 1, 1) == [6]  # 6 was the last id
    assert generate(sampler, 0, descending(8, 7, 9), 1, 2) == [9]  # 6 6 before: 8 and 7 banned
    assert generate(sampler, 0, descending(8, 7), 1, 3) == [8]  # 9 before: both free
    assert generate(sampler, 0, descending(7), 1, 4) == [7]


def test_bad_words_see_the_prompt_and_resumed_ids(sampler):
    join(sampler, 0, [1, 6], bad_words=((6, 7),))
    assert generate(sampler, 0, descending(7, 9), 2) == [9, 7]
    join(sampler, 1, [1, 6], output=[3, 6], bad_words=((3, 6, 7),))
    assert generate(sampler, 1, descending(7, 9), 2, 2) == [9, 7]


def test_what_a_request_forbids_is_laid_out_once():
    """A step does no work for each id of a mask, a bias or a list of bad words."""
    words = tuple((i, i + 1) for i in range(50))
    sampling = replace(GREEDY, logit_bias={3: -100.0}, allowed_ids=(3, 5), bad_words=words)
    edits = SlotEdits([1, 7], sampling, VOCAB, torch.device("cpu"))
    assert edits.forbidden.sum() == VOCAB - 2
    assert edits.banned(0).tolist() == [3, 8]
    edits.accept(60)
    assert edits.banned(1) is edits.banned(2)
    assert len(edits._last_ids) == 50
    assert edits._lengths == [1]


def test_long_masks_of_many_requests_at_once(sampler):
    allowed = tuple(range(1, VOCAB, 2))
    for slot in range(4):
        join(sampler, slot, [1], allowed_ids=allowed if slot % 2 else None)
    ids = sampler.sample(descending(4, 9).repeat(4, 1), [0, 1, 2, 3], [0] * 4).ids
    assert ids.tolist() == [4, 9, 4, 9]


def test_ids_outside_the_vocabulary_are_no_matter(sampler):
    join(
        sampler, 0, [1], logit_bias={VOCAB: 5.0}, bad_words=((VOCAB + 3,), (1, VOCAB)),
        min_tokens=4, min_tokens_ids=(VOCAB + 9,), allowed_ids=(3, VOCAB),
        repetition_penalty=1.5,
    )  # fmt: skip
    assert generate(sampler, 0, descending(4, 3), 2) == [3, 3]


def test_a_request_that_allows_nothing_fails_alone(sampler):
    join(sampler, 0, [1], allowed_ids=(2,), min_tokens=1, min_tokens_ids=(2,))
    join(sampler, 1, [1])
    output = sampler.sample(descending(2, 3).repeat(2, 1), [0, 1], [0, 0])
    assert [(fault.slot, fault.code) for fault in output.faults] == [(0, "no_token_allowed")]
    assert output.ids[1] == 2
    assert generate(sampler, 0, descending(3, 2), 1, first_index=1) == [2]


# --- penalties -----------------------------------------------------------------------------


def test_penalties_see_what_they_should(sampler):
    """Prompt for repetition only; every new id counts from the next step on."""
    join(sampler, 0, [3], repetition_penalty=2.0)
    assert generate(sampler, 0, descending(3, 4), 1) == [4]
    join(sampler, 1, [3], presence_penalty=2.0)
    assert generate(sampler, 1, descending(3, 4, 5), 4) == [3, 4, 3, 3]
    join(sampler, 2, [3], frequency_penalty=0.6)
    assert generate(sampler, 2, descending(3, 4, 5), 6) == [3, 3, 4, 3, 4, 3]


def test_penalties_resume_from_known_ids(sampler):
    row = descending(3, 4, 5)
    values = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.01}
    join(sampler, 0, [3, 9], **values)
    whole = generate(sampler, 0, row, 10)
    join(sampler, 1, [3, 9], output=whole[:4], **values)
    assert generate(sampler, 1, row, 6, first_index=4) == whole[4:]


def test_neighbours_of_a_penalised_row_keep_their_ids(sampler):
    samplings = [
        Sampling(seed=1),
        Sampling(seed=2, frequency_penalty=1.05, repetition_penalty=1.3, logit_bias={4: 3.0}),
        Sampling(seed=3, temperature=0.0),
    ]
    for slot, sampling in enumerate(samplings):
        sampler.join(slot, [1, 2], 2, sampling)
        sampler.join(slot + 4, [1, 2], 2, sampling)
    for index in range(20):
        logits = random_logits(3, seed=index)
        together = sampler.sample(logits.clone(), [0, 1, 2], [index] * 3).ids.tolist()
        alone = [
            int(sampler.sample(logits[row : row + 1].clone(), [row + 4], [index]).ids[0])
            for row in range(3)
        ]
        assert together == alone


def test_a_slot_forgets_its_request(sampler):
    join(
        sampler, 0, [3], repetition_penalty=9.0, logit_bias={3: -100.0}, logprobs=2,
        bad_words=((4,),), min_tokens=9, min_tokens_ids=(5,), temperature=3.0,
    )  # fmt: skip
    sampler.leave(0)
    sampler.leave(0)  # leaving twice is harmless
    join(sampler, 0, [3])
    output = sampler.sample(descending(3, 4), [0], [0])
    assert output.ids.tolist() == [3]
    assert not output.logprobs
    join(sampler, 0, [3], presence_penalty=1.5)
    assert generate(sampler, 0, descending(3, 4), 2) == [3, 4]
    join(sampler, 0, [3], presence_penalty=1.5)  # counts start again
    assert generate(sampler, 0, descending(3, 4), 2) == [3, 4]


def test_count_memory_follows_the_slots_that_use_penalties():
    sampler = make_sampler(slots=64)
    for slot in range(64):
        join(sampler, slot, [1], presence_penalty=0.5 if slot < 5 else 0.0)
    assert len(sampler._penalties.counts) == 8
    for _ in range(3):  # rows are reused
        for slot in range(5):
            join(sampler, slot, [1], presence_penalty=0.5)
    assert len(sampler._penalties.counts) == 8


# --- the draw ------------------------------------------------------------------------------


def test_truncation_parameters_reach_the_draw(sampler):
    row = torch.arange(VOCAB, 0, -1).float()[None] * 0.1
    for values, most in [({"top_k": 3}, 3), ({"top_p": 0.4}, 6), ({"min_p": 0.7}, 4)]:
        sampler.join(0, [1], 1, Sampling(seed=5, **values))
        assert set(generate(sampler, 0, row, 150)) == set(range(most))


def test_seed_and_index_decide_and_nothing_else(sampler):
    logits = random_logits(1)
    for slot, seed in [(0, 7), (1, 8), (2, 7), (3, 2**64 - 1), (4, -1)]:
        sampler.join(slot, [slot] * (slot + 1), slot + 1, Sampling(seed=seed))
    ids = {slot: generate(sampler, slot, logits, 30) for slot in range(5)}
    assert ids[0] == ids[2]
    assert ids[0] != ids[1]
    assert ids[3] == ids[4]  # the same 64 bits
    assert len(set(ids[0])) > 5  # the index matters
    again = sampler.sample(logits.repeat(3, 1), [2, 1, 0], [4, 9, 20]).ids.tolist()
    assert again == [ids[0][4], ids[1][9], ids[0][20]]


def test_both_backends_agree_on_everything_at_once():
    samplings = [
        Sampling(seed=1, temperature=0.8, top_p=0.9, logprobs=3),
        Sampling(seed=2, top_k=7, frequency_penalty=0.9, bad_words=((5, 6), (1,)), logprobs=0),
        Sampling(seed=3, min_p=0.05, repetition_penalty=1.4, allowed_ids=tuple(range(0, 64, 2))),
        Sampling(temperature=0.0, presence_penalty=1.0, logit_bias={8: 2.5, 9: -100.0}),
        Sampling(seed=5, min_tokens=4, min_tokens_ids=(0, 1, 2), logprobs=20),
    ]
    samplers = [make_sampler(ops) for ops in (SamplingOps(), CPU)]
    for slot, sampling in enumerate(samplings):
        for sampler in samplers:
            sampler.join(slot, [1, 5, 5], 2, sampling)
    for index in range(1, 12):
        logits = random_logits(5, seed=index)
        one, two = (s.sample(logits.clone(), list(range(5)), [index] * 5) for s in samplers)
        assert torch.equal(one.ids, two.ids)
        assert one.logprobs.keys() == two.logprobs.keys() == {0, 1, 4}
        for slot, (entry,) in one.logprobs.items():
            (other,) = two.logprobs[slot]
            assert (entry.ids, entry.rank) == (other.ids, other.rank)
            assert entry.values == pytest.approx(other.values, abs=1e-9)


# --- faults --------------------------------------------------------------------------------


def test_a_row_that_is_not_finite_fails_alone(sampler):
    for slot in range(3):
        sampler.join(slot, [1], 1, Sampling(seed=slot, presence_penalty=0.5, logprobs=1))
    logits = random_logits(3)
    expected = sampler.sample(logits.clone(), [0, 1, 2], [0, 0, 0]).ids
    for slot in range(3):
        sampler.join(slot, [1], 1, Sampling(seed=slot, presence_penalty=0.5, logprobs=1))
    logits[1, 17] = torch.nan
    output = sampler.sample(logits, [0, 1, 2], [0, 0, 0])
    assert [(fault.slot, fault.code) for fault in output.faults] == [(1, "non_finite_logits")]
    assert output.ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert output.logprobs.keys() == {0, 2}
    assert int(sampler._penalties.counts.sum() & 0xFFFF) == 2  # the failed row counted nothing


def test_a_mask_does_not_hide_a_row_that_is_not_finite(sampler):
    join(sampler, 0, [1], allowed_ids=(3, 4))
    logits = descending(3)
    logits[0, 50] = torch.nan
    faults = sampler.sample(logits, [0], [0]).faults
    assert [fault.code for fault in faults] == ["non_finite_logits"]


# --- log-probabilities ---------------------------------------------------------------------


def test_log_probabilities_are_the_models_own(sampler):
    """Of the logits as given: no temperature, penalty, bias or truncation in them."""
    sampler.join(
        2, [1, 7], 2,
        Sampling(seed=3, temperature=0.3, top_k=4, repetition_penalty=3.0, logit_bias={9: 50.0},
                 logprobs=2),
    )  # fmt: skip
    sampler.join(5, [1], 1, Sampling(temperature=0.0, logprobs=0))
    logits = random_logits(2)
    expected = torch.log_softmax(logits.double(), -1)
    output = sampler.sample(logits, [2, 5], [0, 0])
    assert output.ids[0] == 9
    (entry,) = output.logprobs[2]
    best = expected[0].topk(2).indices.tolist()
    assert entry.ids == [9, *best]
    assert entry.values == pytest.approx(expected[0][[9, *best]].tolist(), abs=1e-6)
    assert entry.rank == 1 + int((expected[0] > expected[0, 9]).sum())
    (entry,) = output.logprobs[5]
    assert entry.ids == [int(output.ids[1])]
    assert entry.rank == 1


def test_impossible_tokens_are_reported_as_a_number(sampler):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 5] = 0.0
    sampler.join(0, [1], 1, Sampling(temperature=0.0, logprobs=3))
    (entry,) = sampler.sample(logits, [0], [0]).logprobs[0]
    assert entry == TokenLogprobs([5, 5, 0, 1], [0.0, 0.0, -9999.0, -9999.0], 1)


def test_prompt_log_probabilities(sampler):
    logits = random_logits(4)
    targets = [0, 63, 7, 7]
    expected = torch.log_softmax(logits.double(), -1)
    entries = sampler.prompt_logprobs(logits, targets, 2)
    for row, (entry, target) in enumerate(zip(entries, targets, strict=True)):
        best = expected[row].topk(2)
        assert entry.ids == [target, *best.indices.tolist()]
        assert entry.values == pytest.approx(
            [float(expected[row, target]), *best.values.tolist()], abs=1e-6
        )
        assert entry.rank == 1 + int((expected[row] > expected[row, target]).sum())
    assert sampler.prompt_logprobs(torch.full((1, VOCAB), torch.nan), [3], 0)[0].values == [-9999.0]
    (top,) = sampler.prompt_logprobs(logits[:1], [1], 0)
    assert top.ids == [1]
    assert math.isfinite(top.values[0])


def test_warm_up_compiles_for_any_vocabulary():
    sampler = make_sampler(vocab=300)
    sampler.warm_up()
    sampler.join(0, [1], 1, Sampling(top_p=0.5))
    assert 0 <= int(sampler.sample(random_logits(1, vocab=300), [0], [0]).ids[0]) < 300
