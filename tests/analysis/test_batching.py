"""T(n), X(n), lambda_max and the fixed point, against hand counts and a numeric root."""
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import batching as b

LAW = b.StepLaw(0.6e-3, 0.04e-3, 8e-6)
LENGTHS = b.Lengths(1050.0, 482.4920, 333886.2)  # floor of lognormal(6, 0.6), prompts U{100..2000}


@pytest.mark.parametrize(("n", "qps"), [(1, 3.15), (8, 15.65), (16, 21.84), (32, 27.21), (64, 31.03), (256, 34.69)])
def test_throughput_table(n, qps):
    assert float(b.throughput_qps(LAW, LENGTHS, n)) == pytest.approx(qps, abs=0.005)


@pytest.mark.parametrize("law", [LAW, b.StepLaw(0.0, 2e-3, 0.0), b.StepLaw(0.0, 0.0, 1e-4)])
def test_nobody_in_the_batch_is_no_throughput_and_no_warning(law):
    """A fit may give no base cost (alpha 0): then nobody does no work either, and 0/0 is still no throughput."""
    with np.errstate(all="raise"):
        assert b.throughput_qps(law, LENGTHS, np.array([0.0, 1.0]))[0] == 0.0
        assert float(b.throughput_qps(law, LENGTHS, 0.0)) == 0.0
        assert b.flattening_batch_size(law, LENGTHS, 8) >= 1


def test_lambda_max_by_hand():
    # m (alpha/K + beta) + gamma P = 482.492 * (18.75 us + 40 us) + 8.4 ms = 28.3464 + 8.4 ms
    assert b.lambda_max_qps(LAW, LENGTHS, 32) == pytest.approx(1 / 0.036746405, rel=1e-7)
    # K infinite: 482.492 * 40 us + 8.4 ms = 27.69968 ms
    assert b.lambda_max_qps(LAW, LENGTHS, None) == pytest.approx(1 / 0.02769968, rel=1e-7)
    assert b.lambda_max_qps(LAW, LENGTHS, 16) == pytest.approx(21.84, abs=0.005)  # a cap of 16 costs a fifth
    assert b.lambda_max_qps(b.StepLaw(1e-3, 0, 0), LENGTHS, None) == math.inf


def test_lambda_max_gradient_against_finite_differences():
    law = b.StepLaw(0.6e-3, 0.04e-3, 8e-6, 1e-7, 2e-8, -2e-3)
    base = [law.alpha_s, law.beta_s, law.gamma_s, law.kappa_s, law.kv_s, law.prefill_s]
    gradient = b.lambda_max_gradient(law, LENGTHS, 32)
    for i in range(6):
        up, down = list(base), list(base)
        h = base[i] * 1e-4
        up[i] += h
        down[i] -= h
        numeric = (b.lambda_max_qps(b.StepLaw(*up), LENGTHS, 32) - b.lambda_max_qps(b.StepLaw(*down), LENGTHS, 32)) / (
            2 * h
        )
        assert gradient[i] == pytest.approx(numeric, rel=1e-6)


def test_cost_per_prefill_step_by_hand():
    law, lengths = b.StepLaw(7.1e-3, 10.9e-6, 21e-6, 0.0, 49e-9, -4.2e-3), b.Lengths(1050.0, 97.0, 97.0**2 * 1.4333)
    # alone: 22.05 - 4.2 = 17.85 ms; at 32: r = .3299, f = (1 - e^-r)/r = .8518 -> 22.05 - 3.5775 = 18.4725 ms
    assert law.prefill_work_s(lengths, 0.0) == pytest.approx(17.85e-3, rel=1e-6)
    assert law.prefill_work_s(lengths, 32) == pytest.approx(18.4725e-3, rel=1e-5)
    # 97 * (7.1 ms/32 + 10.9 us + 49 ns * 1119.5) = 21.522 + 1.057 + 5.321 = 27.900 ms
    assert b.lambda_max_qps(law, lengths, 32) == pytest.approx(1 / (27.900e-3 + 18.4725e-3), rel=1e-4)
    assert b.mean_field(law, lengths, b.lambda_max_qps(law, lengths, 32), 32).batch_size == pytest.approx(32, rel=1e-6)
    assert b.StepLaw(1e-3, 0, 1e-6, 0, 0, -1.0).prefill_work_s(lengths, 8) == 0.0  # hidden, never negative


def test_context_mean_by_hand():
    # two requests, prompt 10, outputs 1 and 3: token steps see contexts 10.5 | 10.5 11.5 12.5 (mid-step)
    lengths = b.lengths_of(np.array([10, 10]), np.array([1, 3]))
    assert lengths.context_mean == pytest.approx((10.5 + 10.5 + 11.5 + 12.5) / 4)
    with pytest.raises(ValueError, match="no output tokens"):
        b.lengths_of(np.array([]), np.array([]))


@pytest.mark.parametrize(
    ("qps", "root"),
    # n* = l m alpha/(1 - l m beta), l = lambda/(1 - lambda gamma P)
    # 15: l = 15/(1-.126) = 17.1625; 17.1625*482.492*.6e-3 = 4.96845; /(1 - .33123) = 7.42924
    [(15.0, 7.42924), (20.0, 12.98166)],
)
def test_fixed_point_by_hand(qps, root):
    point = b.mean_field(LAW, LENGTHS, qps, 32)
    assert point.exists and point.admissible
    assert point.batch_size == pytest.approx(root, rel=1e-5)
    assert point.residence_s == pytest.approx(root / qps, rel=1e-5)  # Little
    assert point.load_ratio == pytest.approx(qps / 27.2135, rel=1e-4)


def test_fixed_point_existence_and_admissibility():
    limit, asymptote = b.lambda_max_qps(LAW, LENGTHS, 32), b.lambda_max_qps(LAW, LENGTHS, None)
    assert b.mean_field(LAW, LENGTHS, limit * 0.999, 32).admissible
    over = b.mean_field(LAW, LENGTHS, limit * 1.001, 32)
    assert over.exists and not over.admissible and "queue grows" in over.reason
    assert over.batch_size == pytest.approx(32, rel=0.02)  # n* reaches K exactly at lambda_max(K)
    assert b.mean_field(LAW, LENGTHS, asymptote * 0.999, 32).exists
    beyond = b.mean_field(LAW, LENGTHS, asymptote * 1.001, 32)
    assert not beyond.exists and beyond.batch_size is None and "no solution" in beyond.reason
    prefill = b.mean_field(LAW, LENGTHS, 120.0, 32)  # 120 * 8 us * 1050 = 1.008 of the time
    assert not prefill.exists and "prefill alone" in prefill.reason
    assert b.mean_field(LAW, LENGTHS, 0.0, 32).batch_size == 0.0


def test_convex_step_time_has_two_roots_then_none():
    law = b.StepLaw(0.6e-3, 0.01e-3, 8e-6, 1e-6)
    point = b.mean_field(law, LENGTHS, 20.0, 32)
    assert point.exists and point.batch_size < point.upper_root
    for n in (point.batch_size, point.upper_root):  # both solve n = lambda' m T(n)
        rate = 20.0 / (1 - 20.0 * 8e-6 * 1050) * 482.4920
        assert n == pytest.approx(rate * float(law.step_s(n, LENGTHS.context_mean)), rel=1e-9)
    assert not b.mean_field(law, LENGTHS, 30.0, 32).exists
    assert b.peak_batch_size(law, LENGTHS, 64) in (24, 25)  # alpha/n + kappa n is least at sqrt(600) = 24.5
    assert b.marginal_gain(law, LENGTHS, 64)[-1]["gain_qps"] < 0


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1e-4, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-5), st.floats(0, 1e-7),
    st.floats(0.01, 60), st.floats(2, 2000), st.floats(1, 4000), st.floats(-1e-2, 1e-2),
)  # fmt: skip
def test_fixed_point_equals_a_numeric_root(alpha, beta, gamma, kappa, kv, qps, output, prompt, delta):
    law, lengths = b.StepLaw(alpha, beta, gamma, kappa, kv, delta), b.Lengths(prompt, output, 1.5 * output**2)
    point = b.mean_field(law, lengths, qps, 32)
    numeric = b.mean_field_numeric(law, lengths, qps, 32)
    apart = not point.exists or point.upper_root is None or point.upper_root > 1.1 * point.batch_size
    if point.exists and point.batch_size < 1e6 and apart:
        assert numeric == pytest.approx(point.batch_size, rel=1e-6)
    if not point.exists:
        assert numeric is None


@settings(max_examples=200, deadline=None)
@given(
    st.floats(1e-4, 1e-1), st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-5), st.integers(1, 512)
)
def test_usl_form_is_the_same_curve(alpha, beta, gamma, kappa, n):
    law = b.StepLaw(alpha, beta, gamma, kappa)
    assert b.usl_form(law, LENGTHS).throughput_qps(n) == pytest.approx(
        float(b.throughput_qps(law, LENGTHS, n)), rel=1e-9
    )


def test_usl_of_the_reference_shape():
    # sigma = (beta + gamma P/m)/(alpha + beta + gamma P/m); gamma P/m = 17.4096 us -> 57.4096/657.4096
    usl = b.usl_form(LAW, LENGTHS)
    assert usl.sigma == pytest.approx(57.4096 / 657.4096, rel=1e-5)
    assert usl.kappa == 0.0


def test_marginal_gain_and_flattening_point():
    curve = b.marginal_gain(LAW, LENGTHS, 48)
    assert [p["batch_size"] for p in curve] == [1, 2, 4, 8, 16, 32, 48]
    assert curve[0]["gain_ratio"] == pytest.approx(1.0)
    gains = [p["gain_ratio"] for p in curve]
    assert gains == sorted(gains, reverse=True)
    flat = b.flattening_batch_size(LAW, LENGTHS, 256)
    steps = np.diff(b.throughput_qps(LAW, LENGTHS, np.array([flat - 2.0, flat - 1.0, flat])))
    first = float(b.throughput_qps(LAW, LENGTHS, 1.0))
    assert steps[1] < 0.1 * first <= steps[0]
    assert b.flattening_batch_size(b.StepLaw(1e-3, 0, 0), LENGTHS, 8) == 8  # perfect scaling never flattens
