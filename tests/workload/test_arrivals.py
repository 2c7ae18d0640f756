"""Arrival times have the mean, the spread and the law that their process and rate profile ask for.

Tolerances are 4 standard errors of the statistic under test (one false alarm in 16,000), seeds are fixed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.workload import arrivals
from bench.workload.arrivals import (
    constant_points,
    gamma_points,
    integrated_rate,
    invert_rate,
    poisson_points,
    rate_at,
    to_micros,
    trace_points,
)


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


# The drawing in bench/workload/arrivals.py.
DRAWING = [(0, 10), (10, 10), (10, 40), (20, 40), (20, 10), (30, 10)]


def test_the_drawing_of_a_rate_profile():
    #   area: 10 s x 10/s + 10 s x 40/s + 10 s x 10/s = 600
    assert integrated_rate(DRAWING, 30) == 600
    assert integrated_rate(DRAWING, 15) == 300  # 100 + 5 x 40
    assert integrated_rate(DRAWING, 99) == 600
    assert [rate_at(DRAWING, t) for t in (0, 9.9, 10, 19.9, 20, 29, 31)] == [10, 10, 40, 40, 10, 10, 10]
    # arrival 0.5 at 0.05 s; 100 begins the peak; 500 ends it
    assert invert_rate(DRAWING, np.array([0.5, 100.0, 300.0, 500.0, 599.0])) == pytest.approx([0.05, 10, 15, 20, 29.9])


@pytest.mark.parametrize(("levels", "t", "expected"), [
    (((0, 5), (10, 5)), 4, 20.0),
    (((0, 0), (10, 20)), 10, 100.0),  # 20 x 10 / 2
    (((0, 0), (10, 20)), 5, 25.0),  # 10 x 5 / 2
    (((0, 5), (60, 40)), 60, 1350.0),  # (5 + 40)/2 x 60
    (((0, 40), (60, 5)), 30, 937.5),  # (40 + 22.5)/2 x 30
])  # fmt: skip
def test_integral_of_a_rate(levels, t, expected):
    assert integrated_rate(levels, t) == pytest.approx(expected)


profiles = st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.0, 1000)), min_size=2, max_size=6).map(
    lambda pairs: tuple((sum(p[0] for p in pairs[: i + 1]) - pairs[0][0], pair[1]) for i, pair in enumerate(pairs))
)


@settings(max_examples=300, deadline=None)
@given(profiles, st.lists(st.floats(0.0001, 0.9999), min_size=1, max_size=50))
def test_inverting_undoes_integrating(levels, shares):
    whole = integrated_rate(levels, levels[-1][0])
    if whole < 1e-6:
        return
    u = np.sort(np.array(shares)) * whole
    times = invert_rate(levels, u)
    assert len(times) == len(u)
    assert (np.diff(times) >= -1e-9).all() and times[0] >= 0 and times[-1] <= levels[-1][0] + 1e-9
    back = np.array([integrated_rate(levels, t) for t in times])
    assert back == pytest.approx(u, rel=1e-6, abs=1e-6 * whole)


def test_constant_arrivals_are_evenly_spaced():
    times = invert_rate(((0, 4), (10, 4)), constant_points(40))
    assert len(times) == 40
    assert times[0] == 0.125 and np.allclose(np.diff(times), 0.25)


@pytest.mark.parametrize(("qps", "duration"), [(0.5, 30), (7.3, 11), (100, 3)])
def test_constant_count_is_the_rounded_product(qps, duration):
    times = invert_rate(((0, qps), (duration, qps)), constant_points(qps * duration))
    assert abs(len(times) - qps * duration) <= 0.5


PROCESSES = [("poisson", 1.0), ("gamma", 0.25), ("gamma", 1.0), ("gamma", 4.0)]


def points(process: str, burstiness: float, seed: int, limit: float) -> np.ndarray:
    return poisson_points(rng(seed), limit) if process == "poisson" else gamma_points(rng(seed), limit, burstiness)


@pytest.mark.parametrize(("process", "burstiness"), PROCESSES)
def test_mean_rate_cv_and_law_of_the_gaps(process, burstiness):
    n = 100_000
    u = points(process, burstiness, 3, n)
    gaps = np.diff(u)
    cv = 1 / math.sqrt(burstiness)
    # sd of the count of a renewal process: cv x sqrt(n)
    assert abs(len(u) - n) < 4 * cv * math.sqrt(n)
    assert gaps.mean() == pytest.approx(1, abs=4 * cv / math.sqrt(n))
    # relative se of a sample CV: sqrt((kurtosis - 1)/(4 n) ...) <= sqrt(1/n) x (1 + cv^2) for gamma; doubled for safety
    assert gaps.std() == pytest.approx(cv, rel=4 * (1 + cv * cv) / math.sqrt(n))
    law = scipy.stats.gamma(burstiness, scale=1 / burstiness)
    assert scipy.stats.kstest(gaps, law.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("process", "burstiness", "expected"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 4.0), ("gamma", 4.0, 0.25)]
)
def test_dispersion_of_counts(process, burstiness, expected):
    # Index of dispersion of counts in long windows tends to cv^2 (windows of 50 gaps: within 10 %).
    u = points(process, burstiness, 5, 200_000)
    counts = np.bincount((u // 50).astype(int), minlength=4000)
    windows = len(counts)
    index = counts.var() / counts.mean()
    assert index == pytest.approx(expected, rel=0.1 + 4 * math.sqrt(2 / windows))


def test_gaps_do_not_depend_on_each_other():
    gaps = np.diff(poisson_points(rng(11), 100_000))
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / math.sqrt(len(gaps))


@pytest.mark.parametrize(("process", "burstiness"), PROCESSES)
def test_expected_count_is_the_integral_even_for_short_stages(process, burstiness):
    # A start at an arrival would add (cv^2 - 1)/2: 1.5 arrivals for burstiness 0.25, 9 standard errors here.
    limit, repeats = 20.0, 3000
    counts = np.array([len(points(process, burstiness, 1000 + i, limit)) for i in range(repeats)])
    se = counts.std() / math.sqrt(repeats)
    assert abs(counts.mean() - limit) < 4 * se


def test_the_count_keeps_its_variance():
    # Stretching draws to an exact count would make this 0; Poisson: variance = mean.
    counts = np.array([len(poisson_points(rng(i), 400.0)) for i in range(2000)])
    assert counts.var() == pytest.approx(400, rel=4 * math.sqrt(2 / 2000))


def test_first_arrival_of_a_poisson_stage_is_exponential():
    first = np.array([poisson_points(rng(i), 50.0)[0] for i in range(3000)])
    assert scipy.stats.kstest(first, scipy.stats.expon.cdf).pvalue > 1e-3


def test_a_ramp_is_a_poisson_process_of_the_ramped_rate():
    levels = ((0.0, 5.0), (300.0, 40.0))
    whole = integrated_rate(levels, 300)  # 6750
    times = invert_rate(levels, poisson_points(rng(2), whole))
    # Undone, the arrivals are uniform over [0, 6750).
    assert scipy.stats.kstest([integrated_rate(levels, t) / whole for t in times], "uniform").pvalue > 1e-3
    # First half: 5 x 150 + (22.5 - 5) x 150/2 = 2062.5 expected; second: 4687.5.
    first = int((times < 150).sum())
    assert abs(first - 2062.5) < 4 * math.sqrt(2062.5)
    assert abs(len(times) - first - 4687.5) < 4 * math.sqrt(4687.5)


@pytest.mark.parametrize("levels", [((0, 0.0), (100, 20.0)), ((0, 20.0), (100, 0.0))])
def test_ramps_from_and_to_zero(levels):
    times = invert_rate(levels, poisson_points(rng(4), 1000))
    assert abs(len(times) - 1000) < 4 * math.sqrt(1000)
    # Rate 0.2 t: a quarter of the arrivals falls into the slower half.
    slow = (times < 50).sum() if levels[0][1] == 0 else (times >= 50).sum()
    assert abs(slow - 250) < 4 * math.sqrt(250)


def test_a_slow_rate_can_have_no_arrival():
    assert len(poisson_points(rng(1), 1e-9)) == 0
    assert len(constant_points(0.4)) == 0
    assert len(invert_rate(((0, 1e-9), (1, 1e-9)), np.empty(0))) == 0


@settings(max_examples=200)
@given(st.floats(0.001, 1e5), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_microseconds_stay_inside_the_stage(end_s, shares):
    micros = to_micros(np.sort(np.array(shares)) * end_s, end_s)
    assert (micros >= 0).all() and (micros < end_s * 1e6).all() and (np.diff(micros) >= 0).all()


def test_a_trace_is_brought_to_rate_one_and_starts_again():
    times = np.array([0.0, 1.0, 4.0, 9.0])  # 4 arrivals in 10 s: unit time = 0.4 t
    u, rows = trace_points(times, 10.0, 6.0)
    assert u == pytest.approx([0.0, 0.4, 1.6, 3.6, 4.0, 4.4, 5.6])
    assert rows.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert len(trace_points(np.empty(0), 1.0, 5.0)[0]) == 0


def test_draws_come_in_blocks_of_a_fixed_size():
    # A longer stage begins with the arrivals of a shorter one.
    short, long = poisson_points(rng(9), 5000.0), poisson_points(rng(9), 9000.0)
    assert (long[: len(short)] == short).all()
    assert arrivals.PROCESSES == ("constant", "poisson", "gamma", "trace")
