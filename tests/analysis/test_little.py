"""Little's law: the identity on any rows, the overload formula, the gauge against the rows."""
from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.little import identity, in_flight_at, indirect_residence, little, time_mean
from analysis.run_files import Gauge, ServerGauge
from analysis.stationarity import mann_kendall, ols_growth, stationarity

sys.path.insert(0, str(Path(__file__).parent))
from synthetic import Service, StageSpec, arrivals, simulate

SERVICE = Service()


def run(load: float, duration_s: float, seed: int):
    rng = np.random.default_rng(seed)
    return simulate(arrivals(StageSpec(load * SERVICE.capacity_qps(), duration_s), rng), SERVICE, rng)


times = st.floats(0, 100, allow_nan=False)


@given(st.lists(st.tuples(times, st.floats(0, 50)), min_size=1, max_size=120), times, st.floats(0.01, 100))
@settings(max_examples=400, deadline=None)
def test_identity_holds_on_any_record_set(rows: list[tuple[float, float]], t0: float, width: float) -> None:
    sent = np.array([a for a, _ in rows])
    done = sent + np.array([b for _, b in rows])
    assert abs(identity(sent, done, t0, t0 + width).residual) < 1e-9


def test_identity_by_hand() -> None:
    # window [10, 20): A 8..12 was there (2 s inside), B 11..14 (3 s), C 18..25 (2 s inside, 5 s after)
    found = identity(np.array([8.0, 11, 18]), np.array([12.0, 14, 25]), 10, 20)
    assert (found.integral, found.residence_sum, found.edge_start, found.edge_end) == (7, 10, 2, 5)
    assert found.arrivals == 2 and found.departures == 2 and found.residual == 0


def test_in_flight_and_time_mean_by_hand() -> None:
    assert in_flight_at(np.array([0.0, 1, 2.5, 4]), np.array([1.0, 2]), np.array([3.0, 4])).tolist() == [0, 1, 2, 0]
    # 0, 2 at t = 0, 10: trapezoid mean 1; the ends are held
    assert time_mean(np.array([0.0, 10]), np.array([0.0, 2]), 0, 10) == 1
    assert time_mean(np.array([]), np.array([]), 0, 10) is None


@pytest.mark.parametrize(("load", "seed"), [(1.10, 1), (1.29, 2), (1.47, 3)])
def test_overload_residual_is_minus_one_plus_x_over_lambda(load: float, seed: int) -> None:
    """L/(lambda W) - 1 = -(1 - X/lambda) in linear growth from an empty system, within 2 points."""
    s = run(load, 200, seed)
    found = identity(s.arrival, s.last, 0.0, 200.0)
    residual = found.integral / found.residence_sum - 1
    assert residual == pytest.approx(-(1 - found.departures / found.arrivals), abs=0.02)
    assert residual < -0.05 and load < 1.25 or residual < -0.15  # and the 20 % line passes 1.10


def test_steady_residual_is_within_one_percent_at_300_s() -> None:
    for seed in range(5):
        s = run(0.6, 330, seed)
        found = identity(s.arrival, s.last, 30, 330)
        assert abs(found.integral / found.residence_sum - 1) < 0.01


def _gauge(sent: np.ndarray, done: np.ndarray, end: float, extra: float = 0.0) -> Gauge:
    t = np.arange(0, end, 0.1)
    level = in_flight_at(t, sent, done) + extra
    zero = np.zeros(len(t))
    return Gauge(t, zero, level.astype(float), zero, zero, zero)


def _law(gauge: Gauge | None, s, server: ServerGauge | None = None):
    return little(
        sent_s=s.arrival, done_s=s.last, worker=np.zeros(len(s.arrival)), t0=10, t1=60, gauge=gauge, server=server
    )


def test_a_gauge_that_agrees_and_one_that_counts_lost_requests() -> None:
    s = run(0.7, 60, 4)
    good = _law(_gauge(s.arrival, s.last, 60), s)
    assert good.ok is True and good.gauge_samples == 500 and abs(good.gap_ratio_gauge) < 0.2
    bad = _law(_gauge(s.arrival, s.last, 60, extra=2.0), s)  # two streams nobody has a row for
    assert bad.ok is False and "+2" in bad.note


def test_a_gauge_that_stopped_is_no_evidence() -> None:
    s = run(0.7, 60, 4)
    whole = _gauge(s.arrival, s.last, 60)
    keep = (whole.t_s < 20) | (whole.t_s > 25)
    stopped = Gauge(
        *(getattr(whole, f)[keep] for f in ("t_s", "worker", "in_flight", "loop_lag_s", "cpu_ratio", "rss_bytes"))
    )
    found = _law(stopped, s)
    assert found.ok is None and "stood still" in found.note
    assert _law(None, s).ok is None and "no evidence" in _law(None, s).note


def test_two_workers_are_added_up() -> None:
    s = run(0.7, 60, 4)
    worker = np.arange(len(s.arrival)) % 2
    parts = [_gauge(s.arrival[worker == w], s.last[worker == w], 60) for w in (0, 1)]
    both = Gauge(*(np.concatenate([getattr(p, f) for p in parts]) for f in
                   ("t_s", "worker", "in_flight", "loop_lag_s", "cpu_ratio", "rss_bytes")))  # fmt: skip
    both.worker[len(parts[0]) :] = 1
    found = little(sent_s=s.arrival, done_s=s.last, worker=worker, t0=10, t1=60, gauge=both, server=None)
    assert found.ok is True and found.in_flight_mean_gauge == pytest.approx(found.in_flight_mean_integral, rel=0.05)


def test_server_gauge_gap() -> None:
    s = run(0.7, 60, 4)
    t = np.arange(0, 60, 0.5)
    inside = in_flight_at(t, s.arrival + 0.05, s.last)  # the service sees a request 50 ms later
    server = ServerGauge(t, inside.astype(float), np.zeros(len(t)), np.full(len(t), np.nan), np.full(len(t), np.nan))
    found = _law(_gauge(s.arrival, s.last, 60), s, server)
    outside = (found.in_flight_mean_integral - found.in_flight_mean_server) / found.arrival_qps
    assert outside == pytest.approx(0.05, abs=0.03)
    # At the same instants the sampling of the page is no error any more: as near as its own standard error says.
    assert found.outside_s == pytest.approx(0.05, abs=max(3 * found.outside_se_s, 1e-9))
    assert found.gap_ratio_server == pytest.approx(-found.outside_s / found.residence_mean_s)


def test_a_page_read_once_a_second_finds_the_time_outside_with_its_error() -> None:
    """60 windows of 50 samples: the mean is right, and nine in ten intervals of two standard errors hold the truth."""
    found, held = [], 0
    for seed in range(60):
        s = run(0.7, 60, seed)
        t = np.arange(0.5, 60, 1.0)
        seen = in_flight_at(t, s.arrival + 0.05, np.maximum(s.last, s.arrival + 0.05)).astype(float)
        law = _law(None, s, ServerGauge(t, seen, np.zeros(len(t)), np.full(len(t), np.nan), np.full(len(t), np.nan)))
        truth = float(np.mean(np.minimum(s.last - s.arrival, 0.05)))  # what a request shorter than 50 ms spends there
        found.append(law.outside_s - truth)
        held += abs(law.outside_s - truth) <= 2 * law.outside_se_s
    assert abs(np.mean(found)) < 3 * np.std(found) / math.sqrt(60)
    assert held >= 50


def test_empty_window() -> None:
    found = little(sent_s=np.zeros(0), done_s=np.zeros(0), worker=np.zeros(0), t0=0, t1=10, gauge=None, server=None)
    assert found.arrival_qps is None and "no request" in found.note


def test_indirect_residence_interval_holds_the_mean() -> None:
    s = run(0.5, 330, 7)
    value, low, high = indirect_residence(s.arrival, s.last, 30, 330)
    inside = s.arrival >= 30
    assert low < float(np.mean((s.last - s.arrival)[inside])) < high and low < value < high


def test_mann_kendall_by_hand() -> None:
    # 1..10 rising: S = 45, Var = 10*9*25/18 = 125, z = 44/11.18 = 3.935 -> p = 4.2e-5
    assert mann_kendall(np.arange(10.0)) == pytest.approx(4.15e-5, rel=0.02)
    assert mann_kendall(-np.arange(10.0)) > 0.999
    assert mann_kendall(np.ones(10)) == 1.0


def test_growth_slope_by_hand() -> None:
    slope, p = ols_growth(np.arange(5.0), np.array([0.0, 2, 4, 6, 8]))
    assert slope == 2 and p == 0.0


@pytest.mark.parametrize(
    ("load", "allowed"), [(0.4, {"STABLE", "SUSPECT"}), (0.8, {"STABLE", "SUSPECT"}), (1.3, {"UNSTABLE"})]
)
def test_stationarity_of_clear_cases(load: float, allowed: set[str]) -> None:
    found = [stationarity(s.arrival, s.last, 30, 200, batch=32).verdict for s in (run(load, 200, i) for i in range(6))]
    assert set(found) <= allowed


def test_growth_rate_is_lambda_minus_x() -> None:
    s = run(1.4, 200, 3)
    found = stationarity(s.arrival, s.last, 30, 200, batch=32)
    assert found.growth_qps == pytest.approx(0.4 * SERVICE.capacity_qps(), rel=0.2)


def test_a_start_is_not_growth_and_a_short_window_says_what_it_needs() -> None:
    # 10 requests/s that take 8 s each, window 0..10 from empty: in flight rises to 80 and stays there
    sent = np.arange(0, 10, 0.1)
    found = stationarity(sent, sent + 8.0, 0, 10, batch=32)
    assert found.verdict == "TOO_SHORT" and found.needed_s == pytest.approx(80)
    assert stationarity(np.zeros(0), np.zeros(0), 0, 10).verdict == "TOO_SHORT"


@pytest.mark.evidence
def test_stationarity_rates() -> None:
    """UNSTABLE in at most 2 % at load .95 and less, in 98 % at 1.10 and more; 200 stages of 240 s each.

    The seeds are fixed: it fails when the code does. On other seeds, at a true rate of .005 more than 4 of 200 have
    probability .004, and at .995 fewer than 196 the same.
    """
    stages = 200
    for load, low, high in ((0.5, 0, 0.02), (0.75, 0, 0.02), (0.95, 0, 0.02), (1.10, 0.98, 1), (1.3, 0.98, 1)):
        bad = 0
        for seed in range(stages):
            s = run(load, 300, 500 + seed)
            law = identity(s.arrival, s.last, 60, 300)
            residual = law.integral / law.residence_sum - 1
            bad += stationarity(s.arrival, s.last, 60, 300, batch=32, little_residual=residual).verdict == "UNSTABLE"
        assert low <= bad / stages <= high, (load, bad)
