"""Recovery of the step law from client rows, against coefficients the simulator was given."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from analysis.batching import Lengths, StepLaw, lambda_max_qps
from analysis.step_clock import Events, Trace, fit, step_clock_design, wall_clock_design

sys.path.insert(0, str(Path(__file__).parent))
from reference_des import Truth, poisson_load, simulate

LENGTHS = Lengths(1050.0, 482.4920, 333886.2)


def traces(truth: Truth, rates: tuple[float, ...], seed: int, jitter_s: float = 0.01, duration_s: float = 300, **law):
    """Client rows of one stage per rate: 5 % step noise by `truth`, uniform stamp jitter."""
    result = []
    rng = np.random.default_rng(seed + 1000)
    for index, qps in enumerate(rates):
        plan = poisson_load(qps, duration_s, seed * 10 + index, **law)
        first, last = simulate(plan, truth, seed=seed * 7 + index)
        first = first + rng.uniform(0, jitter_s, first.size)
        last = np.maximum(last + rng.uniform(0, jitter_s, last.size), first)
        use = plan.arrival > duration_s / 10
        result.append(Trace(first, last, plan.prompt.astype(float), plan.output.astype(float), use))
    return result


def capacity_error(law: StepLaw, truth: Truth) -> float:
    """Relative error of lambda_max(32) with the seed's lengths."""
    true = StepLaw(truth.alpha, truth.beta, truth.gamma, truth.kappa, truth.kv)
    return lambda_max_qps(law, LENGTHS, 32) / lambda_max_qps(true, LENGTHS, 32) - 1


def test_two_requests_counted_by_hand():
    # tokens at 0,1,2,3,4 (A) and 2,3,4,5,6 (B, prompt 7), step 1 s, beta 0: in (0,4] A emits 4 and B 2
    # (at 3 and 4); B's prefill ends at 2. In (2,6] B emits 4 and A 2; no prefill ends.
    trace = Trace(*(np.array(a) for a in ([0.0, 2.0], [4.0, 6.0], [5.0, 7.0], [5.0, 5.0], [True, True])))
    events = Events(trace)
    guess = wall_clock_design(events)
    clock = step_clock_design(events, StepLaw(1.0, 0.0, 0.0), guess)
    for design in (guess, clock):
        np.testing.assert_allclose(design.columns[:, 0], [4, 4])  # s
        np.testing.assert_allclose(design.columns[:, 1], [6, 6])  # B
        np.testing.assert_allclose(design.columns[:, 2], [7, 0])  # G
        np.testing.assert_allclose(design.columns[:, 3], [2 * 1 + 2 * 4, 2 * 4 + 2 * 1])  # C: n^2 per step


def test_context_is_counted_by_hand():
    # one request, prompt 10, 4 decode steps: they read 10, 11, 12 and 13 tokens
    trace = Trace(np.array([0.0]), np.array([4.0]), np.array([10.0]), np.array([5.0]), np.ones(1, bool))
    events = Events(trace)
    design = step_clock_design(events, StepLaw(1.0, 0.0, 0.0), wall_clock_design(events))
    assert design.columns[0, 4] == pytest.approx(10 + 11 + 12 + 13)


def test_prefill_stall_is_taken_from_the_time_before_the_first_token():
    # A runs 0..10; B's first token at 6 with 4 s of prefill: 2 s remain of the first gap, 4 s of the second
    trace = Trace(*(np.array(a) for a in ([0.0, 6.0], [10.0, 10.0], [1.0, 4.0], [9.0, 5.0], [True, True])))
    available = Events(trace).available_s(1.0)
    np.testing.assert_allclose(available, [2.0, 4.0, 0.0])
    # a stall longer than its gap reaches into the one before, never below zero
    np.testing.assert_allclose(Events(trace).available_s(5.0), [0.0, 4.0, 0.0])


@pytest.mark.parametrize("seed", [1, 2])
def test_affine_truth_is_recovered_within_one_percent(seed):
    truth = Truth(noise_cv=0.05)
    got = fit(traces(truth, (5.0, 10.0), seed))
    assert got.order == "affine"
    assert got.law.alpha_s == pytest.approx(truth.alpha, rel=0.01)
    assert got.law.beta_s == pytest.approx(truth.beta, rel=0.01)
    assert got.law.gamma_s == pytest.approx(truth.gamma, rel=0.01)
    assert abs(capacity_error(got.law, truth)) < 0.005
    assert got.r2 > 0.98 and got.outliers < 0.01 * got.rows
    assert 0 < got.se["alpha_s"] < 0.01 * truth.alpha


def test_prefill_heavy_truth():
    truth = Truth(0.5e-3, 0.03e-3, 15e-6, noise_cv=0.05)
    got = fit(traces(truth, (5.0, 10.0), 3))
    assert got.law.gamma_s == pytest.approx(truth.gamma, rel=0.01)
    assert abs(capacity_error(got.law, truth)) < 0.005


def test_context_truth_is_told_apart_from_the_batch_term():
    truth = Truth(0.6e-3, 0.01e-3, 8e-6, kv=20e-9, noise_cv=0.05)
    rows = traces(truth, (5.0, 10.0), 1)
    got = fit(rows)
    assert got.order == "context" and "cuts the RMSE" in got.order_note
    assert got.law.kv_s == pytest.approx(truth.kv, rel=0.03)
    assert got.law.beta_s == pytest.approx(truth.beta, rel=0.05)
    assert abs(capacity_error(got.law, truth)) < 0.005
    # the affine law hides the context in beta and loses the spread between requests
    assert fit(rows, "affine").law.beta_s > 3 * truth.beta


def test_quadratic_truth_is_chosen_only_where_it_is_true():
    truth = Truth(0.6e-3, 0.02e-3, 8e-6, kappa=0.8e-6, noise_cv=0.05)
    rows = traces(truth, (5.0, 10.0), 1)
    got = fit(rows)
    assert got.order == "quadratic"
    assert abs(capacity_error(got.law, truth)) < 0.03
    assert capacity_error(fit(rows, "affine").law, truth) > 0.2  # what a wrong order would cost


def test_prefill_that_hides_behind_the_base_cost_is_seen():
    # the law of an engine bound by memory up to 200 prompt tokens: max of two lines
    truth = Truth(7.1e-3, 11e-6, 21e-6, kv=49e-9, noise_cv=0.03, delta=-4.2e-3)
    got = fit(traces(truth, (5.0, 10.0), 1, jitter_s=0.001, mu=4.4))
    assert got.order == "context+prefill" and "cost per prefill step" in got.order_note
    assert got.law.alpha_s == pytest.approx(truth.alpha, rel=0.01)
    assert got.law.gamma_s == pytest.approx(truth.gamma, rel=0.03)
    assert got.law.kv_s == pytest.approx(truth.kv, rel=0.05)
    assert got.law.prefill_s == pytest.approx(truth.delta, rel=0.2)
    without = fit(traces(truth, (5.0, 10.0), 1, jitter_s=0.001, mu=4.4), "context").law
    assert without.gamma_s < 0.92 * truth.gamma  # a line through the kink is too flat


def test_first_tokens_of_one_step_are_one_prefill_step():
    # A runs 0..10; B and C start in one step at 4, D at 6: two prefill steps in (0, 10]
    first, last = np.array([0.0, 4.0, 4.001, 6.0]), np.full(4, 10.0)
    trace = Trace(first, last, np.full(4, 5.0), np.full(4, 11.0), np.ones(4, bool))
    events = Events(trace)
    design = step_clock_design(events, StepLaw(1.0, 0.0, 0.0), wall_clock_design(events))
    assert design.columns[0, 5] == 2
    assert design.columns[0, 2] == 15  # prompt tokens: all three


def test_wall_clock_counting_is_biased_and_the_step_clock_is_not():
    truth = Truth(noise_cv=0.05)
    rows = traces(truth, (5.0, 10.0), 2, jitter_s=0.0)
    naive = []
    for row in rows:
        events = Events(row)
        design = wall_clock_design(events).columns
        rate = events.steps / np.maximum(events.duration, 1e-9)
        evenly = events.between(events.running_sum(rate) * events.dt)  # everybody's tokens, evenly in wall time
        columns = np.column_stack([design[:, 0], evenly, design[:, 2], events.duration])
        naive.append(columns[row.use & (row.output_tokens > 20)])
    naive = np.concatenate(naive)
    weight = 1 / np.sqrt(naive[:, :1])
    law = StepLaw(*np.linalg.lstsq(naive[:, :3] * weight, naive[:, 3] * weight[:, 0], rcond=None)[0])
    assert law.gamma_s == pytest.approx(7.3e-6, rel=0.02)  # an earlier study saw 7.3 for 8.0 us
    assert capacity_error(law, truth) > 0.02  # and lambda_max 28.0 for 27.2
    fitted = fit(rows).law
    assert fitted.gamma_s == pytest.approx(truth.gamma, rel=0.005)
    assert abs(capacity_error(fitted, truth)) < 0.002


def test_short_run_of_the_demo_size():
    truth = Truth(7.1e-3, 11e-6, 17e-6, kv=49e-9, noise_cv=0.03)
    got = fit(traces(truth, (5.0, 8.0), 4, jitter_s=0.002, duration_s=15.0, mu=4.4))
    assert got.rows < 220
    assert got.law.alpha_s == pytest.approx(truth.alpha, rel=0.02)
    lengths = Lengths(1050.0, 97.0, 97.0**2 * 1.43)
    true = StepLaw(truth.alpha, truth.beta, truth.gamma, truth.kappa, truth.kv)
    # about 180 answers: 3 %
    assert lambda_max_qps(got.law, lengths, 32) == pytest.approx(lambda_max_qps(true, lengths, 32), rel=0.03)


def test_stalled_rows_are_left_out_and_counted():
    truth = Truth(noise_cv=0.05)
    rows = traces(truth, (5.0, 10.0), 1, jitter_s=0.001, duration_s=120.0)
    last = rows[0].last_token_s.copy()
    last[10:400:40] += 0.3  # the client slept through ten last tokens
    stalled = [Trace(rows[0].first_token_s, last, rows[0].input_tokens, rows[0].output_tokens, rows[0].use), rows[1]]
    got = fit(stalled)
    assert got.outliers >= 5
    assert got.law.alpha_s == pytest.approx(truth.alpha, rel=0.02)


def test_too_few_rows_are_refused_with_the_number():
    rows = traces(Truth(), (5.0,), 1, duration_s=5.0)
    with pytest.raises(ValueError, match=r"only \d+ answers of at least 21 tokens.*needs 40"):
        fit(rows)


def test_coefficients_are_never_negative_for_nonsense():
    rng = np.random.default_rng(5)
    first = np.sort(rng.uniform(0, 100, 300))
    trace = Trace(first, first + rng.uniform(0.01, 5, 300), rng.uniform(1, 2000, 300), rng.integers(21, 500, 300) * 1.0,
                  np.ones(300, bool))  # fmt: skip
    law = fit([trace]).law
    assert min(law.alpha_s, law.beta_s, law.gamma_s, law.kappa_s, law.kv_s) >= 0


def test_identical_stamps_do_not_crash():
    trace = Trace(np.zeros(60), np.ones(60), np.full(60, 10.0), np.full(60, 50.0), np.ones(60, bool))
    law = fit([trace]).law
    assert np.isfinite([law.alpha_s, law.beta_s, law.gamma_s]).all()


@pytest.mark.evidence
def test_recovery_over_twenty_seeds():
    truth = Truth(noise_cv=0.05)
    errors = []
    for seed in range(20, 40):
        law = fit(traces(truth, (5.0, 10.0), seed)).law
        errors.append([law.alpha_s / truth.alpha - 1, law.beta_s / truth.beta - 1, law.gamma_s / truth.gamma - 1,
                       capacity_error(law, truth)])  # fmt: skip
    size = np.abs(np.array(errors))
    # Every seed by itself. Alpha and beta within 1 %, lambda_max within 0.5 %. Gamma: 1 % is about twice its standard
    # error at 10 ms of jitter, so one or two seeds in twenty lie outside (docs/evidence/queueing.md section 2 says so).
    assert (size[:, :2] < 0.01).all() and (size[:, 3] < 0.005).all()
    assert (size[:, 2] < 0.01).sum() >= 18 and size[:, 2].max() < 0.015


@pytest.mark.evidence
def test_other_truths_after_a_third_stage():
    """lambda_max within 3 % and the right order in every seed; of the coefficients, those that the page calls met."""
    from benchmarks.evidence_step_clock import cases, recovered

    tried = 0
    for name, truth, rates, jitter_s in cases():
        if len(rates) < 3:
            continue
        found = recovered(truth, rates, jitter_s, 5)
        size = np.abs(found["errors"])
        assert (size[:, [0, 3]] < 0.03).all(), name
        assert (size[:, 2] < (0.04 if name == "kink" else 0.03)).all(), name  # kink: biased, missed by the page
        if name not in ("context", "kink"):  # their batch term is a small part of the step
            assert (size[:, 1] < 0.03).all(), name
        assert all(("quadratic" in order) == (name == "quadratic") for order in found["orders"]), name
        tried += 1
    assert tried == 5
