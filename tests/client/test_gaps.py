"""Gap statistics in constant memory against the sorted gaps."""
from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client.gaps import Gaps


def filled(gaps_s: list[float]) -> Gaps:
    gaps = Gaps()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    return gaps


@pytest.mark.parametrize(
    ("gaps_s", "p99_s", "largest_s", "short"),
    [
        ([0.02], 0.02, 0.02, 0.0),
        ([0.0], 0.0, 0.0, 1.0),
        ([-0.001, 0.5], 0.5, 0.5, 0.5),  # stamps of two clocks
        ([0.01] * 99 + [1.0], 0.01, 1.0, 0.0),  # rank ceil(99.0) = 99 of 100
        ([0.01] * 98 + [1.0] * 2, 1.0, 1.0, 0.0),
        ([0.0009] * 9 + [0.0011], 0.0011, 0.0011, 0.9),  # rank ceil(9.9) = 10
        ([3600.0], 3600.0, 3600.0, 0.0),
    ],
)
def test_by_hand(gaps_s: list[float], p99_s: float, largest_s: float, short: float) -> None:
    gaps = filled(gaps_s)
    assert gaps.p99_s() == pytest.approx(p99_s, rel=0.0101)
    assert (gaps.max_s, gaps.under_1ms_ratio) == (largest_s, short)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=400))
def test_p99_is_the_nearest_rank_within_half_a_bin(gaps_s: list[float]) -> None:
    gaps = filled(gaps_s)
    true_s = sorted(gaps_s)[math.ceil(0.99 * len(gaps_s) - 1e-9) - 1]
    assert gaps.p99_s() == pytest.approx(true_s, rel=0.0101)
    assert gaps.p99_s() <= gaps.max_s == max(gaps_s)


def test_no_gaps_have_no_p99() -> None:
    with pytest.raises(ValueError, match="no gaps"):
        Gaps().p99_s()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=400))
def test_time_in_long_gaps_is_their_sum(gaps_s: list[float]) -> None:
    """Second path: a plain sum. A gap within 2 % of the limit may count on either side."""
    surely = math.fsum(g for g in gaps_s if g > 0.0102)
    perhaps = math.fsum(g for g in gaps_s if g > 0.0098)
    assert surely * 0.9899 <= filled(gaps_s).over_s(0.010) <= perhaps * 1.0101 + 1e-12
