"""How late our own event loop runs its timers: the part of a latency that is ours.

Input: a gevent hub.
Output: percentiles of the lag in seconds since the last reset, in constant memory.
Does not: correct anything; the analysis judges a stage by it.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# The pause between two beats, in shares of the period. It varies, so that work which comes at regular times cannot
# always fall between two samples; four pauses in a row never take more than four periods.
PAUSE_MIN, PAUSE_MAX = 0.8, 1.08
GOLDEN_RATIO = 0.6180339887498949
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
    """A timer of the hub, set again and again, that measures how late it runs; other work may go with it.

    period_s: twenty beats a second give a p99 within a stage of ten seconds.
    """

    def __init__(self, hub: Any, period_s: float = 0.05, work: Callable[[], None] | None = None) -> None:
        self.histogram = LagHistogram()
        self._hub = hub
        self._period_s = period_s
        self._work = work
        self._phase = 0.0
        self._expected_s = 0.0
        self._held = self._closed = False
        self._timer: Any = None
        self._start()

    def hold(self, held: bool) -> None:
        """Whether the loop must stay alive for the next beat."""
        self._held = held
        if not self._closed:
            self._timer.ref = held

    def _start(self) -> None:
        # Multiples of the golden ratio modulo 1 fill the interval evenly without a generator.
        self._phase = (self._phase + GOLDEN_RATIO) % 1.0
        pause_s = self._period_s * (PAUSE_MIN + self._phase * (PAUSE_MAX - PAUSE_MIN))
        self._timer = self._hub.loop.timer(pause_s, ref=self._held)
        self._expected_s = time.monotonic() + pause_s
        # The loop keeps its own time; without an update the pause would be counted from an old moment.
        self._timer.start(self._tick, update=True)

    def _tick(self) -> None:
        self.histogram.add(max(0.0, time.monotonic() - self._expected_s))
        self._timer.close()
        self._start()
        if self._work is not None:
            self._work()

    def close(self) -> None:
        """Stop measuring."""
        self._closed = True
        self._timer.stop()
        self._timer.close()
