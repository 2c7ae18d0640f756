"""A run's rows give back the step law that made them, and runs that cannot carry one are refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.batching import StepLaw
from analysis.calibrate import CalibrationError, calibrate, refusal, step_error
from analysis.model_stages import StageArrays
from analysis.replay import replay

LAW = StepLaw(20e-3, 1e-3, 50e-6)


def stage(number: int, qps: float, seconds: float, law: StepLaw = LAW, tokens: int = 60, seed: int = 1) -> StageArrays:
    """A stage of a simulated service: Poisson arrivals, prompts 50-500, answers of about `tokens`."""
    rng = np.random.default_rng(seed + number)
    n = int(qps * seconds)
    start = np.sort(rng.uniform(0, seconds, n)) + number * (seconds + 100)
    prompt, output = rng.integers(50, 501, n), rng.integers(tokens // 2, 2 * tokens, n)
    done = replay(start, prompt, output, law, 32)
    return StageArrays(
        stage=number, offered_qps=qps, send_s=start, first_token_s=done.first_token_s, last_token_s=done.last_token_s,
        done_s=done.last_token_s, input_tokens=prompt, output_tokens=output, ok=np.ones(n, dtype=bool),
        window_start_s=number * (seconds + 100), window_end_s=number * (seconds + 100) + seconds,
    )  # fmt: skip


def test_the_law_comes_back_with_its_error_and_its_range() -> None:
    found = calibrate([stage(0, 2, 120), stage(1, 5, 120)])
    law = found.fit.law
    # alpha 20 ms, beta 1 ms, gamma 50 us: no noise, so within 2 %
    assert law.alpha_s == pytest.approx(20e-3, rel=0.02) and law.beta_s == pytest.approx(1e-3, rel=0.02)
    assert law.gamma_s == pytest.approx(50e-6, rel=0.02)
    assert found.step_error < 0.01 and found.fit.r2 > 0.99
    assert found.valid["offered_qps"] == [2, 5] and 50 <= found.valid["input_tokens"][0] <= 60
    for residual in found.residuals:
        assert abs(residual.median) < 0.01 and residual.p05 < residual.median < residual.p95
    said = found.as_dict()
    assert said["law"]["alpha_s"] == law.alpha_s and said["residuals"][1]["offered_qps"] == 5


def test_all_stages_below_overload_are_used_and_the_others_named() -> None:
    good = [stage(0, 2, 60), stage(1, 4, 60), stage(2, 6, 60)]
    bad = [replace(stage(3, 5, 60), valid=False), replace(stage(4, 20, 60), stationarity="UNSTABLE")]
    failing = stage(5, 3, 60)
    failing.ok[::10] = False
    found = calibrate([*good, *bad, failing])
    assert [r.stage for r in found.residuals] == [0, 1, 2]
    text = " ".join(found.notes)
    assert "stage 3 is left out: INVALID" in text and "stage 4 is left out: UNSTABLE" in text
    assert "stage 5 is left out" in text and "failed" in text


@pytest.mark.parametrize(("stages", "words"), [
    ([], "no stage is valid"),
    ([stage(0, 2, 60, tokens=8)], "no stage is valid"),  # answers of 4 to 15 tokens: all stamps, no steps
    ([stage(0, 0.3, 60)], "too thin"),  # 18 answers, 40 are needed
    ([replace(stage(0, 2, 60), valid=False)], "INVALID"),
])  # fmt: skip
def test_what_cannot_carry_a_profile_is_refused_with_the_reason(stages: list[StageArrays], words: str) -> None:
    with pytest.raises(CalibrationError, match=words):
        calibrate(stages)


def test_noise_that_hides_the_step_is_refused() -> None:
    noisy = stage(0, 2, 60)
    rng = np.random.default_rng(5)
    last = noisy.first_token_s + (noisy.last_token_s - noisy.first_token_s) * rng.lognormal(0, 1.5, noisy.send_s.size)
    with pytest.raises(CalibrationError, match="too thin"):
        calibrate([replace(noisy, last_token_s=last, done_s=last)])


def test_a_run_is_refused_before_any_fit() -> None:
    assert refusal("PASS", [], 1) == "" and refusal("FAIL", [], 1) == ""  # a missed SLO says nothing about the rows
    assert "late sender" in refusal("INVALID", ["late sender"], 1)
    assert "4 replicas" in refusal("PASS", [], 4)


def test_step_error_is_the_delta_method() -> None:
    found = calibrate([stage(0, 2, 120), stage(1, 5, 120)]).fit
    c = found.covariance
    # Var(alpha + 4 beta) = Vaa + 8 Vab + 16 Vbb
    byhand = (c[0, 0] + 8 * c[0, 1] + 16 * c[1, 1]) ** 0.5 / (found.law.alpha_s + 4 * found.law.beta_s)
    assert step_error(found, 4.0) == pytest.approx(byhand)
