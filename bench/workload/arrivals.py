"""When requests are due: arrival times of one stage, from a unit-rate process and a rate profile.

Input: a process, a rate profile (points of time and rate, straight lines between), a random generator.
Output: arrival times in whole microseconds from the stage's start, sorted.
Does not: read a clock, sleep, or send.

1. A stage is a unit-rate point process u_1 < u_2 < ... mapped through the inverse of the integrated
   rate: Lambda(t_i) = u_i. So a ramp has the law of its process at every moment (time inversion:
   Cinlar, Introduction to Stochastic Processes, 1975, section 4.7).
2. The count is what the law gives. Draws are never stretched to hit an exact count: that would
   remove the variance of the count which is part of Poisson arrivals.
3. Renewal processes start in equilibrium: the first gap has the density (1 - F(x))/E[gap], so that the
   expected count of a stage is exactly the integral of its rate, for every burstiness.
4. Only +, -, *, / and sqrt touch the times, and numpy's scalar samplers the draws: the same bits on
   every machine with the same numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

PROCESSES = ("constant", "poisson", "gamma", "trace")
MICRO = 1_000_000  # times are whole microseconds: exact in CSV and in the hash

# A rate profile: (time_s, qps) points, times never falling; a straight line joins neighbours, two
# points at one time are a jump.
#
#   qps
#   40 |      +----+          [(0, 10), (10, 10), (10, 40), (20, 40), (20, 10), (30, 10)]
#   10 |------+    +------
#      0     10   20    30 s
Levels = Sequence[tuple[float, float]]


def integrated_rate(levels: Levels, t_s: float) -> float:
    """Expected arrivals in [0, t_s): the integral of the rate profile."""
    total = 0.0
    for (t0, q0), (t1, q1) in zip(levels, levels[1:], strict=False):
        if t_s <= t0:
            break
        end = min(t_s, t1)
        if t1 > t0:
            q_end = q0 + (q1 - q0) * (end - t0) / (t1 - t0)
            total += 0.5 * (q0 + q_end) * (end - t0)
    return total


def rate_at(levels: Levels, t_s: float) -> float:
    """Rate in 1/s at t_s; at a jump the rate after it; outside the profile the nearest end's."""
    if t_s < levels[0][0]:
        return levels[0][1]
    for (t0, q0), (t1, q1) in zip(levels, levels[1:], strict=False):
        if t0 <= t_s < t1:
            return q0 + (q1 - q0) * (t_s - t0) / (t1 - t0)
    return levels[-1][1]


def invert_rate(levels: Levels, u: np.ndarray) -> np.ndarray:
    """Times t (seconds) with Lambda(t) = u, for sorted u below Lambda(end).

    On a piece from rate q0 to q1 over d seconds, v = u - Lambda(start) solves
    v = q0 x + (q1 - q0) x^2 / (2 d); the form below is its root without cancellation, and it
    is x = v/q0 when q1 = q0:  x = 2 v / (q0 + sqrt(q0^2 + 2 (q1 - q0) v / d)).
    """
    times = np.empty(len(u))
    start = 0.0
    done = 0
    for (t0, q0), (t1, q1) in zip(levels, levels[1:], strict=False):
        width = t1 - t0
        area = 0.5 * (q0 + q1) * width
        if width <= 0 or area <= 0:
            continue
        until = int(np.searchsorted(u, start + area, side="left"))
        v = u[done:until] - start
        root = np.sqrt(np.maximum(q0 * q0 + 2.0 * (q1 - q0) * v / width, 0.0))
        with np.errstate(invalid="ignore", divide="ignore"):
            x = np.where(v > 0, 2.0 * v / (q0 + root), 0.0)
        times[done:until] = t0 + np.minimum(x, width)
        start += area
        done = until
    return times[:done]


def _first_then(first: Callable[[], float], gaps: Callable[[int], np.ndarray], limit: float) -> np.ndarray:
    """Partial sums below `limit`: one first gap, then as many as needed, drawn in fixed blocks."""
    parts = [np.array([first()])]
    total = float(parts[0][0])
    # Fixed block size: how many draws a stage takes never depends on the machine.
    while total < limit:
        block = gaps(4096)
        sums = np.cumsum(np.concatenate(([total], block)))[1:]
        parts.append(sums)
        total = float(sums[-1])
    u = np.concatenate(parts)
    return u[: int(np.searchsorted(u, limit, side="left"))]


def constant_points(limit: float) -> np.ndarray:
    """Unit-rate points at 0.5, 1.5, 2.5, ... below `limit`: gaps of exactly one, CV 0."""
    return np.arange(0.5, limit, 1.0)


def poisson_points(rng: np.random.Generator, limit: float) -> np.ndarray:
    """Unit-rate Poisson points: exponential gaps, CV 1; the first gap has the same law (no memory)."""
    return _first_then(rng.standard_exponential, rng.standard_exponential, limit)


def gamma_points(rng: np.random.Generator, limit: float, burstiness: float) -> np.ndarray:
    """Unit-rate points with gamma gaps of shape k = burstiness and scale 1/k: CV = 1/sqrt(k).

    Equilibrium start: a length-biased gap is gamma with shape k + 1, and the origin falls
    uniformly into it, so the first gap is U * Gamma(k + 1)/k.
    """
    return _first_then(
        lambda: float(rng.random()) * float(rng.standard_gamma(burstiness + 1.0)) / burstiness,
        lambda n: rng.standard_gamma(burstiness, n) / burstiness,
        limit,
    )


def trace_points(times_s: np.ndarray, span_s: float, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Unit-rate points of a recorded trace below `limit`, and the row each of them stands for.

    The trace's own rate is n/span, so u = t * n/span has mean rate one. When `limit` is beyond
    the trace it starts again from its first row.
    """
    n = len(times_s)
    if n == 0 or limit <= 0:
        return np.empty(0), np.empty(0, dtype=np.int64)
    unit = times_s * (n / span_s)
    turns = int(limit // n) + 1
    u = np.concatenate([unit + n * turn for turn in range(turns)])
    rows = np.tile(np.arange(n, dtype=np.int64), turns)
    keep = int(np.searchsorted(u, limit, side="left"))
    return u[:keep], rows[:keep]


def to_micros(times_s: np.ndarray, end_s: float) -> np.ndarray:
    """Whole microseconds (int64) of times in seconds; never at or after the end of the stage."""
    micros = np.floor(times_s * MICRO + 0.5).astype(np.int64)
    return np.minimum(micros, max(int(end_s * MICRO) - 1, 0))
