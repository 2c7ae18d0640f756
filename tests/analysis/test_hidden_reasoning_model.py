"""A service that hides its reasoning: its rows cannot carry a step law, and the model says so by name.

The truth is a step-by-step service written here, which keeps the time of every token, seen or not.
"""
from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from analysis.analyse import analyse_run, stage_arrays
from analysis.calibrate import CalibrationError, calibrate
from analysis.model import fit_and_predict
from analysis.model_stages import MAX_HIDDEN_RATIO, StageArrays, prepare
from analysis.step_clock import fit
from tests.analysis.synthetic import StageSpec, write_run
from tests.analysis.test_verdict import QUICK

ALPHA, BETA, GAMMA = 6e-3, 0.3e-3, 30e-6
SLO = {"ttft_deadline_s": 2.0, "tpot_deadline_s": 0.1, "e2e_target_s": 5.0, "attainment_target": 0.9}


def token_times(arrival: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> list[list[float]]:
    """Times of every token: each step takes alpha + beta n + gamma p, all prompts that wait are prefilled in it."""
    times: list[list[float]] = [[] for _ in arrival]
    now, next_, decoding = 0.0, 0, []
    while next_ < arrival.size or decoding:
        if not decoding and arrival[next_] > now:
            now = float(arrival[next_])
        fresh = []
        while next_ < arrival.size and arrival[next_] <= now:
            fresh.append(next_)
            next_ += 1
        now += ALPHA + BETA * len(decoding) + GAMMA * float(sum(prompt[i] for i in fresh))
        decoding += fresh
        for i in decoding:
            times[i].append(now)
        decoding = [i for i in decoding if len(times[i]) < output[i]]
    return times


def stage(qps: float, seconds: float, seed: int, hidden: tuple[int, int], share: float = 1.0) -> StageArrays:
    """`share` of the answers begin with `hidden` (from, to) tokens that nobody sees."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / qps, int(qps * seconds)))
    n = arrival.size
    unseen = np.where(rng.random(n) < share, rng.integers(*hidden, n), 0)
    prompt, output = rng.integers(100, 900, n), unseen + rng.integers(30, 120, n)
    times = token_times(arrival, prompt, output)
    first = np.array([t[k] for t, k in zip(times, unseen, strict=True)])
    last = np.array([t[-1] for t in times])
    return StageArrays(seed, qps, arrival, first, last, last, prompt, output, np.ones(n, bool), seconds / 10, seconds,
                       hidden_tokens=unseen.astype(float))  # fmt: skip


def test_what_is_hidden_is_named_and_nothing_is_predicted() -> None:
    stages = [stage(q, 60, i, (50, 200)) for i, q in enumerate((3.0, 6.0, 9.0))]
    found = fit_and_predict(stages, SLO, 32)
    assert found["predictive"] is False and found["code"] == "model.hidden" and found["predictions"] == []
    share = max(s.hidden_tokens.sum() / s.output_tokens.sum() for s in stages)
    assert found["params"]["share"] == pytest.approx(share) and 0.5 < share < 0.75
    assert found["sentence"].startswith("not predictive here: hidden reasoning.")
    assert found["lambda_max_qps"] is None and found["knee_predicted_qps"] is None
    with pytest.raises(CalibrationError, match="of its output tokens are reasoning that was not streamed"):
        calibrate(stages)


def test_why_it_is_refused() -> None:
    """With every step between first and last known, the cost of a sequence is still wrong: the batch is not seen."""
    rows = [stage(q, 60, i, (50, 200)) for i, q in enumerate((3.0, 9.0))]
    seen = [dataclasses.replace(s, output_tokens=s.output_tokens - s.hidden_tokens, hidden_tokens=None) for s in rows]
    law = fit([prepare(s, []).trace for s in seen], "affine").law  # type: ignore[union-attr]
    assert law.beta_s > 1.5 * BETA
    told = [stage(q, 60, i, (50, 200), share=0.0) for i, q in enumerate((3.0, 9.0))]
    plain = fit([prepare(s, []).trace for s in told], "affine").law  # type: ignore[union-attr]
    assert plain.beta_s == pytest.approx(BETA, rel=0.02) and plain.alpha_s == pytest.approx(ALPHA, rel=0.02)


def test_a_few_hidden_answers_do_not_stop_it_and_do_not_enter_the_regression() -> None:
    rows = [stage(q, 120, i, (60, 90), share=0.008) for i, q in enumerate((3.0, 9.0))]
    made = [prepare(s, []) for s in rows]
    assert all(s is not None and 0 < s.hidden_ratio < MAX_HIDDEN_RATIO for s in made)
    for s, source in zip(made, rows, strict=True):
        assert s is not None and not (s.trace.use & (source.hidden_tokens > 0)).any()
        wrong = (source.last_token_s - source.first_token_s) / (source.output_tokens - 1)
        mine = (source.last_token_s - source.first_token_s) / (source.output_tokens - source.hidden_tokens - 1)
        hides = source.hidden_tokens > 0  # TPOT is over what was streamed
        np.testing.assert_allclose(s.measured.tpot_s, mine)
        assert (wrong[hides] < 0.75 * mine[hides]).all()
    law = fit([s.trace for s in made if s is not None], "affine").law
    assert law.beta_s == pytest.approx(BETA, rel=0.03) and law.gamma_s == pytest.approx(GAMMA, rel=0.03)


def test_a_stage_that_hides_is_no_prediction_of_one_that_does_not() -> None:
    stages = [stage(q, 60, i, (50, 200), share=float(i == 2)) for i, q in enumerate((3.0, 6.0, 8.0))]
    found = fit_and_predict(stages, SLO, 32)
    assert found["calibration_stages"] == [0, 1] and found["fit"]["beta_s"] == pytest.approx(BETA, rel=0.03)
    assert {p["status"] for p in found["predictions"] if p["stage"] == 2} == {"not_comparable"}


def test_the_ledger_names_it(tmp_path: Path) -> None:
    """Through the files: the flag and the column make the reason; the flag without the column hides nothing known."""
    run = write_run(tmp_path / "r", [StageSpec(q, 20, 4) for q in (10, 20)], QUICK)
    path = run / "requests.csv"
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    for tokens, code in (("20", "model.hidden"), ("", None)):
        for row in rows:
            row.update(flags="hidden_reasoning", reasoning_tokens=tokens, tpot_s="")
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        model = analyse_run(run).model
        assert model is not None and (model["code"] == "model.hidden") == (code is not None), model["sentence"]
        assert (stage_arrays(run)[0].hidden_tokens is None) == (code is None)
