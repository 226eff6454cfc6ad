"""The simulator keeps exact account of what the scheduler did, on a clock that it made up."""

import numpy as np
import pytest

from octavo.core.pages import PagePool
from octavo.core.scheduler import Scheduler
from octavo.core.steptime import StepTime
from octavo.tools.simulate.cost import CPU, GPU
from octavo.tools.simulate.outcome import weighted_percentile
from octavo.tools.simulate.simulator import Simulator
from octavo.tools.simulate.trace import Trace, backlog


def scheduler_of(pages: int, **others) -> Scheduler:
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 256, "max_model_len": 1024}
    return Scheduler(pool=PagePool(pages + 1), **settings | others)


def random_backlog(count: int, seed: int = 0) -> Trace:
    draw = np.random.default_rng(seed)
    return backlog(draw.integers(1, 120, count), draw.integers(1, 150, count), 512)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_counts_add_up_when_requests_are_preempted(prefix_caching: bool) -> None:
    trace = random_backlog(80)
    scheduler = scheduler_of(40, prefix_caching=prefix_caching)
    outcome = Simulator(scheduler, GPU).run(trace)
    stats = scheduler.stats()
    assert outcome.preemptions.sum() == stats.preemptions > 0
    assert outcome.finish == ["stop"] * len(trace)
    assert outcome.num_output.tolist() == trace.output.tolist()
    assert outcome.output_tokens == trace.output.sum() == stats.generation_tokens
    first_time = int((trace.prompt + trace.output - 1).sum())
    assert outcome.recomputed_tokens == outcome.computed_tokens - first_time > 0
    gaps = int((trace.output - 1).sum())
    assert outcome.steps.steady.sum() + len(outcome.pauses) == gaps
    assert outcome.steps.running.max() <= 32
    scheduler.audit()


def test_gaps_are_those_of_a_plain_record_of_every_token() -> None:
    trace = random_backlog(60, seed=1)
    scheduler = scheduler_of(40)
    times: dict[str, list[float]] = {}
    apply = scheduler.apply

    def recording(result, now):
        news = apply(result, now)
        for request_id in news.request_ids:
            times[request_id].append(now)
        for delta in news.deltas:
            times.setdefault(delta.id, []).extend([now] * len(delta.ids))
        return news

    scheduler.apply = recording
    outcome = Simulator(scheduler, CPU).run(trace)
    gaps = np.sort(np.concatenate([np.diff(ends) for ends in times.values()]))
    for percent in (1, 50, 99, 99.9, 100):
        index = max(0, int(np.ceil(len(gaps) * percent / 100)) - 1)
        assert outcome.gap_percentile(percent) == pytest.approx(gaps[index])
    firsts = np.array([times[str(number)][0] for number in range(len(trace))])
    assert outcome.ttft() == pytest.approx(firsts)


def test_an_answer_ends_at_max_tokens() -> None:
    trace = backlog(np.array([5, 6, 7]), np.array([100, 3, 10]), 10)
    outcome = Simulator(scheduler_of(40), GPU).run(trace)
    assert outcome.finish == ["length", "stop", "length"]
    assert outcome.num_output.tolist() == [10, 3, 10]


def test_the_clock_waits_for_arrivals_and_steps_take_what_they_cost() -> None:
    trace = Trace(np.array([1.0, 9.0]), np.array([10, 20]), np.array([3, 1]), np.array([8, 8]))
    cost = StepTime(base=0.5, per_token=0.01, per_row=0.1, per_context=0.001)
    steps = Simulator(scheduler_of(40), cost).run(trace).steps
    first = [0.5 + 0.1 + 0.010, 0.5 + 0.11 + 0.011, 0.5 + 0.11 + 0.012]
    assert steps.seconds == pytest.approx([*first, 0.5 + 0.2 + 0.020])
    assert steps.start == pytest.approx([1, 1 + first[0], 1 + sum(first[:2]), 9])


def test_a_backlog_priced_anew_is_the_run_of_that_price() -> None:
    trace = random_backlog(60)
    anew = Simulator(scheduler_of(40), GPU).run(trace).priced(CPU)
    direct = Simulator(scheduler_of(40), CPU).run(trace)
    assert anew.steps.start == pytest.approx(direct.steps.start)
    assert anew.gap_percentile(99) == pytest.approx(direct.gap_percentile(99))
    assert anew.output_rate == pytest.approx(direct.output_rate)


def test_a_run_with_arrivals_has_one_price() -> None:
    trace = Trace(np.array([1.0]), np.array([10]), np.array([3]), np.array([8]))
    with pytest.raises(ValueError, match="arrived at 0"):
        Simulator(scheduler_of(40), GPU).run(trace).priced(CPU)


def test_weighted_percentile_is_that_of_repeated_values() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 2, 0])
    assert [weighted_percentile(values, weights, p) for p in (50, 66, 67, 100)] == [1, 1, 3, 3]
    assert np.isnan(weighted_percentile(values, np.array([0, 0, 0]), 50))
