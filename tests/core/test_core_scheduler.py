"""Each rule of the scheduler by itself, against a strict fake worker at depth 1."""

from __future__ import annotations

from collections import Counter

import pytest

from octavo.core.errors import AuditError, InvalidRequest
from octavo.core.flight import Flight
from octavo.core.pages import BlockSpec
from octavo.core.plan import StepPlan, StepResult
from octavo.core.request import Request, Sampling
from octavo.core.waiting import AgedPriority, Fcfs
from tests.fakes.loop import AdmitAll, expected, ids_of, make_loop, request
from tests.fakes.runner import hash_script, scripted

# ---- budgets and order


def test_one_request_from_prompt_to_length() -> None:
    loop = make_loop()
    r = request("a", 10, 5)
    loop.submit(r)
    out = loop.run()["a"]
    assert (out.ids, out.finish, out.cached_tokens) == (expected(r), "length", 0)
    assert [(p.starts, p.counts) for p in loop.history[:3]] == [
        ([0], [10]),
        ([10], [1]),
        ([11], [1]),
    ]


def test_long_prompts_are_chunked_to_what_the_decodes_leave() -> None:
    loop = make_loop(tokens=8)
    loop.submit(request("a", 3, 9))
    loop.step()
    loop.submit(request("b", 20, 2))
    loop.step()
    assert (loop.history[-1].counts, loop.history[-1].samples) == ([1, 7], [True, False])
    loop.step()
    loop.step()
    assert loop.history[-1].counts == [1, 6]
    assert loop.history[-1].samples == [True, True]
    loop.run()


def test_sequence_budget_and_arrival_order() -> None:
    loop = make_loop(seqs=2)
    loop.submit(*(request(name, 3, 2) for name in "abcd"))
    loop.step()
    assert [j.tokens for j in loop.history[0].joins] == [request(n, 3).prompt for n in "ab"]
    assert loop.scheduler.stats().waiting == 2
    loop.run()


def test_lower_priority_number_runs_first() -> None:
    loop = make_loop(seqs=1, policy=AgedPriority())
    loop.submit(request("a", 3, priority=1), request("b", 3, priority=0))
    loop.submit(request("c", 3, priority=0))
    loop.run()
    order = [join.tokens for plan in loop.history for join in plan.joins]
    assert order == [request(name, 3).prompt for name in "bca"]


def test_a_policy_may_order_otherwise() -> None:
    class Shortest(Fcfs):
        def key(self, request: Request, now: float) -> float:
            return len(request.prompt)

    loop = make_loop(seqs=1, policy=Shortest())
    loop.submit(request("a", 9), request("b", 3))
    loop.run()
    assert [len(p.joins[0].tokens) for p in loop.history if p.joins] == [3, 9]


def test_leaves_come_with_the_next_slices_and_slots_are_reused() -> None:
    loop = make_loop(seqs=1)
    loop.submit(request("a", 3, 1))
    loop.run()
    assert loop.scheduler.plan(0.0) == StepPlan(1, page_counts=[[]], pages=[[]])
    loop.submit(request("b", 3, 1))
    loop.run()
    assert [(p.leaves, [j.slot for j in p.joins]) for p in loop.history] == [([], [0]), ([0], [0])]


def test_token_budget_must_cover_the_sequences() -> None:
    with pytest.raises(ValueError, match=r"7.*8"):
        make_loop(tokens=7, seqs=8)


# ---- ends


def test_stop_id_ends_a_request_and_is_reported() -> None:
    r = request("a", [5, 6], 9, stop_ids=frozenset({2, 7}))
    loop = make_loop(script=scripted({(5, 6): [9, 9, 7, 9]}))
    loop.submit(r)
    out = loop.run()["a"]
    assert (out.ids, out.finish, out.stop_id) == ([9, 9, 7], "stop", 7)


def test_a_stop_id_wins_over_the_last_allowed_token() -> None:
    loop = make_loop(script=scripted({(5, 6): [9, 2]}))
    loop.submit(request("a", [5, 6], 2, stop_ids=frozenset({2})))
    assert loop.run()["a"].finish == "stop"


def test_context_full_ends_with_length() -> None:
    loop = make_loop(max_len=12)
    loop.submit(request("a", 10, 50))
    out = loop.run()["a"]
    assert (len(out.ids), out.finish) == (2, "length")


def test_a_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    loop = make_loop(pages=2, page_size=16)
    loop.submit(request("a", 30, 64), request("b", 3, 2))
    outputs = loop.run()
    assert (len(outputs["a"].ids), outputs["a"].finish) == (2, "length")
    assert outputs["b"].ids == expected(request("b", 3, 2))


def test_a_prompt_that_can_never_fit_ends_at_once() -> None:
    loop = make_loop(pages=2, page_size=16)
    loop.submit(request("a", 32, 5))
    assert loop.outputs["a"].finish == "length"
    assert not loop.scheduler.has_work


def test_abort_waiting_running_and_unknown() -> None:
    loop = make_loop(seqs=1)
    loop.submit(request("a", 5, 9), request("b", 5, 9))
    loop.step()
    loop.abort("b")
    loop.abort("a")
    assert [loop.outputs[name].finish for name in "ab"] == ["abort", "abort"]
    assert len(loop.outputs["a"].ids) == 1
    assert loop.scheduler.abort("a", 0.0) is None
    assert loop.scheduler.abort("nobody", 0.0) is None
    loop.run()


def test_aborted_waiting_requests_do_not_pile_up() -> None:
    loop = make_loop(seqs=1)
    loop.submit(request("a", 5, 200))
    loop.step()
    for index in range(1000):
        loop.submit(request(f"w{index}", 5))
        loop.scheduler.abort(f"w{index}", 0.0)
    assert len(loop.scheduler._policy._heap) <= 66  # type: ignore[attr-defined]
    assert loop.scheduler.stats().waiting == 0


def test_an_id_in_use_is_refused() -> None:
    loop = make_loop()
    loop.submit(request("a", 5))
    with pytest.raises(InvalidRequest, match="'a'"):
        loop.scheduler.submit(request("a", 5), 0.0)
    loop.run()
    assert loop.scheduler.submit(request("a", 5), 0.0) is None


def test_a_fault_ends_its_request_alone() -> None:
    loop = make_loop(worker={"nan_at": {(2, 1)}})
    requests = [request(name, 5, 6) for name in "abc"]
    loop.submit(*requests)
    outputs = loop.run()
    assert [outputs[n].finish for n in "abc"] == ["length", "error", "length"]
    assert outputs["b"].error_code == "non_finite_logits"
    assert len(outputs["b"].ids) == 1
    assert outputs["a"].ids == expected(requests[0])
    assert outputs["c"].ids == expected(requests[2])


def test_a_fault_in_a_chunk_publishes_nothing() -> None:
    loop = make_loop(tokens=8, worker={"nan_at": {(1, 0)}})
    loop.submit(request("a", 20, 6))
    assert loop.run()["a"].finish == "error"
    assert loop.scheduler.stats().pages_cached == 0


@pytest.mark.parametrize("moment", ["planned", "torn"])
def test_forgetting_all_leaves_nothing_in_use(moment: str) -> None:
    loop = make_loop(seqs=2)
    loop.submit(*(request(name, 9, 6) for name in "abc"))
    loop.step()
    assert loop.scheduler.stats().pages_cached + loop.scheduler.stats().pages_referenced
    if moment == "planned":
        loop.executor.submit(loop.scheduler.plan(0.0))
    else:  # as Ctrl-C in the middle of a call leaves it
        loop.scheduler._running[0].tables[0].pop()
        loop.scheduler._free_slots.append(0)
    loop.executor.reset()
    loop.scheduler.forget_all()
    loop.scheduler.audit()
    stats = loop.scheduler.stats()
    assert (stats.running, stats.waiting, stats.finished) == (0, 0, {"error": 3})
    assert stats.pages_free == stats.pages_total
    assert not loop.scheduler.has_work
    again = Request("d", request("a", 9).prompt, 2)
    loop.submit(again)
    loop.outputs = {"d": loop.outputs["d"]}
    out = loop.run()["d"]
    assert (out.ids, out.cached_tokens) == (expected(again), 0)


def test_a_result_that_does_not_fit_the_plan_is_refused() -> None:
    scheduler = make_loop().scheduler
    scheduler.submit(request("a", 5), 0.0)
    plan = scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="not the oldest"):
        scheduler.apply(StepResult(plan.step + 1, [0], [1], [5]), 0.0)
    with pytest.raises(RuntimeError, match="asked for one id"):
        scheduler.apply(StepResult(plan.step, [1], [1], [5]), 0.0)


# ---- prefix cache


def test_hits_are_whole_pages_and_leave_a_token_to_compute() -> None:
    loop = make_loop(page_size=16)
    prompt = list(range(64))
    for name in "abcd":
        loop.submit(request(name, prompt, 16))
        loop.run()
    assert [loop.outputs[name].cached_tokens for name in "abcd"] == [0, 48, 48, 48]
    assert len({tuple(loop.outputs[name].ids) for name in "abcd"}) == 1
    stats = loop.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (256, 144)


def test_generated_pages_are_hit_by_the_next_turn() -> None:
    loop = make_loop()
    first = request("a", 8, 9)
    loop.submit(first)
    loop.run()
    loop.submit(request("b", [*first.prompt, *loop.outputs["a"].ids, 1, 2], 2))
    loop.run()
    assert loop.outputs["b"].cached_tokens == 16  # all but the last of 17 was computed


def test_prefix_caching_off() -> None:
    loop = make_loop(prefix_caching=False)
    for name in "ab":
        loop.submit(request(name, list(range(20)), 9))
        loop.run()
    assert loop.outputs["b"].cached_tokens == 0
    assert loop.scheduler.stats().pages_cached == 0


def test_salts_do_not_share() -> None:
    loop = make_loop()
    for name, seed in (("a", b"x" * 32), ("b", b"y" * 32), ("c", b"x" * 32)):
        loop.submit(request(name, list(range(20)), 1, hash_seed=seed))
        loop.run()
    assert [loop.outputs[name].cached_tokens for name in "abc"] == [0, 0, 16]


def test_reset_forgets_and_what_runs_publishes_nothing_old() -> None:
    loop = make_loop()
    loop.submit(request("a", list(range(20)), 30))
    loop.step()
    loop.scheduler.reset_prefix_cache()
    loop.submit(request("b", list(range(20)), 2))
    outputs = loop.run()
    assert outputs["b"].cached_tokens == 0
    loop.submit(request("c", [*range(20), *outputs["a"].ids, 1], 2))
    assert loop.run()["c"].cached_tokens == 20  # b's prompt, nothing of a's answer


def test_prompt_logprobs_skip_the_cache_and_come_whole() -> None:
    loop = make_loop(tokens=8)
    prompt = list(range(30))
    for name in "ab":
        loop.submit(request(name, prompt, 2, sampling=Sampling(prompt_logprobs=1, logprobs=2)))
        loop.run()
    out = loop.outputs["b"]
    assert out.cached_tokens == 0
    assert [e.ids[0] for e in out.prompt_logprobs] == prompt[1:]
    assert [e.ids[0] for e in out.logprobs] == out.ids
    assert loop.scheduler.stats().prefix_query_tokens == 0


# ---- siblings


def siblings(prompt: list[int], n: int, max_tokens: int = 3) -> list[Request]:
    return [request(f"s{i}", prompt, max_tokens, parent=None if i == 0 else "s0") for i in range(n)]


def test_siblings_wait_for_the_parents_pages_and_hit_them() -> None:
    loop = make_loop(page_size=4, tokens=8)
    loop.submit(*siblings(list(range(18)), 3))
    loop.step()
    loop.step()
    assert [len(plan.slots) for plan in loop.history] == [1, 1]
    outputs = loop.run()
    assert [outputs[f"s{i}"].cached_tokens for i in range(3)] == [0, 16, 16]
    assert loop.executor.control("stats", {})["tokens_computed"] == 18 + 2 + 2 * (2 + 2)


def test_siblings_of_a_cached_prompt_join_with_their_parent() -> None:
    loop = make_loop(page_size=4)
    prompt = list(range(18))
    loop.submit(request("before", prompt))
    loop.run()
    loop.submit(*siblings(prompt, 4))
    loop.step()
    assert len(loop.history[-1].joins) == 4
    outputs = loop.run()
    assert [outputs[f"s{i}"].cached_tokens for i in range(4)] == [16] * 4


def test_siblings_of_a_parent_that_resumes_on_hits_join_with_it() -> None:
    loop = make_loop(page_size=4, tokens=8, seqs=4)
    prompt = list(range(18))
    loop.submit(*siblings(prompt, 2, max_tokens=40))
    loop.step()
    loop.submit(request("other", prompt))
    loop.scheduler._preempt(Flight(0, 0.0, 1), loop.scheduler._live["s0"], "decode")
    loop.step()
    loop.step()  # the prompt is in the cache, by another request
    assert [len(plan.joins) for plan in loop.history] == [1, 1, 2]
    loop.run()


def test_siblings_of_a_short_prompt_do_not_wait() -> None:
    loop = make_loop(page_size=4)
    loop.submit(*siblings([1, 2, 3, 4], 3))
    loop.step()
    assert len(loop.history[0].slots) == 3
    loop.run()


@pytest.mark.parametrize("how", ["abort", "caching off", "logprobs", "reset", "gone"])
def test_siblings_go_on_alone(how: str) -> None:
    loop = make_loop(page_size=4, tokens=8, prefix_caching=how != "caching off")
    family = siblings(list(range(18)), 3)
    if how == "logprobs":
        family = [
            Request(r.id, r.prompt, 3, Sampling(prompt_logprobs=0), parent=r.parent) for r in family
        ]
    if how == "gone":
        family = family[1:]
    loop.submit(*family)
    loop.step()
    if how == "abort":
        loop.abort("s0")
    elif how == "reset":
        loop.scheduler.reset_prefix_cache()
    if how in ("abort", "reset"):
        assert loop.scheduler.stats().waiting == 2
    outputs = loop.run()
    assert outputs["s2"].ids == outputs["s1"].ids == expected(family[-1])


def test_a_waiting_sibling_can_be_aborted() -> None:
    loop = make_loop(page_size=4, tokens=8)
    loop.submit(*siblings(list(range(18)), 3))
    loop.step()
    loop.abort("s1")
    outputs = loop.run()
    assert [outputs[f"s{i}"].finish for i in range(3)] == ["length", "abort", "length"]


# ---- memory pressure


def test_preemption_takes_the_newest_and_it_resumes_with_its_ids() -> None:
    loop = make_loop(pages=6, admission=AdmitAll(), prefix_caching=False)
    requests = [request(name, 7, 13) for name in "abc"]
    loop.submit(*requests)
    outputs = loop.run()
    assert ids_of(outputs) == {r.id: expected(r) for r in requests}
    assert loop.scheduler.stats().preemptions >= 2
    joins = [join for plan in loop.history for join in plan.joins]
    assert [j.tokens[:7] for j in joins[:3]] == [r.prompt for r in requests]
    resumed = joins[3]
    assert (len(resumed.tokens) > 7, resumed.prompt_len) == (True, 7)
    ended = [next(i for i, p in enumerate(loop.history) if j in p.joins) for j in joins]
    assert ended == sorted(ended)


def test_preemption_spares_priority_before_age() -> None:
    loop = make_loop(pages=5, admission=AdmitAll(), policy=AgedPriority())
    loop.submit(request("old", 7, 13, priority=1))
    loop.step()
    loop.submit(request("new", 7, 13, priority=0))
    outputs = loop.run()
    joins = [join.tokens[:7] for plan in loop.history for join in plan.joins]
    assert joins[2] == request("old", 7).prompt
    assert all(len(out.ids) == 13 for out in outputs.values())


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    loop = make_loop(pages=6, tokens=8, admission=AdmitAll())
    loop.submit(request("a", 3, 20), request("b", 16, 3))
    outputs = loop.run()
    assert loop.scheduler.stats().preemptions
    assert outputs["b"].cached_tokens == 0
    assert loop.scheduler.stats().prompt_tokens == 19


def test_admission_leaves_room_for_growth() -> None:
    loop = make_loop(pages=20, seqs=8, tokens=64)
    loop.submit(*(request(f"r{i}", 8, 24) for i in range(8)))
    loop.step()
    assert len(loop.history[0].joins) <= 3  # 2 pages and up to 6 of growth each
    loop.run()
    assert loop.scheduler.stats().preemptions <= 1


def test_load_far_above_capacity_ends_without_a_storm() -> None:
    loop = make_loop(pages=10 * 18, seqs=64, tokens=512, page_size=4)
    requests = [request(f"r{i}", [i, *range(5 + i % 3)], 64) for i in range(200)]
    loop.submit(*requests)
    outputs = loop.run()
    assert ids_of(outputs) == {r.id: expected(r) for r in requests}
    joins = Counter(join.tokens[0] for plan in loop.history for join in plan.joins)
    assert max(joins.values()) <= 1 + 5  # 20 preemptions of one request would be too many
    assert loop.scheduler.stats().preemptions <= 50
    assert len(loop.history) < 64 * 200 / 8


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    loop = make_loop(pages=10, admission=AdmitAll())
    loop.submit(request("a", 23, 4), request("big", 30, 2), request("small", 3, 2))
    loop.step()
    assert len(loop.history[0].joins) == 1
    loop.run()
    assert [len(j.tokens) for p in loop.history for j in p.joins] == [23, 30, 3]


def test_a_blocked_head_is_not_looked_up_again_before_pages_come_back() -> None:
    loop = make_loop(pages=10, admission=AdmitAll())
    loop.submit(request("a", 23, 12), request("big", 30, 2))
    looked_up = 0
    lookup = loop.scheduler.pool.lookup

    def counting(key: bytes) -> int | None:
        nonlocal looked_up
        looked_up += 1
        return lookup(key)

    loop.scheduler.pool.lookup = counting  # type: ignore[method-assign]
    for _ in range(10):
        loop.step()
    assert looked_up <= 4
    loop.run()


def test_a_blocked_head_profits_from_a_prompt_computed_meanwhile() -> None:
    loop = make_loop(pages=10, admission=AdmitAll())
    prompt = list(range(32))
    loop.submit(request("a", [*prompt, 40], 3), request("b", [*prompt, 41], 3))
    loop.step()
    assert loop.scheduler.stats().running == 1
    loop.step()
    stats = loop.scheduler.stats()
    assert (stats.running, stats.prefix_hit_tokens) == (2, 32)
    loop.run()


# ---- resumed requests


def test_generated_ids_count_as_output_and_are_not_sent_again() -> None:
    whole = request("a", 6, 10)
    ids = expected(whole)
    loop = make_loop()
    loop.submit(request("a", whole.prompt, 10, generated=ids[:4]))
    out = loop.run()["a"]
    assert out.ids == ids[4:]
    assert loop.history[0].joins[0].tokens == whole.prompt + ids[:4]
    assert loop.history[0].joins[0].prompt_len == 6
    assert loop.scheduler.stats().generation_tokens == 6


def test_a_resumed_request_that_was_complete_ends_at_once() -> None:
    loop = make_loop()
    loop.submit(request("a", 6, 4, generated=[5, 5, 5, 5]))
    loop.submit(request("b", 6, 4, generated=[5, 2], stop_ids=frozenset({2})))
    assert loop.outputs["a"].finish == "length"
    assert (loop.outputs["b"].finish, loop.outputs["b"].stop_id) == ("stop", 2)
    assert not loop.scheduler.has_work


# ---- layer groups


@pytest.mark.parametrize(
    "blocks",
    [
        (BlockSpec(window=9),),
        (BlockSpec(), BlockSpec(window=6)),
        (BlockSpec(window=5), BlockSpec(window=12), BlockSpec()),
        (BlockSpec(bytes_per_token=8), BlockSpec(kind="state", bytes_per_sequence=70)),
        (BlockSpec(kind="state", bytes_per_sequence=70),),
    ],
)
def test_groups_share_the_pool(blocks: tuple[BlockSpec, ...]) -> None:
    loop = make_loop(blocks=blocks, pages=60, tokens=16)
    head = list(range(22))
    requests = [request(f"r{i}", [*head[: 10 + i], 7, i], 20) for i in range(9)]
    for r in requests:
        loop.submit(r)
        loop.step()
    assert ids_of(loop.run()) == {r.id: expected(r) for r in requests}
    paged_only = all(block.kind == "paged" for block in blocks)
    assert (loop.scheduler.stats().prefix_hit_tokens > 0) == paged_only


def test_pages_that_left_the_window_come_back() -> None:
    loop = make_loop(blocks=(BlockSpec(window=8),), pages=40)
    loop.submit(request("a", 40, 30))
    for _ in range(20):
        loop.step()
    assert loop.scheduler.stats().pages_referenced <= 4
    loop.run()


# ---- counters


def test_counters_add_up() -> None:
    loop = make_loop(pages=12, admission=AdmitAll(), script=hash_script(50))
    requests = [request(f"r{i}", 5 + i, 12, stop_ids=frozenset({3, 4})) for i in range(12)]
    loop.submit(*requests)
    last = loop.scheduler.stats()
    names = ("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "prompt_tokens")
    while loop.scheduler.has_work:
        loop.step()
        if len(loop.history) == 6:
            loop.abort("r11")
        stats = loop.scheduler.stats()
        for name in (*names, "generation_tokens"):
            assert getattr(stats, name) >= getattr(last, name)
        last = stats
    assert last.generation_tokens == sum(len(out.ids) for out in loop.outputs.values())
    assert sum(last.finished.values()) == 12
    assert last.finished["abort"] == 1
    counted = sum(len(r.prompt) for r in requests if loop.outputs[r.id].ids)
    assert last.prompt_tokens == counted


def test_audit_finds_a_lost_page_and_a_lost_slot() -> None:
    scheduler = make_loop().scheduler
    scheduler.submit(request("a", 9), 0.0)
    scheduler.plan(0.0)
    scheduler.audit()
    scheduler._running[0].tables[0].pop()
    with pytest.raises(AuditError, match="pages"):
        scheduler.audit()
    other = make_loop().scheduler
    other._free_slots.pop()
    with pytest.raises(AuditError, match="slots"):
        other.audit()


def test_queue_times_count_first_admissions_only() -> None:
    loop = make_loop(pages=10, seqs=1, admission=AdmitAll())
    loop.submit(request("a", 4, 5), request("b", 4, 3))
    loop.run()
    stats = loop.scheduler.stats()
    # The loop's clock goes one second a step: "a" waits for one, "b" for the five of "a" more.
    assert stats.queue_time_sum == 1 + 6
    assert sum(stats.queue_times) == 2
