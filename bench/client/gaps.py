"""Gaps between output events in constant memory: mean, p99, largest, share under 1 ms.

Input: gaps in seconds, one at a time. Output: the four statistics, and the time that lies in long gaps.
Does not: read clocks, keep single gaps.

p99 is the nearest rank over bins of 2 % width from 1 microsecond on, so at most 1 % off; gaps of up to a day need
fewer than 1,300 bins.
"""
from __future__ import annotations

import math

_LOG_BIN = math.log(1.02)
_log = math.log


class Gaps:
    """The gaps of one stream."""

    __slots__ = ("count", "short", "max_s", "_bins")

    def __init__(self) -> None:
        self.count = 0
        self.short = 0  # under 1 ms
        self.max_s = 0.0
        self._bins: dict[int, int] = {}

    def add(self, gap_s: float) -> None:
        """Take one gap; negative ones (stamps of two clocks) count as 0."""
        self.count += 1
        if gap_s > self.max_s:
            self.max_s = gap_s
        if gap_s < 0.001:
            self.short += 1
        # Bin 0 holds what is under a microsecond; bin k from 1 on holds [1.02**(k-1), 1.02**k) microseconds.
        place = int(_log(gap_s * 1e6) / _LOG_BIN) + 1 if gap_s >= 1e-6 else 0
        bins = self._bins
        bins[place] = bins.get(place, 0) + 1

    @property
    def under_1ms_ratio(self) -> float:
        """Share of gaps under 1 ms, 0..1."""
        return self.short / self.count

    def p99_s(self) -> float:
        """The gap of rank ceil(0.99 n), as the middle of its bin; needs one gap at least."""
        rank = self.count - self.count // 100
        seen = 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen >= rank:
                return min(1e-6 * math.exp((place - 0.5) * _LOG_BIN), self.max_s) if place else 0.0
        raise ValueError("no gaps")

    def over_s(self, limit_s: float) -> float:
        """Time that lies in gaps above `limit_s`, seconds, within 1 %: a gap counts as the middle of its bin."""
        least = int(_log(limit_s * 1e6) / _LOG_BIN) + 1
        return sum(n * 1e-6 * math.exp((place - 0.5) * _LOG_BIN) for place, n in self._bins.items() if place > least)
