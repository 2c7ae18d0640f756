"""The birth-death predictor: its three exact limits, a brute-force chain, and the simulator."""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import queueing as q
from analysis.batching import Lengths, StepLaw, lambda_max_qps
from analysis.birth_death import (
    chain,
    limited_ps,
    quantile_of,
    residence_quantile_s,
    residence_survival,
    service_rates_qps,
    thin,
    ttft_quantile_s,
)

sys.path.insert(0, str(Path(__file__).parent))
from reference_des import Truth, poisson_load, simulate

LAW = StepLaw(0.6e-3, 0.04e-3, 8e-6)
LENGTHS = Lengths(1050.0, 482.4920, 333886.2)


def test_limit_one_slot_is_pollaczek_khinchine():
    law, lengths = StepLaw(1e-3, 0.0, 0.0), Lengths(100.0, 400.0, 400.0**2 * 1.6)
    state = limited_ps(law, lengths, 2.0, 1)  # s = 0.4 s, rho 0.8, SCV 0.6
    assert state.wait.mean_s == pytest.approx(q.pollaczek_khinchine_wait_s(2.0, 0.4, 0.6), rel=1e-12)
    assert state.residence_s == pytest.approx(0.4 + state.wait.mean_s, rel=1e-12)


@pytest.mark.parametrize("servers", [2, 8, 32])
def test_limit_constant_step_is_erlang(servers):
    law, lengths = StepLaw(1e-3, 0.0, 0.0), Lengths(100.0, 1000.0, 1000.0**2 * 2)  # s = 1 s, SCV 1
    state = limited_ps(law, lengths, 0.9 * servers, servers)
    assert state.wait.waits_probability == pytest.approx(q.erlang_c(servers, 0.9 * servers), rel=1e-10)
    assert state.wait.mean_s == pytest.approx(q.mmc_wait_s(0.9 * servers, 1.0, servers), rel=1e-10)
    assert state.service_s == pytest.approx(1.0, rel=1e-10)
    half = Lengths(100.0, 1000.0, 1000.0**2 * 1.2)  # SCV 0.2: the factor (1 + SCV)/2
    assert limited_ps(law, half, 0.9 * servers, servers).wait.mean_s == pytest.approx(
        q.allen_cunneen_wait_s(0.9 * servers, 1.0, servers, 0.2), rel=1e-9
    )


def test_limit_many_slots_is_processor_sharing():
    law, lengths = StepLaw(0.0, 1e-3, 0.0), Lengths(100.0, 400.0, 400.0**2 * 3)  # s = 0.4 s whatever n
    state = limited_ps(law, lengths, 2.0, 3000)
    assert state.residence_s == pytest.approx(q.processor_sharing_residence_s(2.0, 0.4), rel=1e-9)
    assert state.wait.waits_probability < 1e-200


@pytest.mark.parametrize("slots", [1, 2, 8, 32])
def test_limited_sharing_of_one_constant_rate(slots):
    # rho .8, s .8, exponential lengths: 4.0 for every K; lognormal(.6) at K = 1: 3.093
    exponential, lognormal = Lengths(1.0, 1.0, 2.0), Lengths(1.0, 1.0, 1.4333294)
    mu = np.full(slots, 1 / 0.8)
    assert chain(mu, exponential, 1.0).residence_s == pytest.approx(4.0, rel=1e-9)
    if slots == 1:
        assert chain(mu, lognormal, 1.0).residence_s == pytest.approx(3.093, abs=5e-4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.1, 50), min_size=1, max_size=12), st.floats(0.05, 0.95))
def test_chain_equals_a_brute_force_sum(mu, load):
    mu = np.array(mu)
    lengths = Lengths(10.0, 10.0, 130.0)  # SCV 0.3
    arrival = load * mu[-1]
    state = chain(mu, lengths, arrival)
    # second path: the unnormalised products one by one, far into the geometric tail
    p, weight = [1.0], 1.0
    for j in range(1, 3000):
        weight *= arrival / mu[min(j, mu.size) - 1]
        p.append(weight)
    p = np.array(p) / sum(p)
    j = np.arange(p.size)
    waiting = float((np.maximum(j - mu.size, 0) * p).sum())
    assert state.wait.mean_s == pytest.approx(waiting / arrival * 1.3 / 2, rel=1e-6, abs=1e-12)
    assert state.wait.waits_probability == pytest.approx(float(p[mu.size :].sum()), rel=1e-6, abs=1e-12)
    assert state.batch_size_mean == pytest.approx(float((np.minimum(j, mu.size) * p).sum()), rel=1e-6)
    assert state.busy_probability == pytest.approx(1 - float(p[0]), abs=1e-9)
    assert state.in_flight_mean == pytest.approx(arrival * state.residence_s)


def test_no_steady_state_is_none():
    top = lambda_max_qps(LAW, LENGTHS, 32)
    assert limited_ps(LAW, LENGTHS, top * 1.0001, 32) is None
    assert limited_ps(LAW, LENGTHS, 0.0, 32) is None
    assert limited_ps(LAW, LENGTHS, top * 0.9999, 32).residence_s > 50


def test_service_rates_end_at_lambda_max():
    rates = service_rates_qps(LAW, LENGTHS, 32)
    assert rates[-1] == pytest.approx(lambda_max_qps(LAW, LENGTHS, 32), rel=1e-12)
    assert rates[0] == pytest.approx(3.15, abs=0.005)


def test_quantile_inverts_the_survival_function():
    state = limited_ps(LAW, LENGTHS, 25.0, 32)
    output = np.random.default_rng(1).lognormal(6.0, 0.6, 1500)
    for p in (0.5, 0.95, 0.999):
        x = residence_quantile_s(state, output, p)
        assert residence_survival(state, np.sort(output), x) == pytest.approx(1 - p, abs=1e-6 + 1 / output.size)
    assert quantile_of(lambda x: 0.0, 0.95, 1.0) == 0.0
    assert quantile_of(lambda x: 1.0, 0.95, 1.0) == float("inf")
    assert thin(np.arange(10_000.0)).size == 2000


def test_monte_carlo_of_the_same_law_gives_the_same_quantile():
    state = limited_ps(LAW, LENGTHS, 25.0, 32)
    rng = np.random.default_rng(2)
    output = rng.lognormal(6.0, 0.6, 2000)
    waits = rng.exponential(state.wait.tail_mean_s, 400_000) * (rng.random(400_000) < state.wait.waits_probability)
    drawn = waits + rng.choice(output, 400_000) * state.token_s
    # 4e5 draws: the standard error of a p95 is about 0.3 %
    assert residence_quantile_s(state, output, 0.95) == pytest.approx(float(np.quantile(drawn, 0.95)), rel=0.015)


@pytest.mark.parametrize(
    ("qps", "mean", "p95"),
    # long-run truth of an earlier study (4 paths of 6,000 s and more)
    [(20.0, 0.718, 1.637), (22.0, 0.822, 1.876), (25.0, 1.107, 2.48)],
)
def test_reference_shape_within_the_stated_error(qps, mean, p95):
    state = limited_ps(LAW, LENGTHS, qps, 32)
    output = np.floor(np.random.default_rng(3).lognormal(6.0, 0.6, 100_000))
    assert state.residence_s == pytest.approx(mean, rel=0.02)
    assert residence_quantile_s(state, output, 0.95) == pytest.approx(p95, rel=0.04)


def test_against_the_step_by_step_simulator():
    load = poisson_load(22.0, 1200.0, 11)
    first, last = simulate(load, Truth())
    late = load.arrival > 60
    measured = (last - load.arrival)[late]
    lengths = Lengths(float(load.prompt.mean()), float(load.output.mean()), float((load.output**2.0).mean()))
    qps = load.arrival.size / 1200.0
    state = limited_ps(LAW, lengths, qps, 32)
    # the model is good to 2 %/4 %; one 1,200 s path at 81 % load has about 2 % of its own error
    assert state.residence_s == pytest.approx(measured.mean(), rel=0.05)
    assert residence_quantile_s(state, load.output, 0.95) == pytest.approx(np.quantile(measured, 0.95), rel=0.08)
    ttft = ttft_quantile_s(state, LAW, lengths, load.prompt, 0.95)
    assert 0.01 < ttft < 0.1 and (first - load.arrival).min() > 0
