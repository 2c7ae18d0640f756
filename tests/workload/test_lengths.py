"""Every law of lengths knows its own moments, quantiles and the mass at its bounds."""



from __future__ import annotations

import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.workload import lengths
from bench.workload.lengths import (
    Lengths,
    empirical,
    fixed,
    lognormal,
    lognormal_clipped_moment,
    lognormal_moment,
    read_lengths,
    uniform,
)

N = 200_000


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def test_lognormal_moments_of_the_reference():
    # exp(6 + 0.18), exp(12 + 0.72), exp(18 + 1.62); SCV = exp(0.36) - 1
    assert lognormal_moment(6, 0.6, 1) == pytest.approx(482.9920, abs=1e-4)
    assert lognormal_moment(6, 0.6, 2) == pytest.approx(334_368.85, abs=0.01)
    assert lognormal_moment(6, 0.6, 3) == pytest.approx(3.317858e8, rel=1e-6)
    assert lognormal_moment(6, 0.6, 2) / lognormal_moment(6, 0.6, 1) ** 2 - 1 == pytest.approx(0.4333294, abs=1e-7)


@pytest.mark.parametrize(("cap", "mean", "scv", "cut"), [
    (512, 379.638, 0.1182, 0.3456), (1024, 462.398, 0.2930, 0.0603), (2048, 481.464, 0.4088, 0.0034), (4096, 482.955, 0.4320, 0.00006),
])  # fmt: skip
def test_clipped_lognormal_of_the_reference(cap, mean, scv, cut):
    first, second = lognormal_clipped_moment(6, 0.6, cap, 1), lognormal_clipped_moment(6, 0.6, cap, 2)
    assert first == pytest.approx(mean, abs=1e-3)
    assert second / first**2 - 1 == pytest.approx(scv, abs=5e-5)
    # The law floors first: it cuts what is cap + 1 or more; at cap exactly the difference is under 0.0013.
    assert lognormal(6, 0.6, cap).cut_share() == pytest.approx(cut, abs=1.3e-3)


def test_flooring_takes_half_a_token():
    law = lognormal(6, 0.6, 100_000)
    mean, variance = law.moments()
    assert mean == pytest.approx(482.4920, abs=2e-4)
    assert variance + mean**2 == pytest.approx(333_886.2, abs=0.1)
    # beyond the exact sums the closed form takes over
    wide = lognormal(6, 0.6, 300_000)
    assert wide.mean() == pytest.approx(mean, abs=1e-3) and wide.variance() == pytest.approx(variance, rel=1e-3)


@pytest.mark.parametrize(("p", "expected"), [(0.5, 403), (0.9, 870), (0.95, 1082), (0.99, 1629), (0.999, 2576)])
def test_quantiles_of_the_reference(p, expected):
    assert lognormal(6, 0.6, 4096).quantile(p) == expected


def test_demo_lengths():
    law = lognormal(4.4, 0.6, 1024)
    assert law.mean() == pytest.approx(math.exp(4.4 + 0.18) - 0.5, abs=0.05)  # 97.0
    assert law.quantile(0.95) == 218


def test_uniform_of_the_reference():
    law = uniform(100, 2000)
    # (100 + 2000)/2; (1901^2 - 1)/12
    assert law.moments() == (1050.0, 301_150.0)
    assert (law.quantile(0.5), law.quantile(0.999999), law.quantile(1e-9)) == (1050, 2000, 100)


LAWS = [uniform(1, 1), uniform(100, 2000), lognormal(6, 0.6, 4096), lognormal(6, 0.6, 512), lognormal(0.2, 1.0, 50, low=2), lognormal(3, 0.0, 100),
        fixed(7), empirical([5, 5, 9, 100, 3000], 1000), empirical([1, 2, 3], 1000, low=2), lognormal(8, 0.5, 2000)]  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=range(len(LAWS)))
def test_draws_have_the_moments_that_the_law_claims(law: Lengths):
    drawn = law.draw(rng(), N).astype(float)
    mean, variance = law.moments()
    assert drawn.min() >= law.low and drawn.max() <= law.high
    assert drawn.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / N) + 1e-12)
    # se of a sample variance: sqrt((m4 - var^2)/n)
    spread = math.sqrt(max(((drawn - drawn.mean()) ** 4).mean() - variance**2, 0) / N)
    assert drawn.var() == pytest.approx(variance, abs=4 * spread + 1e-9)
    for p in (0.05, 0.5, 0.95):
        value = law.quantile(p)
        slack = 4 * math.sqrt(p * (1 - p) / N)
        assert (drawn <= value).mean() >= p - slack
        assert (drawn <= value - 1).mean() <= p + slack


@pytest.mark.parametrize("law", LAWS, ids=range(len(LAWS)))
def test_mass_at_the_upper_bound(law: Lengths):
    if law.kind not in ("lognormal", "empirical") or law.sigma == 0 and law.kind == "lognormal":
        return
    drawn = law.draw(rng(2), N)
    cut = law.cut_share()
    if law.kind == "lognormal":
        # at the bound: cut draws and those that floor to it
        z = (math.log(law.high) - law.mu) / law.sigma
        at_bound = scipy.stats.norm.sf(z)
        assert (drawn == law.high).mean() == pytest.approx(at_bound, abs=4 * math.sqrt(at_bound / N) + 1e-5)
        assert cut <= at_bound
    else:
        assert cut == pytest.approx(sum(v > law.high for v in (5, 5, 9, 100, 3000)) / 5 if 3000 in law.values else 0)


def test_uniform_reaches_both_ends_equally():
    drawn = uniform(10, 14).draw(rng(), N)
    counts = np.bincount(drawn)[10:]
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert len(counts) == 5


def test_lognormal_follows_its_law():
    drawn = lognormal(6, 0.6, 10**6).draw(rng(3), 20_000)
    # Flooring shifts by up to a token: compare the middle of each token.
    assert scipy.stats.kstest(drawn + 0.5, scipy.stats.lognorm(0.6, scale=math.exp(6)).cdf).pvalue > 1e-3


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["uniform", "lognormal", "fixed", "empirical"]), st.integers(1, 300), st.integers(0, 3000), st.floats(-2, 9), st.floats(0, 3),
       st.lists(st.integers(1, 5000), min_size=1, max_size=20))  # fmt: skip
def test_any_law_stays_inside_its_bounds_and_survives_json(kind, low, width, mu, sigma, values):
    high = low + width
    law = {
        "uniform": uniform(low, high),
        "lognormal": lognormal(mu, sigma, high, low),
        "fixed": fixed(low),
        "empirical": empirical(values, high, low),
    }[kind]
    drawn = law.draw(rng(), 300)
    assert drawn.dtype == np.int64 and drawn.min() >= low and drawn.max() <= high
    mean, variance = law.moments()
    assert low <= mean + 1e-6 and mean <= high + 1e-6 and variance >= -1e-6 * mean * mean
    assert low <= law.quantile(0.5) <= high
    assert 0 <= law.cut_share() <= 1
    assert Lengths.from_dict(law.to_dict()) == law


def test_reading_observed_lengths(tmp_path):
    path = tmp_path / "l.txt"
    path.write_text("# lengths\n5\n\n 7 # note\n5\n", encoding="utf-8")
    assert read_lengths(path) == [5, 7, 5]
    law = empirical(read_lengths(path), 100)
    assert (law.values, law.counts) == ((5, 7), (2, 1))
    assert law.mean() == pytest.approx(17 / 3)
    for text, words in (
        ("5\n0\n", ":2:"),
        ("x\n", "'x' is not a length"),
        ("-3\n", "not a length"),
        ("1.5\n", "not a length"),
        ("", "no lengths"),
        ("99999999999\n", "not a length"),
        ("9" * 4000 + "\n", "not a length"),  # int() of such a text would be refused by Python in other words
        ("5\n# " + "x" * 4095 + "\n", ":2: line longer than 4096"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=words):
            read_lengths(path)


def test_an_endless_file_of_lengths_is_refused_and_not_held(tmp_path, monkeypatch):
    path = tmp_path / "zeros"
    with open(path, "wb") as stream:
        stream.truncate(2_000_000_000)  # a hole: no disk is used
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"zeros:1: line longer than 4096 characters"):
            read_lengths(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # nobody writes: opening it would wait for ever
    for place in (Path("/dev/zero"), pipe, tmp_path):
        with pytest.raises(ValueError, match="is not a regular file"):
            read_lengths(place)
    with pytest.raises(FileNotFoundError):
        read_lengths(tmp_path / "none")
    monkeypatch.setattr(lengths, "MAX_FILE_LINES", 3)
    (tmp_path / "four").write_text("#\n#\n#\n5\n", encoding="utf-8")
    with pytest.raises(ValueError, match=":4: more than 3 lines"):
        read_lengths(tmp_path / "four")


def test_a_quantile_outside_the_unit_interval_raises():
    with pytest.raises(ValueError, match="between 0 and 1"):
        fixed(1).quantile(1.0)
