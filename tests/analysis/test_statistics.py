"""Percentiles, intervals, attainment: hand counts and published references."""
from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from analysis.attainment import arrivals_needed, binding_clause, decide, hits, share_interval
from analysis.intervals import (
    batch_correction,
    batch_interval,
    independent_states,
    mser5,
    quantile_interval,
    ratio_interval,
    variance_inflation,
    wilson,
)
from analysis.percentiles import MIN_SAMPLES, SHARES, ecdf_points, min_samples, nearest_rank, summarise
from bench.records.analysis import Interval

INF = math.inf


@pytest.mark.parametrize(
    ("n", "share", "rank"),
    [
        (1, 0.5, 1),
        (2, 0.5, 1),  # ceil(1.0)
        (10, 0.95, 10),  # ceil(9.5)
        (20, 0.95, 19),  # exactly 19, and 0.95 * 20 is a float
        (100, 0.95, 95),
        (100, 0.99, 99),
        (1000, 0.999, 999),
        (7, 0.9, 7),  # ceil(6.3)
    ],
)
def test_nearest_rank_by_hand(n: int, share: float, rank: int) -> None:
    assert nearest_rank(np.arange(1.0, n + 1), share) == rank


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@settings(max_examples=300, deadline=None)
def test_nearest_rank_is_numpys_inverted_cdf(values: list[float], share: float) -> None:
    assert nearest_rank(np.sort(values), share) == np.quantile(values, share, method="inverted_cdf")


def test_p95_is_within_a_target_exactly_when_95_percent_are() -> None:
    # 19 of 20 within 1 s: share .95, P95 = rank 19 = 1.0. 18 of 20: rank 19 is a miss.
    assert nearest_rank(np.array([1.0] * 19 + [INF]), 0.95) == 1.0
    assert nearest_rank(np.array([1.0] * 18 + [INF] * 2), 0.95) == INF


def test_minimum_samples_are_those_of_the_order_statistic_interval() -> None:
    # 1 - p^n >= .975: .95^72 = .0249, .95^71 = .0262; .99^368 = .0248; .999^3688 = .02497
    assert [min_samples(SHARES[k]) for k in ("p50", "p90", "p95", "p99", "p999")] == [6, 36, 72, 368, 3688]
    assert [MIN_SAMPLES[k] for k in ("p50", "p90", "p95", "p99", "p999")] == [6, 36, 72, 368, 3688]


def test_summary_withholds_what_the_sample_cannot_carry() -> None:
    p = summarise(np.arange(1.0, 72.0))  # 71 values
    assert p.n == 71 and p.p90 == 64 and p.p95 is None and "72" in p.withheld["p95"]  # ceil(63.9) = 64
    p = summarise(np.arange(1.0, 73.0))
    assert p.p95 == 69 and p.p99 is None  # ceil(68.4)
    p = summarise(np.arange(1.0, 101.0), effective_n=50, effective_n_high=60)
    assert p.p95 is None and p.p90 == 90 and "depend" in p.withheld["p95"] and p.effective_n == 50
    assert summarise(np.array([])).p50 is None
    assert summarise(np.array([np.nan])).n == 0


def test_summary_keeps_misses_as_infinite() -> None:
    p = summarise(np.array([1.0] * 90 + [INF] * 10))
    assert p.p50 == 1.0 and p.p90 == 1.0 and p.p95 == INF and p.maximum == INF and p.mean == INF


def test_ecdf_counts_misses_in_the_share_only() -> None:
    assert ecdf_points(np.array([1.0, 2.0, INF, INF])) == [[1.0, 0.25], [2.0, 0.5]]
    assert len(ecdf_points(np.arange(1000.0))) == 100


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [  # published references of the method
        (1485, 1500, 0.98357, 0.99393),
        (4455, 4500, 0.98665, 0.99252),
        (297, 300, 0.97102, 0.99660),
        (1500, 1500, 0.99745, 1.0),
    ],
)
def test_wilson_references(count: int, n: int, low: float, high: float) -> None:
    found = wilson(count, n)
    assert found == pytest.approx((low, high), abs=1e-5)
    exact = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
    assert found == pytest.approx((exact.low, exact.high), abs=1e-12)


@given(st.integers(1, 5000), st.data())
@settings(max_examples=200, deadline=None)
def test_wilson_equals_scipy(n: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, n))
    exact = stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
    assert wilson(count, n) == pytest.approx((exact.low, exact.high), abs=1e-10)


@pytest.mark.parametrize(("n", "allowed"), [(1500, 7), (4500, 31), (6000, 44), (7500, 58)])
def test_misses_allowed_to_demonstrate_99_percent(n: int, allowed: int) -> None:
    assert wilson(n - allowed, n)[0] >= 0.99 > wilson(n - allowed - 1, n)[0]


def test_arrivals_needed_without_a_miss() -> None:
    need = arrivals_needed(0.99)
    assert wilson(need, need)[0] >= 0.99 > wilson(need - 1, need - 1)[0]
    assert need == 381  # z² .99/.01 = 3.8415 * 99 = 380.3


def _hits(**over: object) -> object:
    base = dict(
        ok=np.array([True, True, True, True, False, False]),
        ttft_s=np.array([0.5, 0.9, 0.5, 0.5, np.nan, np.nan]),
        tpot_s=np.array([0.05, 0.05, 0.2, np.nan, np.nan, np.nan]),  # the fourth answer has one token
        e2e_s=np.array([1.0, 1.0, 3.0, 0.5, np.nan, np.nan]),
        ttft_deadline_s=0.8, tpot_deadline_s=0.1, e2e_target_s=2.0,
        unsent=np.array([False] * 5 + [True]), cut_off=np.zeros(6, bool), age_s=np.full(6, np.nan),
    )  # fmt: skip
    return hits(**{**base, **over})  # type: ignore[arg-type]


def test_clauses_by_hand() -> None:
    found = _hits()
    assert found.ttft.tolist() == [True, False, True, True, False, False]
    assert found.tpot.tolist() == [True, True, False, True, False, False]  # one token: the clause is met
    assert found.joint.tolist() == [True, False, False, True, False, False]
    assert found.e2e.tolist() == [True, True, False, True, False, False]
    assert found.unknown.tolist() == [False] * 5 + [True]  # never sent: nobody knows


def test_cut_off_requests_bound_the_attainment() -> None:
    found = hits(
        ok=np.zeros(4, bool), ttft_s=np.array([0.5, 0.9, np.nan, np.nan]), tpot_s=np.full(4, np.nan),
        e2e_s=np.full(4, np.nan), ttft_deadline_s=0.8, tpot_deadline_s=0.1, e2e_target_s=2.0,
        unsent=np.zeros(4, bool), cut_off=np.ones(4, bool), age_s=np.array([9, 9, 0.3, 5.0]),
    )  # fmt: skip
    # first token in time: unknown; first token late: a miss; young without one: unknown; old without one: a miss
    assert found.unknown.tolist() == [True, False, True, False] and not found.joint.any()


def test_binding_clause_by_hand() -> None:
    ok = np.array([True, True, True, True, False, False])
    assert binding_clause(_hits(), ok) == "failures"  # 2 failures, 1 TTFT, 1 TPOT
    assert binding_clause(_hits(ttft_s=np.full(6, 0.9)), ok) == "ttft"
    every = np.ones(6, bool)
    good = _hits(ok=every, ttft_s=np.full(6, 0.1), tpot_s=np.full(6, 0.01))
    assert binding_clause(good, every) == "none"


def test_decisions() -> None:
    assert decide(Interval(0.995, 0.991, 0.998), 0.99) == "MET"
    assert decide(Interval(0.98, 0.97, 0.989), 0.99) == "NOT_MET"
    assert decide(Interval(0.99, 0.985, 0.995), 0.99) == "UNDECIDED"
    assert decide(Interval(None), 0.99) == "UNDECIDED"


def test_share_interval_widens_for_dependent_misses() -> None:
    rng = np.random.default_rng(5)
    free = rng.random(2000) > 0.1
    runs = np.repeat(rng.random(40) > 0.1, 50)  # misses come in runs of 50
    assert share_interval(free).method == "Wilson"
    narrow, wide = share_interval(free), share_interval(runs)
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)
    assert "effective" in wide.method
    assert share_interval(np.zeros(0, bool)).value is None


def test_variance_inflation_of_known_runs() -> None:
    rng = np.random.default_rng(1)
    free = [variance_inflation(rng.random(3000) < 0.05) for _ in range(40)]
    # 1 unless the batch variance exceeds its upper 10 % point; 40 draws: at most 10 expected to
    assert sum(x == 1.0 for x in free) >= 28
    runs = np.repeat(rng.random(300) < 0.3, 10)  # each value ten times: the mean of n is worth n/10
    assert 4 < variance_inflation(runs) < 25


def test_batch_interval_covers_independent_lognormals() -> None:
    """Nominal 95 %; 200 replications, so .95 +- 4 sd (.0154) is [.89, 1]."""
    truth = math.exp(0.6 * stats.norm.ppf(0.95))
    covered = 0
    for seed in range(200):
        x = np.random.default_rng(seed).lognormal(0, 0.6, 1000)
        found = batch_interval(x)
        covered += found.low <= truth <= found.high
    assert covered / 200 >= 0.89


def test_batch_interval_limits() -> None:
    assert quantile_interval(np.ones(74)) is None  # five batches of 15 need 75
    found = quantile_interval(np.array([1.0] * 800 + [INF] * 200))
    assert found.low is found.high is None and not found.reliable and found.value == INF
    constant = quantile_interval(np.full(500, 2.0))
    assert constant.low == constant.high == 2.0 and constant.reliable


def test_an_interval_beyond_the_data_is_withheld() -> None:
    """Near overload: the wait grows over 200 arrivals from 20 ms to 2 s, so the batches differ a hundredfold."""
    growing = np.geomspace(0.02, 2.0, 200) * np.random.default_rng(3).uniform(0.9, 1.1, 200)
    raw = batch_interval(growing, states=3.0)
    assert raw.low < growing.min() and raw.high > growing.max()  # what would have been printed
    found = quantile_interval(growing, states=3.0)
    assert (found.low, found.high, found.reliable, found.value) == (None, None, False, raw.value)
    assert found.method == "withheld: interval unreliable"
    # wide, with nothing that flags it: 15 values per batch, one batch ten times slower
    uneven = np.random.default_rng(5).permuted(np.tile(np.linspace(1, 2, 15), (5, 1)), axis=1)
    uneven[2] *= 10
    flat = uneven.ravel()
    assert batch_interval(flat).high > flat.max() and quantile_interval(flat).high is None
    steady = np.random.default_rng(7).lognormal(0, 0.6, 4000)
    assert quantile_interval(steady) == batch_interval(steady) and quantile_interval(steady).reliable


def test_independent_states_of_an_ar1_series() -> None:
    """AR(1) with coefficient .9 has integrated time (1 + .9)/(1 - .9) = 19: 9,500 values are worth 500."""
    rng = np.random.default_rng(3)
    x = np.zeros(9500)
    for i in range(1, len(x)):
        x[i] = 0.9 * x[i - 1] + rng.standard_normal()
    assert independent_states(x) == pytest.approx(500, rel=0.3)
    white = independent_states(rng.standard_normal(2000))
    assert 1200 < white <= 2600
    assert independent_states(np.ones(50)) == 50


def test_batch_correction_is_one_for_long_batches() -> None:
    assert batch_correction(1e6, 5) == pytest.approx(1.0, abs=1e-4)
    # T/theta = 2 * 12 = 24, B/theta = 4.8: v(T) = .07986, v(B) = .3305; .07986 * 4/(.3305 - .07986) = 1.275
    assert batch_correction(12, 5) == pytest.approx(1.275, abs=0.005)


def test_mser_finds_a_start_transient_and_refuses_a_trend() -> None:
    rng = np.random.default_rng(2)
    settled = 20 + rng.standard_normal(400)
    settled[:60] -= np.linspace(20, 0, 60)
    assert 30 <= mser5(settled) <= 80
    assert mser5(np.arange(400.0)) is None
    assert mser5(np.ones(10)) is None  # fewer than four groups


def test_ratio_interval_by_hand() -> None:
    # L = (2, 4, 6), lambda = (1, 2, 3): ratio 2 exactly, no deviation
    assert ratio_interval(np.array([2.0, 4, 6]), np.array([1.0, 2, 3])) == pytest.approx((2, 2, 2))
    # L = (1, 3, 2), lambda = 1: ratio 2, d = (-1, 1, 0), se = sqrt(2/2/3) = .57735, t(.975, 2) = 4.30265
    value, low, high = ratio_interval(np.array([1.0, 3, 2]), np.ones(3))
    assert (value, low, high) == pytest.approx((2, 2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert ratio_interval(np.ones(2), np.ones(2)) is None
