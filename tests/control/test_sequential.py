"""The confidence sequence against its formula, its promise under peeking, and the sd of dependent blocks."""
from __future__ import annotations

import math

import numpy as np
import pytest

from control.sequential import MIN_BLOCKS, MeanSequence, blocks_needed, radius, rho2, share_var


def test_radius_by_hand():
    # rho^2 at 40 blocks for alpha 0.05: (5.991 + ln 6.991)/40 = (5.991 + 1.945)/40 = 0.1984
    assert rho2(0.05) == pytest.approx(0.1984, abs=1e-4)
    # n = 40: r = 7.936; sqrt(2 x 8.936 / (40 x 7.936) x ln(sqrt(8.936)/0.05)) = sqrt(0.0563 x 4.0908) = 0.4800
    assert radius(40, 1.0, 0.05) == pytest.approx(0.4800, abs=1e-3)
    assert radius(0, 1.0, 0.05) == math.inf
    assert radius(40, 2.0, 0.05) == pytest.approx(2 * radius(40, 1.0, 0.05))


def test_nothing_is_said_before_the_least_number_of_blocks():
    seq = MeanSequence(0.05)
    for _ in range(MIN_BLOCKS - 1):
        seq.add(1.0)
    assert seq.interval().low == -math.inf
    seq.add(1.0)
    assert seq.interval(0.01).low > 0.5


def ever_wrong(blocks, alpha, naive=False):
    """Whether the true mean 0 was outside at any look."""
    seq = MeanSequence(alpha)
    for x in blocks:
        seq.add(float(x))
        seen = seq.interval()
        if seq.n >= MIN_BLOCKS:
            half = 1.96 * seq.sd() / math.sqrt(seq.n) if naive else (seen.high - seen.low) / 2
            if abs(seen.mean) > half:
                return True
    return False


def test_peeking_is_allowed_here_and_not_with_a_fixed_interval():
    rng = np.random.default_rng(11)
    paths = rng.standard_normal((150, 80))
    always = np.mean([ever_wrong(path, 0.05) for path in paths])
    naive = np.mean([ever_wrong(path, 0.05, naive=True) for path in paths])
    # promised: at most 0.05, seen over 150 paths with sd 0.0178; a fixed 95 % interval is wrong far more often
    assert always <= 0.05 + 2 * 0.0178 and naive > 0.15


def test_dependent_blocks_widen_the_interval():
    rng = np.random.default_rng(5)
    x = np.zeros(400)
    for i in range(1, 400):
        x[i] = 0.8 * x[i - 1] + rng.standard_normal()
    seq, free = MeanSequence(0.05), MeanSequence(0.05)
    for a, b in zip(x, rng.permutation(x), strict=True):
        seq.add(float(a))
        free.add(float(b))
    # long-run sd of AR(1) is sd x sqrt((1 + 0.8)/(1 - 0.8)) = 3 sd; batches of 8 see 1 + 2 sum_{k<8} (1 - k/8) 0.8^k = 5.9: 2.4 sd
    assert 1.9 < seq.sd() / x.std() < 3.2 and free.sd() / x.std() < 1.5


def test_a_share_that_never_failed_is_not_known_to_be_perfect():
    assert share_var(1000, 1000, 25) == pytest.approx((1001 / 1002) * (1 / 1002) / 25)
    seq = MeanSequence(0.01)
    for _ in range(40):
        seq.add(0.0)
    assert seq.interval().high == 0.0 and seq.interval(share_var(1000, 1000, 25)).high > 0


def test_blocks_needed_is_where_the_radius_falls_below_the_effect():
    n = blocks_needed(0.1, 0.05, 0.01)
    assert radius(n, 0.1, 0.01) < 0.05 <= radius(n - 1, 0.1, 0.01)
    assert blocks_needed(0.1, 0.0, 0.01) is None and blocks_needed(0.001, 5.0, 0.01) == MIN_BLOCKS
