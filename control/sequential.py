"""Means judged while they grow: intervals that hold at every moment at once, however often one looks.

Input: values one block at a time. Output: an interval, and a judgement against a bound.
Does not: decide what happens then (control/rollout.py does).

An asymptotic confidence sequence: P(the mean lies in all intervals, for every n) >= 1 - alpha as n grows,
    mean +- sd sqrt( 2 (n rho^2 + 1) / (n^2 rho^2) log( sqrt(n rho^2 + 1) / alpha ) ),
the normal mixture boundary behind the mixture SPRT. rho only chooses where it is tightest (at TIGHT_BLOCKS).
A fixed-sample interval looked at after every block would be wrong far more often than alpha.

1. Values are means over blocks of requests, long against the time a request stays, so that blocks are nearly
   independent; what dependence is left widens the interval by the factor 1 + 2 r1 (r1: correlation of neighbours).
2. The variance has a floor (`floor_var`): a metric that has not failed yet is not known to be perfect.
3. Nothing is judged before MIN_BLOCKS blocks: below, the sd is not known.
Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", theorem 2.2; Johari, Koomen, Pekelis, Walsh, "Always valid inference".
"""
from __future__ import annotations

import math
from dataclasses import dataclass

MIN_BLOCKS = 10
TIGHT_BLOCKS = 40


def rho2(alpha: float, blocks: float = TIGHT_BLOCKS) -> float:
    """rho^2 for which the boundary is tightest at `blocks`."""
    log = -2.0 * math.log(alpha)
    return (log + math.log(log + 1.0)) / blocks


def radius(n: int, sd: float, alpha: float, tight: float = TIGHT_BLOCKS) -> float:
    """Half width of the interval after n blocks whose sd is `sd`; inf for n = 0."""
    if n == 0:
        return math.inf
    r = n * rho2(alpha, tight)
    return sd * math.sqrt(2.0 * (r + 1.0) / (n * r) * math.log(math.sqrt(r + 1.0) / alpha))


@dataclass(frozen=True, slots=True)
class Interval:
    """What is known of a mean now."""

    mean: float
    low: float
    high: float
    blocks: int


class MeanSequence:
    """A growing sample of block values."""

    __slots__ = ("alpha", "n", "_mean", "_m2", "_cross", "_last", "_first")

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.n = 0
        self._mean = 0.0
        self._m2 = 0.0
        self._cross = 0.0  # sum of x_i x_(i-1)
        self._last = 0.0
        self._first = 0.0

    def add(self, value: float) -> None:
        """One more block."""
        self.n += 1
        if self.n == 1:
            self._first = value
        else:
            self._cross += value * self._last
        self._last = value
        delta = value - self._mean
        self._mean += delta / self.n
        self._m2 += delta * (value - self._mean)

    def sd(self, floor_var: float = 0.0) -> float:
        """Sd of a block, widened for the dependence of neighbours; at least the floor's."""
        if self.n < 2:
            return math.inf
        var = self._m2 / (self.n - 1)
        factor = 1.0
        if self._m2 > 0 and self.n > 4:
            # sum (x_i - m)(x_(i-1) - m) over the n - 1 pairs
            total = self._mean * self.n
            pairs = self._cross - self._mean * (2 * total - self._first - self._last) + (self.n - 1) * self._mean**2
            factor = max(1.0, 1.0 + 2.0 * pairs / self._m2)
        return math.sqrt(max(var * factor, floor_var))

    def interval(self, floor_var: float = 0.0) -> Interval:
        """The interval of now; it and all earlier ones hold together with probability 1 - alpha."""
        if self.n < MIN_BLOCKS:
            return Interval(self._mean, -math.inf, math.inf, self.n)
        half = radius(self.n, self.sd(floor_var), self.alpha)
        return Interval(self._mean, self._mean - half, self._mean + half, self.n)


def share_var(good: int, total: int, per_block: float) -> float:
    """Floor of the variance of a share in blocks of `per_block` requests: p (1 - p) / m, p with one miss and one hit more."""
    p = (good + 1.0) / (total + 2.0)
    return p * (1.0 - p) / max(per_block, 1.0)


def blocks_needed(sd: float, effect: float, alpha: float, limit: int = 1_000_000) -> int | None:
    """Blocks until the interval is narrower than `effect` on each side; None when `limit` do not do."""
    low, high = MIN_BLOCKS, limit
    if radius(high, sd, alpha) >= effect:
        return None
    while low < high:
        middle = (low + high) // 2
        if radius(middle, sd, alpha) < effect:
            high = middle
        else:
            low = middle + 1
    return low
