"""Means judged while they grow: intervals that hold at every moment at once, however often one looks.

Input: values one block at a time. Output: an interval, and a judgement against a bound.
Does not: decide what happens then (control/rollout.py does).

An asymptotic confidence sequence: P(the mean lies in all intervals, for every n) >= 1 - alpha as n grows,
    mean +- sd sqrt( 2 (n rho^2 + 1) / (n^2 rho^2) log( sqrt(n rho^2 + 1) / alpha ) ),
the normal mixture boundary behind the mixture SPRT. rho only chooses where it is tightest (at TIGHT_BLOCKS).
A fixed-sample interval looked at after every block would be wrong far more often than alpha.

1. Values are means over blocks of requests, long against the time a request stays, so that blocks are nearly
   independent; the sd is that of the longest of several batches of blocks, so what dependence is left widens it.
2. The variance has a floor (`floor_var`): a metric that has not failed yet is not known to be perfect.
3. Nothing is judged before MIN_BLOCKS blocks: below, the sd is not known.
Source: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", theorem 2.2; Johari, Koomen, Pekelis, Walsh, "Always valid inference".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_BLOCKS = 12
BATCHES = (1, 2, 4, 8)
MIN_GROUPS = 4  # batch means that give an sd; the maximum over few groups errs to the safe side
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

    __slots__ = ("alpha", "_values")

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._values: list[float] = []

    @property
    def n(self) -> int:
        """Blocks so far."""
        return len(self._values)

    def add(self, value: float) -> None:
        """One more block."""
        self._values.append(value)

    def sd(self, floor_var: float = 0.0) -> float:
        """Sd of a block for the error of the mean: the largest of the batch means' of 1, 2, 4 and 8 blocks.

        sqrt(k) x sd(means of k neighbours) is the plain sd when blocks are independent and more when a rush lasts
        longer than a block. At least the floor's.
        """
        n = len(self._values)
        if n < 2:
            return math.inf
        worst = floor_var
        for k in BATCHES:
            groups = n // k
            if k > 1 and groups < MIN_GROUPS:
                break
            # the newest blocks: the rest at the start does not fill a group
            values = self._values[n - groups * k :]
            means = [sum(values[i : i + k]) / k for i in range(0, groups * k, k)]
            mean = sum(means) / groups
            worst = max(worst, k * sum((m - mean) ** 2 for m in means) / (groups - 1))
        return math.sqrt(worst)

    def interval(self, floor_var: float = 0.0) -> Interval:
        """The interval of now; it and all earlier ones hold together with probability 1 - alpha."""
        mean = sum(self._values) / self.n if self.n else 0.0
        if self.n < MIN_BLOCKS:
            return Interval(mean, -math.inf, math.inf, self.n)
        half = radius(self.n, self.sd(floor_var), self.alpha)
        return Interval(mean, mean - half, mean + half, self.n)


def share_var(good: int, total: int, per_block: float) -> float:
    """Floor of the variance of a share in blocks of m = `per_block`: p (1 - p) / m; p has a miss and a hit more."""
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
