"""Step times: the fit finds what made them, whatever comes first, and is not led astray."""

import random

import pytest

from octavo.core.steptime import StepTime, StepTimeFit, fit_step_time

TRUE = StepTime(base=0.019, per_token=0.0009, per_row=0.0002, per_context=1.2e-6)


def steps(count: int, *, seed: int = 0, prefills: float = 0.5) -> list[tuple[int, int, int]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        rows = draw.randint(1, 64)
        prefill = draw.randint(1, 512) if draw.random() < prefills else 0
        found.append((prefill, rows, prefill + rows * draw.randint(20, 800)))
    return found


def fitted(fit: StepTimeFit, count: int, truth: StepTime = TRUE, **how) -> StepTimeFit:
    for step in steps(count, **how):
        fit.observe(*step, truth.seconds(*step))
    return fit


def worst_error(fit: StepTimeFit, truth: StepTime = TRUE) -> float:
    return max(abs(fit.predict(*s) / truth.seconds(*s) - 1) for s in steps(200, seed=9))


def test_nothing_is_claimed_before_there_is_data() -> None:
    fit = StepTimeFit()
    assert not fit.ready
    assert fit.predict(100, 10, 1000) == 0.0
    assert not fitted(fit, 31).ready
    assert fitted(fit, 1).ready
    assert not fitted(StepTimeFit(), 100, prefills=0).ready  # no idea what a prompt costs


def test_the_fit_finds_the_coefficients() -> None:
    assert worst_error(fitted(StepTimeFit(), 200)) < 1e-3


def test_noise_averages_out_and_no_coefficient_is_negative() -> None:
    draw, fit = random.Random(1), StepTimeFit()
    for step in steps(600):
        fit.observe(*step, TRUE.seconds(*step) * draw.lognormvariate(0, 0.1))
        now = fit.model
        assert min(now.base, now.per_token, now.per_row, now.per_context) >= 0
    assert worst_error(fit) < 0.06


def test_pauses_do_not_lead_it_astray() -> None:
    fit = StepTimeFit()
    for number, step in enumerate(steps(600)):
        fit.observe(*step, TRUE.seconds(*step) * (50 if number % 40 == 3 else 1))
    assert worst_error(fit) < 0.05


def test_it_follows_a_machine_that_becomes_slower() -> None:
    slow = StepTime(TRUE.base * 2, TRUE.per_token * 2, TRUE.per_row * 2, TRUE.per_context * 2)
    fit = fitted(fitted(StepTimeFit(), 2000), 3000, slow, seed=1)
    assert worst_error(fit, slow) < 0.05


def test_many_decodes_do_not_erase_what_a_prompt_costs() -> None:
    fit = fitted(fitted(StepTimeFit(), 200), 20_000, seed=2, prefills=0)
    assert fit.predict(512, 8, 2000) == pytest.approx(TRUE.seconds(512, 8, 2000), rel=0.01)


def test_equal_steps_predict_themselves() -> None:
    fit = StepTimeFit()
    for _ in range(40):
        fit.observe(0, 8, 800, 0.05)
    assert fit.predict(0, 8, 800) == pytest.approx(0.05, rel=1e-3)


def test_prefill_tokens_within_is_the_most_that_fits() -> None:
    count = TRUE.prefill_tokens_within(0.2, 16, 4000)
    assert TRUE.seconds(count, 16, 4000 + count) <= 0.2
    assert TRUE.seconds(count + 1, 16, 4000 + count + 1) > 0.2
    assert TRUE.prefill_tokens_within(0.01, 16, 4000) == 0
    assert StepTime(0.01).prefill_tokens_within(0.02, 1, 1) > 10**9


def test_a_batch_fit_keeps_the_total_of_noisy_steps() -> None:
    draw = random.Random(3)
    noisy = [(*s, TRUE.seconds(*s) * draw.lognormvariate(0, 0.3)) for s in steps(500)]
    fit = fit_step_time(noisy)
    assert sum(fit.seconds(*s[:3]) for s in noisy) == pytest.approx(sum(s[3] for s in noisy))
    with pytest.raises(ValueError, match="at least one"):
        fit_step_time([])
