"""How late our own event loop runs its timers: the part of a latency that is ours.

Input: a gevent hub.
Output: percentiles of the lag in seconds since the last reset, in constant memory.
Does not: correct anything; the analysis judges a stage by it.
"""
from __future__ import annotations

import time
from typing import Any

PERIOD_S = 0.02
# Logarithmic bins: 0.01 ms times 1.1 to the power of the index; 160 of them reach 40 s.
FIRST_BIN_S = 1e-5
BIN_RATIO = 1.1
BINS = 160


class LagHistogram:
    """Counts of lags in logarithmic bins 10 % wide."""

    def __init__(self) -> None:
        self._edges_s = [FIRST_BIN_S * BIN_RATIO**i for i in range(BINS)]
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._counts = [0] * BINS
        self.n = 0
        self.max_s = 0.0

    def add(self, lag_s: float) -> None:
        """Count one lag."""
        low, high = 0, BINS - 1
        while low < high:
            middle = (low + high) // 2
            if self._edges_s[middle] >= lag_s:
                high = middle
            else:
                low = middle + 1
        self._counts[low] += 1
        self.n += 1
        self.max_s = max(self.max_s, lag_s)

    def percentile_s(self, share: float) -> float | None:
        """Upper edge of the bin with the nearest-rank percentile, None without samples."""
        if self.n == 0:
            return None
        rank = max(1, -int(-share * self.n // 1))
        seen = 0
        for edge_s, count in zip(self._edges_s, self._counts, strict=True):
            seen += count
            if seen >= rank:
                return min(edge_s, self.max_s)
        return self.max_s


class LoopLag:
    """A repeating timer of the hub that measures how late it runs."""

    def __init__(self, hub: Any) -> None:
        self.histogram = LagHistogram()
        self._timer = hub.loop.timer(PERIOD_S, PERIOD_S, ref=False)
        self._expected_s = 0.0
        self._start()

    def _start(self) -> None:
        self._expected_s = time.monotonic() + PERIOD_S
        self._timer.again(self._tick)

    def _tick(self) -> None:
        self.histogram.add(max(0.0, time.monotonic() - self._expected_s))
        self._start()

    def close(self) -> None:
        """Stop measuring."""
        self._timer.stop()
        self._timer.close()
