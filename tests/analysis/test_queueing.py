"""Closed forms against published tables, exact rational arithmetic and independent simulation."""
from __future__ import annotations

import heapq
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from analysis import queueing as q

SCV = math.exp(0.36) - 1  # lognormal, sigma 0.6


def test_lognormal_moments_of_the_seed_lengths():
    m = q.lognormal_moments(6.0, 0.6)
    assert m.mean == pytest.approx(482.9920, abs=5e-5)  # exp(6.18)
    assert m.second == pytest.approx(334368.85, abs=5e-3)  # exp(12.72)
    assert math.sqrt(m.variance) == pytest.approx(317.9428, abs=5e-5)
    assert m.scv == pytest.approx(0.4333294, abs=5e-8)  # exp(.36) - 1
    assert q.lognormal_raw_moment(6.0, 0.6, 3) == pytest.approx(3.317858e8, rel=1e-6)
    expected = {0.5: 403.4288, 0.9: 870.38, 0.95: 1082.37, 0.99: 1629.14, 0.999: 2576.38}
    for p, value in expected.items():
        assert q.lognormal_quantile(6.0, 0.6, p) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    ("cap", "mean", "scv", "share"),
    [
        (512, 379.638, 0.1182, 0.3456),
        (1024, 462.398, 0.2930, 0.0603),
        (2048, 481.464, 0.4088, 0.0034),
        (4096, 482.955, 0.4320, 0.00006),
    ],
)
def test_clipped_lognormal_against_table_and_quadrature(cap, mean, scv, share):
    m = q.clipped_lognormal_moments(6.0, 0.6, cap)
    assert m.mean == pytest.approx(mean, abs=1e-3)
    assert m.scv == pytest.approx(scv, abs=1e-4)
    assert m.clipped_share == pytest.approx(share, abs=5e-5)
    law = stats.lognorm(s=0.6, scale=math.exp(6.0))
    # second path: E[min(X,c)^k] = integral_0^c k x^(k-1) P(X > x) dx
    for k, ours in ((1, m.mean), (2, m.second)):
        direct = integrate.quad(lambda x, k=k: k * x ** (k - 1) * law.sf(x), 0, cap, epsabs=1e-9, limit=400)[0]
        assert ours == pytest.approx(direct, rel=1e-6)


def test_clipped_lognormal_refuses_a_cap_of_zero():
    with pytest.raises(ValueError, match="above 0"):
        q.clipped_lognormal_moments(6.0, 0.6, 0)


@pytest.mark.parametrize(
    ("rho", "lognormal", "mm1", "md1"),
    [
        # lambda = 1, s = rho: M/M/1 = rho^2/(1-rho), M/D/1 half of it, lognormal * (1 + .4333294)/2
        (0.5, 0.358332, 0.5, 0.25),
        (0.7, 1.170552, 1.633333, 0.816667),
        (0.8, 2.293327, 3.2, 1.6),
        (0.9, 5.804984, 8.1, 4.05),
    ],
)
def test_single_server_table(rho, lognormal, mm1, md1):
    assert q.pollaczek_khinchine_wait_s(1.0, rho, SCV) == pytest.approx(lognormal, abs=6e-7)
    assert q.mm1_wait_s(1.0, rho) == pytest.approx(mm1, abs=6e-7)
    assert q.md1_wait_s(1.0, rho) == pytest.approx(md1, abs=6e-7)
    # the other form of P-K: lambda E[S^2] / (2 (1 - rho)), from raw moments
    mu = math.log(rho) - 0.18  # E = exp(mu + .18) = rho
    second = q.lognormal_raw_moment(mu, 0.6, 2)
    assert q.pollaczek_khinchine_wait_s(1.0, rho, SCV) == pytest.approx(second / (2 * (1 - rho)), rel=1e-12)


@pytest.mark.parametrize(
    ("ca2", "rho", "expected"), [(0.5, 0.7, 0.7622), (0.5, 0.9, 3.7800), (4.0, 0.7, 3.621), (4.0, 0.9, 17.95)]
)
def test_kingman_table(ca2, rho, expected):
    assert q.kingman_wait_s(1.0, rho, ca2, SCV) == pytest.approx(expected, rel=4e-4)  # the table has four digits


def test_kingman_is_pollaczek_khinchine_for_poisson_arrivals():
    assert q.kingman_wait_s(2.0, 0.4, 1.0, 0.7) == pytest.approx(q.pollaczek_khinchine_wait_s(2.0, 0.4, 0.7), rel=1e-14)


@pytest.mark.parametrize(
    ("sigma", "ratio"),
    # exp(sigma^2): P-K over M/D/1 is 1 + SCV whatever the load
    [(0.6, 1.4333294), (1.0, 2.71828), (1.2, 4.22070), (1.269, 5.00462), (1.5, 9.48774)],
)
def test_heavy_tail_factor_against_deterministic_service(sigma, ratio):
    scv = q.lognormal_moments(0.0, sigma).scv
    for rho in (0.3, 0.7, 0.95):
        assert q.pollaczek_khinchine_wait_s(1, rho, scv) / q.md1_wait_s(1, rho) == pytest.approx(ratio, rel=1e-5)


def test_seed_claim_of_four_to_five_times_is_not_sigma_06():
    # x1.433 against M/D/1 and x0.717 against M/M/1; 4-5 times needs sigma 1.18-1.27 or 1.44-1.52
    assert q.pollaczek_khinchine_wait_s(1, 0.8, SCV) / q.mm1_wait_s(1, 0.8) == pytest.approx(0.717, rel=1e-3)
    for factor, against_d, against_m in ((4, 1.18, 1.44), (5, 1.27, 1.52)):
        assert math.sqrt(math.log(factor)) == pytest.approx(against_d, abs=0.005)
        assert math.sqrt(math.log(2 * factor)) == pytest.approx(against_m, abs=0.005)
        scv = q.lognormal_moments(0, math.sqrt(math.log(2 * factor))).scv
        assert q.pollaczek_khinchine_wait_s(1, 0.6, scv) / q.mm1_wait_s(1, 0.6) == pytest.approx(factor, rel=1e-12)


def _erlang_b_exact(servers: int, offered: Fraction) -> Fraction:
    """a^c/c! / sum a^k/k!, in exact rationals: the definition, free of rounding and overflow."""
    term, total = Fraction(1), Fraction(1)
    for k in range(1, servers + 1):
        term = term * offered / k
        total += term
    return term / total


@pytest.mark.parametrize(
    ("servers", "rho", "c", "mmc", "allen", "kimura"),
    [
        (2, Fraction(8, 10), 0.71111111, 1.777778, 1.274071, 1.283837),
        (8, Fraction(8, 10), 0.45764493, 0.286028, 0.204986, 0.212148),
        (32, Fraction(8, 10), 0.16062321, 0.025097, 0.017986, 0.019543),
        (32, Fraction(9, 10), 0.45819662, 0.143186, 0.102617, 0.106715),
        (32, Fraction(95, 100), 0.69571011, 0.434819, 0.311619, 0.317611),
    ],
)
def test_many_server_table(servers, rho, c, mmc, allen, kimura):
    offered = float(servers * rho)
    assert q.erlang_c(servers, offered) == pytest.approx(c, abs=6e-9)
    assert q.mmc_wait_s(offered, 1.0, servers) == pytest.approx(mmc, abs=6e-7)
    assert q.allen_cunneen_wait_s(offered, 1.0, servers, SCV) == pytest.approx(allen, abs=6e-7)
    assert q.kimura_wait_s(offered, 1.0, servers, SCV) == pytest.approx(kimura, abs=6e-7)
    exact_b = _erlang_b_exact(servers, servers * rho)
    assert q.erlang_b(servers, offered) == pytest.approx(float(exact_b), rel=1e-12)
    exact_c = exact_b / (1 - rho * (1 - exact_b))
    assert q.erlang_c(servers, offered) == pytest.approx(float(exact_c), rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 999))
def test_erlang_b_recursion_equals_its_definition(servers, thousandths):
    offered = Fraction(thousandths * servers, 1000)
    exact = float(_erlang_b_exact(servers, offered))
    assert q.erlang_b(servers, float(offered)) == pytest.approx(exact, rel=1e-11, abs=1e-300)


def test_erlang_with_ten_thousand_servers_does_not_overflow():
    assert 0 < q.erlang_b(10_000, 9_990.0) < 0.01
    assert 0 < q.erlang_c(10_000, 9_990.0) < 1


def test_one_server_reduces_to_pollaczek_khinchine():
    for scv in (0.0, 0.4333, 1.0, 3.0):
        expected = q.pollaczek_khinchine_wait_s(0.8, 1.0, scv)
        assert q.allen_cunneen_wait_s(0.8, 1.0, 1, scv) == pytest.approx(expected, rel=1e-12)
        assert q.kimura_wait_s(0.8, 1.0, 1, scv) == pytest.approx(expected, rel=1e-12)
    assert q.cosmetatos_wait_s(0.8, 1.0, 1) == pytest.approx(q.md1_wait_s(0.8, 1.0), rel=1e-12)


def test_no_steady_state_is_infinite_never_negative():
    for wait in (
        q.pollaczek_khinchine_wait_s(20, 0.33, SCV),  # rho 6.6: the seed's own misuse
        q.kingman_wait_s(1, 1, 1, 1),
        q.mmc_wait_s(40, 1, 32),
        q.cosmetatos_wait_s(32, 1, 32),
        q.kimura_wait_s(33, 1, 32, SCV),
        q.processor_sharing_residence_s(1.0, 1.0),
    ):
        assert wait == math.inf
    assert q.erlang_c(4, 4.0) == 1.0
    assert q.mgc_wait(40, 1.0, 32, SCV) is None


def test_little_and_processor_sharing():
    assert q.little_in_flight(20.0, 0.72) == pytest.approx(14.4)
    assert q.processor_sharing_residence_s(0.8, 1.0) == pytest.approx(5.0)  # 1 / (1 - .8)
    assert q.processor_sharing_slowdown(0.8, 1.0) == pytest.approx(5.0)


def test_sample_moments_hand_count_and_empty():
    m = q.sample_moments(np.array([1.0, 3.0]))
    assert (m.mean, m.second, m.variance, m.scv) == (2.0, 5.0, 1.0, 0.25)
    with pytest.raises(ValueError, match="empty"):
        q.sample_moments(np.array([]))


def test_wait_survival_integrates_to_its_mean():
    wait = q.mgc_wait(28.8, 1.0, 32, SCV)
    area = integrate.quad(lambda x: float(wait.survival(x)), 0, 20)[0]
    assert area == pytest.approx(wait.mean_s, rel=1e-6)
    assert float(wait.survival(-1.0)) == 1.0
    assert float(wait.survival(0.0)) == pytest.approx(wait.waits_probability)
    assert q.QueueWait(0.0, 0.0).survival(np.array([0.0, 1.0])).tolist() == [0.0, 0.0]


# ---- independent simulation ----------------------------------------------------


def _lindley_mean_wait(gaps: np.ndarray, service: np.ndarray) -> float:
    """Mean wait of a single-server queue by W' = max(0, W + S - A), as a running minimum."""
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - gaps[1:])])
    return float((walk - np.minimum.accumulate(walk)).mean())


def test_pollaczek_khinchine_against_lindley():
    rng = np.random.default_rng(7)
    n, rho = 2_000_000, 0.7
    service = rng.lognormal(math.log(rho) - 0.18, 0.6, n)
    simulated = _lindley_mean_wait(rng.exponential(1.0, n), service)
    # the interval for 4e6 jobs is 0.7 %; 2 % is above 4 standard errors here
    assert simulated == pytest.approx(q.pollaczek_khinchine_wait_s(1.0, rho, SCV), rel=0.02)


def _many_server_mean_wait(rng: np.random.Generator, n: int, servers: int, rho: float) -> float:
    """Mean wait of M/LN/c with mean service 1, by the time each server is free next."""
    arrivals = np.cumsum(rng.exponential(1 / (servers * rho), n)).tolist()
    service = rng.lognormal(-0.18, 0.6, n).tolist()
    free = [0.0] * servers
    total = 0.0
    for at, work in zip(arrivals, service, strict=True):
        start = max(at, free[0])
        total += start - at
        heapq.heapreplace(free, start + work)
    return total / n


def test_kimura_against_many_server_simulation():
    simulated = _many_server_mean_wait(np.random.default_rng(3), 400_000, 8, 0.8)
    # an earlier simulation gave .2086 +- .0043; at 4e5 jobs the standard error is about 2 %, so 6 %
    assert simulated == pytest.approx(q.kimura_wait_s(6.4, 1.0, 8, SCV), rel=0.06)
