"""Figures without a server: data, percentiles, cost, and when a difference is one."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.load import OptionError
from octavo.core.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.tools.bench.client import Outcome, Record
from octavo.tools.bench.cost import query_key_pairs, step_cost, visible_tokens
from octavo.tools.bench.named import NAMED, Mix
from octavo.tools.bench.sse import Answer
from octavo.tools.bench.stats import compare, interleaved, overall, t_quantile
from octavo.tools.bench.summary import median_of, peak_concurrency, percentile, spread, summarise
from octavo.tools.bench.workload import Workload, arrival_times, read_lengths


def test_repetitions_have_other_ids_and_sides_the_same_lengths() -> None:
    workload = Workload(num_prompts=20, input_len=50, output_len=10, range_ratio=0.5)
    tasks = workload.tasks()
    assert tasks == workload.tasks()
    lengths = [(len(task.prompt), task.output_len) for task in tasks]
    assert all(25 <= a <= 75 and 5 <= b <= 15 for a, b in lengths)
    assert len(set(lengths)) > 5
    other = workload.tasks(side=1)
    assert [(len(task.prompt), task.output_len) for task in other] == lengths
    assert all(a.prompt != b.prompt for a, b in zip(tasks, other, strict=True))
    assert workload.tasks(repetition=1) != tasks
    ids = [token for task in tasks for token in task.prompt if isinstance(token, int)]
    assert 4000 <= min(ids) < max(ids) < 32_000
    assert len(tasks[0].text.split()) == len(tasks[0].prompt)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    times = arrival_times(20_001, 5.0, burstiness, random.Random(1))
    gaps = [b - a for a, b in pairwise(times)]
    mean = statistics.fmean(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_without_a_rate_everything_arrives_at_once() -> None:
    assert Workload(num_prompts=3).arrivals(3) == [0.0, 0.0, 0.0]


def test_named_workloads_are_what_they_say() -> None:
    tokens = {}
    for name in NAMED:
        tasks = Workload(dataset=name).tasks()
        tokens[name] = (len(tasks), sum(len(t.prompt) for t in tasks))
        assert Workload(dataset=name).tasks() == tasks
        assert Workload(dataset=name).tasks(1) != tasks
    assert tokens.pop("W6")[0] > 400
    assert tokens == {
        "W1": (256, 142_827), "W2": (1, 128), "W3": (32, 131_072), "W4": (512, 16_384),
        "W5": (1024, 524_288),
    }  # fmt: skip
    assert sum(task.output_len for task in Workload(dataset="W1").tasks()) == 133_966
    assert len(Workload(dataset="W4", num_prompts=3).tasks()) == 3


def test_short_requests_of_a_mix_arrive_at_random_and_long_ones_like_a_clock() -> None:
    mix = Mix(seconds=2000.0)
    arrivals = mix.arrivals(random.Random(1))
    assert arrivals == sorted(arrivals)
    short = [due for due, lengths in arrivals if lengths == (512, 128)]
    long = [due for due, lengths in arrivals if lengths == (16_000, 32)]
    assert long == [1.0 + 2.0 * i for i in range(1000)]
    assert len(short) + len(long) == len(arrivals)
    gaps = [b - a for a, b in pairwise(short)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 8, rel=0.05)  # exponential
    assert statistics.median(gaps) == pytest.approx(math.log(2) / 8, rel=0.05)
    assert short[-1] < 2000.0


def test_a_mix_arrives_with_its_own_lengths() -> None:
    workload = Workload(dataset="W6")
    tasks = workload.tasks(2)
    due = workload.arrivals(len(tasks), 2)
    assert [when for when, task in zip(due, tasks, strict=True) if len(task.prompt) == 16_000] == [
        1.0 + 2.0 * i for i in range(30)
    ]


def test_a_file_of_prompts_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "output_len": 7}\n\n{"prompt": [1, 2]}\n')
    workload = Workload(dataset="jsonl", path=str(path), output_len=9)
    assert [(task.prompt, task.output_len) for task in workload.tasks()] == [
        ("Hello", 7),
        ([1, 2], 9),
    ]
    with pytest.raises(OptionError, match="at most 2, the prompts in"):
        Workload(dataset="jsonl", path=str(path), num_prompts=3).tasks()


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("nonsense", "line 1 is not JSON"),
        ('{"text": "a"}', 'must have "prompt"'),
        ('{"prompt": [1, "a"]}', 'must have "prompt"'),
        ('{"prompt": "a", "output_len": 0}', "not 0"),
        ("", "holds no prompt"),
    ],
)
def test_a_bad_line_is_named(line: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(OptionError, match=part):
        Workload(dataset="jsonl", path=str(path)).tasks()


def test_lengths_are_drawn_by_their_weights(tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("input,output,share\n10,5,9\n100,50,1\n")
    assert read_lengths(table) == [(10, 5, 9.0), (100, 50, 1.0)]
    workload = Workload(dataset="lengths", path=str(table), num_prompts=2000)
    lengths = [(len(task.prompt), task.output_len) for task in workload.tasks()]
    assert set(lengths) == {(10, 5), (100, 50)}
    assert lengths.count((10, 5)) / 2000 == pytest.approx(0.9, abs=0.03)
    listed = tmp_path / "lengths.json"
    listed.write_text("[[3, 4], [5, 6]]")
    assert read_lengths(listed) == [(3, 4, 1.0), (5, 6, 1.0)]
    listed.write_text("[[3, 0]]")
    with pytest.raises(OptionError, match=r"not \[3, 0\]"):
        read_lengths(listed)


EVENTS = (
    b': keep-alive\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\r\n\r\n'
    b'data:{"choices":[{"delta":{"content":"b"},"finish_reason":null}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_read_wherever_they_are_cut(cuts: list[int]) -> None:
    answer = Answer()
    places = [0, *sorted(cuts), len(EVENTS)]
    for i, (start, end) in enumerate(pairwise(places)):
        answer.feed(EVENTS[start:end], float(i))
    assert len(answer.stamps) == 2  # neither the role nor the finish reason is a token
    assert answer.stamps == sorted(answer.stamps)
    assert answer.usage == (5, 3)
    assert answer.finished
    assert answer.error is None


def test_a_completion_whose_text_is_held_back_counts_and_an_error_is_kept() -> None:
    answer = Answer()
    answer.feed(b'data: {"choices":[{"text":"","finish_reason":null}]}\n', 1.0)
    answer.feed(b'data: {"error":{"message":"The engine  died."}}\n', 2.0)
    assert answer.stamps == [1.0]
    assert answer.error == "an error event: The engine died."
    only_end = Answer()
    only_end.feed(b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n', 3.0)
    assert only_end.stamps == [3.0]


def test_percentiles_are_interpolated() -> None:
    values = [float(value) for value in range(101)]
    random.Random(0).shuffle(values)
    assert spread(values) == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert spread([]) is None


def test_a_repetition_from_its_records() -> None:
    records = [
        Record(10.0, 10.1, [10.3, 10.4, 10.6], 7, 3),
        Record(10.0, 10.2, [10.5, 10.7, 11.0], 9, 5),
        Record(10.0, 10.2, [10.5], 9, 1, error="HTTP 500"),
    ]
    rep = summarise(Outcome(records, 10.0, 0.0, 0.5), {"ttft_ms": 250})
    assert (rep["completed"], rep["failed"], rep["errors"]) == (2, 1, {"HTTP 500": 1})
    assert rep["seconds"] == pytest.approx(1.0)
    assert rep["output_tok_s"] == pytest.approx(8)
    assert rep["input_tok_s"] == pytest.approx(16)
    assert rep["ttft_ms"]["mean"] == pytest.approx(250)
    assert rep["itl_ms"]["p50"] == pytest.approx(200)
    assert rep["tpot_ms"]["mean"] == pytest.approx((300 / 2 + 500 / 4) / 2)
    assert rep["e2e_ms"]["mean"] == pytest.approx(650)
    assert rep["goodput_req_s"] == pytest.approx(1)
    assert rep["late_ms"] == pytest.approx(200)
    assert peak_concurrency(records[:2]) == 2
    assert median_of([rep, rep], "ttft_ms") == pytest.approx(rep["ttft_ms"])
    assert median_of([rep, rep | {"ttft_ms": None}], "ttft_ms") is None


@pytest.mark.parametrize(
    ("p", "freedom", "value"),
    [(0.995, 4, 4.6041), (0.99, 1, 31.8205), (0.975, 5, 2.5706), (0.975, 2.5, 3.5747)],
)
def test_t_quantiles_equal_the_tables(p: float, freedom: float, value: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(value, rel=1e-4)


Rep = dict[str, Any]


def synthetic(draw: random.Random, factor: float, noise: float, started: float) -> Rep:
    """A repetition whose latencies are ``factor`` longer, all of them with noise of their own."""

    def around(value: float) -> float:
        return value * math.exp(draw.gauss(0, noise))

    return {
        "started": started,
        "output_tok_s": around(1000 / factor),
        "ttft_ms": {"p50": around(100 * factor), "p99": around(150 * factor)},
        "itl_ms": {"p50": around(20 * factor), "p99": around(40 * factor)},
        "e2e_ms": {"p50": around(700 * factor)},
    }


def try_out(
    draw: random.Random, factor: float, *, noise: float = 0.01, drift: float = 0.0, pairs: int = 6
) -> tuple[Sequence[Rep], Sequence[Rep]]:
    sides: tuple[list[Rep], list[Rep]] = ([], [])
    for pair in range(pairs):
        weather = math.exp(draw.gauss(0, drift))
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            own = weather * (factor if side else 1.0)
            place = 2.0 * pair + (side if pair % 2 == 0 else 1 - side)
            sides[side].append(synthetic(draw, own, noise, place))
    return sides


def verdicts(count: int, factor: float, **how: Any) -> list[str]:
    draw = random.Random(7)
    return [overall(compare(*try_out(draw, factor, **how))) for _ in range(count)]


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.05])
def test_equals_rarely_differ(noise: float) -> None:
    found = verdicts(100, 1.0, noise=noise)
    assert found.count("no difference") >= 96  # 99 expected where noise exceeds the smallest effect


def test_five_per_cent_are_seen_and_have_a_direction() -> None:
    assert verdicts(60, 1.05).count("worse") >= 58
    assert verdicts(60, 1 / 1.05).count("better") >= 58


def test_what_drifts_cancels_between_pairs() -> None:
    drifting = [try_out(random.Random(seed), 1.05, drift=0.2) for seed in range(20)]
    assert sum(overall(compare(a, b)) == "worse" for a, b in drifting) >= 18
    for a, _ in drifting:  # the same figures, as if the sides had been measured one after the other
        for rep in a:
            rep["started"] -= 1000
    assert sum(overall(compare(a, b)) == "worse" for a, b in drifting) <= 4


def test_pairs_are_recognised_by_their_times() -> None:
    def at(*times: float) -> list[Rep]:
        return [{"started": time} for time in times]

    assert interleaved(at(1, 4, 5), at(2, 3, 6))
    assert not interleaved(at(1, 2), at(3, 4))
    assert not interleaved(at(1, 2, 3), at(4, 5))


def test_an_effect_too_small_to_matter_is_none_and_one_repetition_says_nothing() -> None:
    assert overall(compare(*try_out(random.Random(0), 1.005, noise=1e-5))) == "no difference"
    assert overall(compare(*try_out(random.Random(0), 1.02, noise=1e-5))) == "worse"
    assert overall(compare(*try_out(random.Random(0), 1.5, pairs=1))) == "unknown"


def test_figures_may_point_both_ways() -> None:
    a, b = try_out(random.Random(0), 1.0, noise=0.001)
    for rep in b:
        rep["ttft_ms"] = {key: value * 2 for key, value in rep["ttft_ms"].items()}
        rep["output_tok_s"] *= 2
    assert overall(compare(a, b)) == "mixed"


@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 50))
def test_closed_forms_equal_loops(start: int, count: int, window: int) -> None:
    seen = [
        range(max(0, position + 1 - window) if window else 0, position + 1)
        for position in range(start, start + count)
    ]
    assert query_key_pairs(start, count, window) == sum(len(keys) for keys in seen)
    assert visible_tokens(start, count, window) == len(set().union(*seen))


def tiny_spec(**changes: Any) -> ModelSpec:
    values: dict[str, Any] = {
        "family": "llama",
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
        "vocab_size": 32,
        "max_position": 128,
        "norm_eps": 1e-5,
        "rope": RopeSpec(theta=1e4, dim=4),
        "layers": (LayerSpec(), LayerSpec()),
    }
    return ModelSpec(**(values | changes))


def test_a_steps_cost_by_hand() -> None:
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, MLP
    kv_token = 2 * 2 * 4 * 2  # layers, k and v, head_dim, bytes
    cost = step_cost(tiny_spec(), "bfloat16", [10, 0], [1, 3], 2)
    assert cost.num_bytes == (
        2 * (2 * layer + 32 * 8 + 4 * 8) + kv_token * (11 + 3) + kv_token * (1 + 3)
    )
    pairs = 11 + (1 + 2 + 3)
    assert cost.flops == 2 * 2 * layer * 4 + 2 * 32 * 8 * 2 + 2 * 4 * 8 * pairs
    tied = step_cost(tiny_spec(tie_embeddings=True), "bfloat16", [10, 0], [1, 3], 2)
    assert tied == cost  # one matrix less, but the step reads the same
    silent = step_cost(tiny_spec(), "bfloat16", [10, 0], [1, 3], 0)
    assert cost.num_bytes - silent.num_bytes == 2 * 32 * 8
    wide = step_cost(tiny_spec(), "float32", [10, 0], [1, 3], 2)
    assert wide.num_bytes == 2 * cost.num_bytes
    sliding = tiny_spec(layers=(LayerSpec(), LayerSpec("sliding", window=4)))
    assert (
        step_cost(sliding, "bfloat16", [10], [1], 1).flops
        < step_cost(tiny_spec(), "bfloat16", [10], [1], 1).flops
    )
