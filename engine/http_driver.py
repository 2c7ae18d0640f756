"""The real-time driver: runs the clock-free core on an absolute schedule and measures its own lateness.

Input: a core (`submit`, `plan`, `duration`, `commit`, `abort`), an event loop, a sink for the results of a step.
Output: calls of `sink(driver, plan, result, planned_end_s)` and `on_dropped(request, now_s)`; `Lateness` figures.
Does not: know HTTP; decide anything about scheduling.

1. A step that starts at s and takes d ends at s + decision + d, and the next one starts exactly there: the next
   boundary is computed from the planned end, never from the moment at which the timer fired.
2. Arrivals and aborts first bring the engine up to their own time, so the core sees events in the order of their
   times, as the virtual driver does; an arrival inside a step is seen at the step's end.
3. A late boundary is processed late, with its planned time; no token is skipped.
4. `decision`: CPU time of this thread in `plan` and `commit`. It is part of the step (the reference method counts
   the scheduler's CPU time in the latency) and is reported apart.
"""
from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

_BIN = math.log(1.02)
_SMALLEST_S = 1e-6
# Allowed lateness p99: a part of the mean step, but never less than what a shared machine's scheduler takes.
LATE_SHARE = 0.10
LATE_FLOOR_S = 0.005
# Overdue steps run in one go before the loop may read sockets again.
_CATCH_UP_STEPS = 64


class LogHistogram:
    """Counts of positive values in bins 2 % wide: percentiles in bounded memory."""

    __slots__ = ("counts", "total", "sum", "largest")

    def __init__(self) -> None:
        self.counts = [0] * 1000  # 1 us to about 400 s
        self.total = 0
        self.sum = 0.0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count one value; everything under 1 us falls in the first bin."""
        index = int(math.log(value / _SMALLEST_S) / _BIN) if value > _SMALLEST_S else 0
        self.counts[min(index, 999)] += 1
        self.total += 1
        self.sum += value
        if value > self.largest:
            self.largest = value

    def merge(self, other: LogHistogram) -> None:
        """Add another histogram's counts."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total
        self.sum += other.sum
        self.largest = max(self.largest, other.largest)

    def percentile(self, share: float) -> float | None:
        """The upper edge of the bin that holds the nearest rank; None without values."""
        rank = math.ceil(share * self.total)
        seen = 0
        for index, count in enumerate(self.counts):
            seen += count
            if count and seen >= rank:
                return min(self.largest, _SMALLEST_S * math.exp(_BIN * (index + 1)))
        return None


class Lateness:
    """How late step boundaries were processed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything; a run that starts here is judged alone."""
        self.late = LogHistogram()
        self.late_steps = 0
        self.step_sum_s = 0.0
        self.decision = LogHistogram()

    def merge(self, other: Lateness) -> None:
        """Add the counts of another replica."""
        self.late.merge(other.late)
        self.decision.merge(other.decision)
        self.late_steps += other.late_steps
        self.step_sum_s += other.step_sum_s

    def add(self, late_s: float, step_s: float) -> None:
        """Count one boundary that was `late_s` behind its planned time, after a step of `step_s`."""
        self.late.add(late_s)
        self.step_sum_s += step_s
        if late_s > LATE_FLOOR_S and late_s > LATE_SHARE * step_s:
            self.late_steps += 1

    def stats(self) -> dict[str, Any]:
        """p50, p99 and largest lateness, the share of late steps, the verdict and its bound."""
        steps = self.late.total
        mean_s = self.step_sum_s / steps if steps else 0.0
        bound_s = max(LATE_FLOOR_S, LATE_SHARE * mean_s)
        p99_s = self.late.percentile(0.99)
        return {
            "steps": steps,
            "step_mean_s": mean_s if steps else None,
            "lateness_p50_s": self.late.percentile(0.50),
            "lateness_p99_s": p99_s,
            "lateness_max_s": self.late.largest if steps else None,
            "late_step_ratio": self.late_steps / steps if steps else None,
            "lateness_bound_s": bound_s,
            "valid": p99_s is None or p99_s <= bound_s,
            "decision_total_s": self.decision.sum,
            "decision_mean_s": self.decision.sum / self.decision.total if self.decision.total else None,
            "decision_p99_s": self.decision.percentile(0.99),
        }


class RealTimeDriver:
    """Steps of one core in real time."""

    def __init__(self, core: Any, sink: Callable[[RealTimeDriver, Any, Any, float], None],
                 on_dropped: Callable[[Any, float], None] = lambda request, now_s: None, *,
                 clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.thread_time,
                 call_at: Callable[..., Any] | None = None) -> None:
        self.core = core
        self.lateness = Lateness()
        self.decision_total_s = 0.0
        self.steps = 0
        # A step that raises is a bug, and the clock stands still after it: whoever runs the driver must end.
        self.on_crash: Callable[[], None] = lambda: None
        self._sink = sink
        self._on_dropped = on_dropped
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._call_at = call_at or asyncio.get_running_loop().call_at
        self._plan: Any = None
        self._step_s = 0.0
        self._end_s = 0.0
        self._advancing = False
        self._armed = False

    @property
    def busy(self) -> bool:
        """True while a step runs."""
        return self._plan is not None

    def submit(self, request: Any, now_s: float) -> Any:
        """The core's answer to an arrival at `now_s`; starts a step when the engine is idle."""
        self.advance(now_s)
        answer = self.core.submit(request, now_s)
        if self._plan is None:
            self._start(now_s)
        return answer

    def abort(self, request_id: Any, now_s: float) -> None:
        """Abort a request at `now_s`; the core frees its blocks at the latest at the next boundary."""
        self.advance(now_s)
        self.core.abort(request_id, now_s)
        if self._plan is None and not self._advancing:
            self._start(now_s)

    def adopt(self, config: Any, now_s: float) -> None:
        """Go on under other rules; what waited because of the old ones may start at once."""
        self.advance(now_s)
        self.core.adopt(config, now_s)
        if self._plan is None and not self._advancing:
            self._start(now_s)

    def advance(self, now_s: float) -> None:
        """Process every boundary that is due at `now_s`."""
        if self._advancing:  # a sink that aborts a request must not start the next step twice
            return
        self._advancing = True
        try:
            while self._plan is not None and self._end_s <= now_s:
                self._boundary()
        except Exception:
            self.on_crash()
            raise
        finally:
            self._advancing = False

    def _boundary(self) -> None:
        end_s, plan = self._end_s, self._plan
        self.lateness.add(self._clock() - end_s, self._step_s)
        before_s = self._cpu_clock()
        result = self.core.commit(plan, end_s)
        commit_s = self._cpu_clock() - before_s
        self.steps += 1
        self._plan = None
        self._sink(self, plan, result, end_s)
        self._start(end_s, commit_s)

    def _start(self, at_s: float, commit_s: float = 0.0) -> None:
        """Plan the step that starts at `at_s`; `commit_s` is the decision time already spent at this boundary."""
        before_s = self._cpu_clock()
        plan = self.core.plan(at_s)
        decision_s = commit_s + self._cpu_clock() - before_s
        self._plan = plan
        if self.core.dropped:
            dropped, self.core.dropped = self.core.dropped, []
            for request in dropped:
                self._on_dropped(request, at_s)
        if plan is None:
            wake_s = self.core.wake_s(at_s)  # copies in flight; an idle engine has nothing to wake for
            if wake_s < math.inf:
                self._call_at(wake_s, self._wake, wake_s)
            return
        self.decision_total_s += decision_s
        self.lateness.decision.add(decision_s)
        self._step_s = decision_s + self.core.duration(plan)
        self._end_s = at_s + self._step_s
        if not self._armed:  # an armed timer is never later than this end; it arms itself again
            self._armed = True
            self._call_at(self._end_s, self._tick)

    def _wake(self, at_s: float) -> None:
        """Timer: look again after a plan that found nothing to compute."""
        if self._plan is None and not self._advancing:
            self._start(at_s)

    def _tick(self) -> None:
        """Timer: process what is due; give the loop a turn when far behind."""
        self._advancing = True
        try:
            for _ in range(_CATCH_UP_STEPS):
                if self._plan is None or self._end_s > self._clock():
                    break
                self._boundary()
        except Exception:
            self.on_crash()
            raise
        finally:
            self._advancing = False
            self._armed = False
        if self._plan is not None:
            self._armed = True
            self._call_at(self._end_s, self._tick)
