"""Predict before you measure, against the simulator and the embedded engine; refusals; JSON."""
from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from analysis import predict
from analysis.batching import Lengths, StepLaw
from analysis.model import StageArrays, fit_and_predict
from analysis.model_stages import MAX_REPLAY_ROWS
from analysis.predict import Deadlines, KneeInput, Latencies, TtftShift

sys.path.insert(0, str(Path(__file__).parent))
from reference_des import Truth, poisson_load, simulate

NO_SLO: dict[str, float] = {}  # no clause: no knee is searched, which saves a second
SLO = {"ttft_deadline_s": 0.8, "tpot_deadline_s": 0.1, "e2e_target_s": 2.0, "attainment_target": 0.99}
# the shape of the demo: one H100 with an 8B model and answers of about 97 tokens
DEMO = Truth(7.1e-3, 11e-6, 17e-6, kv=49e-9, noise_cv=0.03)


def stage(index: int, qps: float, truth: Truth, duration_s: float, seed: int, **law: float) -> StageArrays:
    """One measured stage: simulator truth plus 3 ms of network and exponential stamp jitter of 1 ms."""
    plan = poisson_load(qps, duration_s, seed, **law)
    first, last = simulate(plan, truth, seed=seed)
    rng = np.random.default_rng(seed + 5)
    first = first + 0.003 + rng.exponential(0.001, first.size)
    last = np.maximum(last + 0.003 + rng.exponential(0.001, last.size), first)
    return StageArrays(
        index, qps, plan.arrival, first, last, last, plan.prompt, plan.output, np.ones(first.size, bool),
        duration_s / 10, duration_s,
    )  # fmt: skip


def only(result: dict, metric: str, **match) -> list[dict]:
    """The predictions of one metric whose keys equal `match`."""
    return [
        p for p in result["predictions"] if p["metric"] == metric and all(p[k] == v for k, v in match.items())
    ]


@pytest.fixture(scope="module")
def demo() -> tuple[dict, float, int]:
    stages = [stage(i, q, DEMO, 12.0, 300 + i, mu=4.4) for i, q in enumerate((5, 8, 11, 14, 17, 20, 23, 26))]
    start = time.process_time()
    result = fit_and_predict(stages, SLO, 32)
    return result, time.process_time() - start, sum(s.send_s.size for s in stages)


def test_demo_run_is_predicted_from_its_two_lowest_stages(demo):
    result, _, rows = demo
    assert rows > 1200
    assert result["calibration_stages"] == [0, 1]
    judged = only(result, "e2e_mean_s", status="predictive")
    assert len(judged) >= 3
    for p in judged:
        assert abs(p["residual_ratio"]) < 0.05
    assert result["predictive"] is True
    assert "Fitted on 5 and 8 requests/s alone: knee" in result["sentence"]
    # an independent figure of the same law: 1 / (m (alpha/K + beta + kv c) + gamma P)
    m, p, second = 96.8, 1050.0, 96.8**2 * 1.4333
    true = 1 / (m * (7.1e-3 / 32 + 11e-6 + 49e-9 * (p + second / (2 * m))) + 17e-6 * p)
    assert result["lambda_max_qps"] == pytest.approx(true, rel=0.1)  # 10 %: mean length of 150 answers


def test_demo_run_is_fast(demo):
    _, cpu_s, _ = demo
    assert cpu_s < 3.0


def test_result_is_plain_json_and_complete(demo):
    result, _, _ = demo
    text = json.dumps(result, allow_nan=False)
    assert json.loads(text) == result
    assert {"alpha_s", "beta_s", "gamma_s", "se", "r2", "rows"} <= set(result["fit"])
    keys = {"stage", "offered_qps", "metric", "measured", "predicted", "naive_pk", "naive_mgk", "residual_ratio"}
    assert all(keys <= set(p) for p in result["predictions"])
    assert len(result["predictions"]) == 8 * 4
    assert [s["load_ratio"] for s in result["stage_models"]] == sorted(s["load_ratio"] for s in result["stage_models"])


def test_a_load_above_the_limit_has_no_steady_state(demo):
    result, _, _ = demo
    loads = {s["load_ratio"]: s["mean_field_exists"] for s in result["stage_models"]}
    assert max(loads) > 1 and min(loads) < 0.5
    assert all(exists == (load < 1) for load, exists in loads.items() if not 0.95 < load < 1)


def test_naive_models_miss_what_the_replay_hits(demo):
    result, _, _ = demo
    top = only(result, "e2e_mean_s", offered_qps=20)[0]
    assert abs(top["residual_ratio"]) < 0.06
    assert top["naive_mgk_residual_ratio"] < -0.25  # M/G/K with S of the lowest stage knows no coupling
    assert top["naive_pk"] is None  # rho = 20 * 0.7 s: no steady state at all
    rho = next(s for s in result["stage_models"] if s["offered_qps"] == 20)["naive_pk_rho"]
    assert rho > 10


def test_a_limit_that_was_passed_is_refuted():
    """The two lowest stages ran at a third of the speed: the limit fitted there is below what the third one finished."""
    slow = dataclasses.replace(DEMO, alpha=DEMO.alpha * 3, beta=DEMO.beta * 3, gamma=DEMO.gamma * 3, kv=DEMO.kv * 3)
    stages = [stage(i, q, slow if i < 2 else DEMO, 40.0, 70 + i, mu=4.4) for i, q in enumerate((2, 3, 15))]
    result = fit_and_predict(stages, NO_SLO, 32)
    last = stages[2]
    done = int(((last.done_s >= 4.0) & (last.done_s < 40.0)).sum())  # second path: by hand
    assert done / 36 > result["lambda_max_high_qps"] * 1.1
    assert result["predictive"] is False and only(result, "e2e_mean_s", stage=2)[0]["status"] == "beyond"
    assert f"the service finished {done / 36:.3g} requests/s, more than that limit" in result["sentence"]
    failed = dataclasses.replace(last, ok=np.arange(last.ok.size) % 20 > 0)  # 5 % failures hold no slots: no proof
    assert fit_and_predict([*stages[:2], failed], NO_SLO, 32)["predictive"] is None


def test_a_law_that_does_not_give_back_its_own_stages_is_no_law():
    """Each answer of the fit's own stages has its own speed, as on a machine that others use: no step law does that."""
    stages = [stage(i, q, DEMO, 40.0, 90 + i, mu=4.4) for i, q in enumerate((3, 5))]
    steady = fit_and_predict(stages, NO_SLO, 32)
    assert steady["predictive"] is None and "no higher stage below" in steady["sentence"]
    rng = np.random.default_rng(3)
    uneven = []
    for s in stages:
        factor = np.where(rng.random(s.send_s.size) < 0.3, 6.0, 1.0)
        last = s.first_token_s + (s.last_token_s - s.first_token_s) * factor
        uneven.append(dataclasses.replace(s, last_token_s=last, done_s=last))
    result = fit_and_predict(uneven, NO_SLO, 32)
    own = [p["residual_ratio"] for p in only(result, "e2e_mean_s", status="calibration")]
    assert max(map(abs, own)) > 0.10 and result["worst_residual_ratio"] == max(own, key=abs)
    assert result["predictive"] is False and "does not give back its own stage of" in result["sentence"]


def test_a_service_that_changes_is_called_not_predictive():
    slow = dataclasses.replace(DEMO, alpha=DEMO.alpha * 1.5)  # throttled from the third stage on
    stages = [stage(i, q, DEMO if i < 2 else slow, 20.0, 40 + i, mu=4.4) for i, q in enumerate((4, 6, 8, 10))]
    result = fit_and_predict(stages, NO_SLO, 32)
    assert result["predictive"] is False
    assert "not predictive here, residual -" in result["sentence"]
    assert only(result, "e2e_mean_s", offered_qps=10)[0]["status"] == "not_predictive"


def test_seed_shape_knee_and_limit():
    truth = Truth(noise_cv=0.05)
    stages = [stage(i, q, truth, 200.0, 60 + i) for i, q in enumerate((5, 10, 20, 24))]
    result = fit_and_predict(stages, SLO, 32, _seed_lengths())
    # lambda_max by hand in test_batching: 27.21; the p95 crossing of 2 s by long simulation: 22.6 (docs/evidence)
    assert result["lambda_max_qps"] == pytest.approx(27.21, rel=0.005)
    assert result["lambda_max_low_qps"] < 27.3 and result["lambda_max_high_qps"] > 27.1
    assert result["p95_crossing_predicted_qps"] == pytest.approx(22.6, rel=0.03)
    assert result["knee_predicted_low_qps"] < result["knee_predicted_qps"] < result["knee_predicted_high_qps"]
    for p in only(result, "e2e_p95_s", status="predictive"):
        assert abs(p["residual_ratio"]) < 0.03
        assert p["predicted_birth_death"] == pytest.approx(p["measured"], rel=0.12)
    assert result["ttft_overhead_s"] == pytest.approx(0.004, abs=0.001)  # 3 ms + mean jitter 1 ms, as injected


def _seed_lengths() -> tuple[np.ndarray, np.ndarray]:
    plan = poisson_load(100, 1000, 77)
    return plan.prompt, plan.output


def test_only_arrivals_and_lengths_of_a_predicted_stage_are_used():
    stages = [stage(i, q, DEMO, 12.0, 80 + i, mu=4.4) for i, q in enumerate((5, 8, 14))]
    base = fit_and_predict(stages, NO_SLO, 32)
    forged = dataclasses.replace(
        stages[2], first_token_s=stages[2].first_token_s + 9, last_token_s=stages[2].last_token_s + 99
    )
    other = fit_and_predict([*stages[:2], forged], NO_SLO, 32)
    for a, b in zip(base["predictions"], other["predictions"], strict=True):
        assert a["predicted"] == b["predicted"]
    assert base["fit"] == other["fit"]


def test_invalid_unstable_and_failing_stages_are_never_calibrated_on():
    stages = [stage(i, q, DEMO, 20.0, 90 + i, mu=4.4) for i, q in enumerate((4, 5, 6, 7, 8))]
    stages[0] = dataclasses.replace(stages[0], valid=False)
    stages[1] = dataclasses.replace(stages[1], stationarity="UNSTABLE")
    broken = np.arange(stages[2].ok.size) % 10 != 0
    stages[2] = dataclasses.replace(stages[2], ok=broken)
    result = fit_and_predict(stages, NO_SLO, 32)
    assert result["calibration_stages"] == [3, 4]
    failing = only(result, "e2e_mean_s", stage=2)[0]
    assert failing["status"] == "not_comparable"
    assert any("stage 2" in n and "have no answer" in n for n in result["notes"])


def test_failed_rows_take_their_planned_length_when_it_is_pinned():
    stages = [stage(i, q, DEMO, 12.0, 110 + i, mu=4.4) for i, q in enumerate((5, 8, 14))]
    pinned = [dataclasses.replace(s, max_tokens=s.output_tokens) for s in stages]
    full = fit_and_predict(pinned, NO_SLO, 32)
    lost = pinned[2].output_tokens.astype(float)
    ok = pinned[2].ok.copy()
    lost[::5], ok[::5] = np.nan, False
    part = fit_and_predict([*pinned[:2], dataclasses.replace(pinned[2], output_tokens=lost, ok=ok)], NO_SLO, 32)
    assert [p["predicted"] for p in full["predictions"]] == [p["predicted"] for p in part["predictions"]]


@pytest.mark.parametrize("case", ["none", "empty", "thin", "failed", "nan"])
def test_too_little_is_refused_with_a_reason(case):
    base = stage(0, 5, DEMO, 4.0, 1, mu=4.4)
    nothing = np.array([])
    stages = {
        "none": [],
        "empty": [StageArrays(0, 5.0, *[nothing] * 6, np.array([], dtype=bool), 0.0, 1.0)],
        "thin": [base],
        "failed": [dataclasses.replace(base, ok=np.zeros(base.ok.size, bool))],
        "nan": [dataclasses.replace(base, first_token_s=np.full(base.ok.size, np.nan))],
    }[case]
    result = fit_and_predict(stages, SLO, 32)
    assert result["fit"] is None and result["predictions"] == []
    assert result["sentence"].startswith("No queueing model: ") and result["notes"]
    json.dumps(result, allow_nan=False)


def test_unknown_max_num_seqs_gives_an_upper_bound_and_says_so():
    stages = [stage(i, q, DEMO, 15.0, 120 + i, mu=4.4) for i, q in enumerate((5, 8, 11))]
    result = fit_and_predict(stages, SLO, None)
    known = fit_and_predict(stages, NO_SLO, 32)
    assert result["lambda_max_qps"] > known["lambda_max_qps"]
    assert result["knee_predicted_qps"] is None
    assert any("max_num_seqs is not known" in n for n in result["notes"])
    json.dumps(result, allow_nan=False)


def test_missing_clauses_and_one_stage():
    stages = [stage(0, 8, DEMO, 20.0, 130, mu=4.4)]
    result = fit_and_predict(stages, {"ttft_deadline_s": None, "tpot_deadline_s": None}, 32, replicas=2)
    assert result["fit"] is not None and result["knee_predicted_qps"] is None
    assert any("only one valid stage" in n for n in result["notes"])
    assert any("2 replicas" in n for n in result["notes"])


def test_a_million_rows_are_cut_and_said():
    rng = np.random.default_rng(1)
    n = 250_000
    stages = []
    for index, qps in enumerate((5.0, 10.0, 15.0, 20.0)):
        at = np.cumsum(rng.exponential(1 / qps, n))
        output = rng.integers(21, 200, n)
        first = at + 0.05
        last = first + 0.01 * output
        prompt, ok = np.full(n, 500), np.ones(n, bool)
        stages.append(StageArrays(index, qps, at, first, last, last, prompt, output, ok, 0, at[-1]))
    start = time.process_time()
    result = fit_and_predict(stages, SLO, 32)
    assert time.process_time() - start < 10.0
    assert sum(f"the model uses the first {MAX_REPLAY_ROWS}" in note for note in result["notes"]) == 4
    assert any("no cost of the batch is visible" in note for note in result["notes"])


numbers = st.one_of(st.just(math.nan), st.just(math.inf), st.floats(-10, 1e6), st.just(0.0))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.tuples(*[numbers] * 6, st.booleans()), max_size=8), max_size=3),
    st.sampled_from([None, 1, 32]),
)
def test_garbage_never_raises_and_never_leaks_nan(tables, seqs):
    stages = []
    for index, rows in enumerate(tables):
        columns = [np.array(c) for c in zip(*rows, strict=True)] if rows else [np.array([])] * 7
        stages.append(StageArrays(index, 1.0 + index, *columns[:6], columns[6].astype(bool), 0.0, 100.0))
    json.dumps(fit_and_predict(stages, SLO, seqs), allow_nan=False)


@pytest.mark.parametrize("seed", range(6))
def test_plausible_garbage_never_raises(seed):
    rng = np.random.default_rng(seed)
    stages = []
    for index in range(3):
        n = 80
        at = rng.uniform(0, 10, n)
        first = at + rng.exponential(0.1, n) * (rng.random(n) < 0.9)
        last = first + rng.exponential(1.0, n) * (rng.random(n) < 0.9)
        output = rng.integers(0, 200, n).astype(float)
        prompt, ok = rng.integers(0, 50, n), rng.random(n) < 0.99
        stages.append(StageArrays(index, 8.0, at, first, last, last, prompt, output, ok, 1, 9))
    json.dumps(fit_and_predict(stages, {}, 1 + seed), allow_nan=False)


# ---- the parts -------------------------------------------------------------------


def test_metrics_by_hand():
    inf, nan = math.inf, math.nan
    rows = Latencies(np.array([0.1, 0.2, 0.9, inf]), np.array([0.05, nan, 0.05, nan]), np.array([1.0, 2.0, 3.0, inf]))
    got = predict.metrics(rows, Deadlines(0.8, 0.1, 2.0, 0.99))
    # met: rows 1 and 2 (one token: no TPOT to miss); mean of finished 2.0; nearest rank of 4 at .95 is the last
    assert got == {"e2e_mean_s": 2.0, "e2e_p95_s": inf, "ttft_p95_s": inf, "attainment": 0.5}


@pytest.mark.parametrize(
    ("n", "low", "high"),
    # known order-statistic ranks for p = .95 (1-based)
    [(100, 90, 100), (300, 277, 293), (1500, 1408, 1442), (6000, 5666, 5734), (60, 53, math.inf)],
)
def test_p95_interval_ranks(n, low, high):
    assert predict.p95_interval(np.arange(1.0, n + 1)) == (low, high)


def test_ttft_shift_recovers_an_added_distribution():
    rng = np.random.default_rng(4)
    replayed = rng.exponential(0.02, 2000)
    shift = TtftShift(replayed + 0.005, replayed)
    assert shift.median_s == pytest.approx(0.005, abs=1e-12)
    rows = shift.apply(Latencies(replayed, replayed, replayed + 1.0))
    np.testing.assert_allclose(rows.ttft_s, replayed + 0.005)
    np.testing.assert_allclose(rows.e2e_s, replayed + 1.005)


@pytest.mark.parametrize("process", ["poisson", "constant", "gamma"])
def test_unit_gaps_have_mean_one_and_the_variation_of_their_process(process):
    gaps = predict.unit_gaps(np.random.default_rng(2), 100_000, process, 0.25)
    scv = {"poisson": 1.0, "constant": 0.0, "gamma": 4.0}[process]  # gamma: 1 / shape
    assert gaps.mean() == pytest.approx(1.0, abs=0.03)
    assert gaps.var() == pytest.approx(scv, abs=0.25)


def test_knee_of_a_service_with_a_known_crossing():
    # constant gaps, one slot, S = 100 steps of 1 ms = 0.1 s: no wait up to 10/s, unbounded above
    law, lengths = StepLaw(1e-3, 0.0, 0.0), Lengths(1.0, 100.0, 100.0**2)
    zero = TtftShift(np.zeros(1), np.zeros(1))
    case = KneeInput(law, lengths, np.ones(1), np.full(1, 100.0), 1, 4096, zero, "constant")
    criteria = [
        predict.Criterion(lambda rows: rows.ttft_s <= 0.05, 0.99),
        predict.Criterion(lambda rows: rows.ttft_s < 0, 0.99),
        predict.Criterion(lambda rows: rows.ttft_s >= 0, 0.99),
    ]
    search = predict.KneeSearch(case, criteria)
    knee = search.knee(0)
    assert knee.kind == "crossing"
    assert knee.qps == pytest.approx(10.0, rel=0.01)
    assert knee.low_qps <= 10.0 <= knee.high_qps
    assert search.knee(1).kind == "below" and search.knee(1).qps is None
    assert search.knee(2).kind == "at_least"


@pytest.mark.evidence
@pytest.mark.parametrize("profile", ["h100-8b", "a100-80-llama3-8b"])
def test_the_engine_with_a_foreign_step_law_is_predicted(profile):
    from benchmarks.evidence_queueing import held_out

    for row in held_out(profile, seed=5):
        if row["load_ratio"] <= 0.92 and not row["calibration"]:
            assert abs(row["e2e_mean"]) <= 0.067 and abs(row["e2e_p90"]) <= 0.075
            assert abs(row["e2e_p99"]) <= 0.092 and abs(row["ttft_p90"]) <= 0.21
