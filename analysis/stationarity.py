"""Did this stage reach a steady state? STABLE, SUSPECT, UNSTABLE or TOO_SHORT, apart from Little's law.

Input: sent and done times of one window and the number in flight over it.
Output: `Stationarity` with the pieces of evidence.
Does not: use latencies of finished requests as a trend (they are late by themselves).

1. UNSTABLE: arrivals exceed departures by more than 3 % and the number in flight
   rises by more than one full batch; or a Mann-Kendall trend (p < .001) together
   with a Little residual below -2 %.
2. SUSPECT: only a trend test fires (1 %, one-sided). Near the knee these tests fire
   in 3-5 % of stable stages, because neighbours depend on each other.
3. TOO_SHORT: fewer than 30 arrivals, or the window is shorter than five times what a request takes, and the
   growth is not going on in its last quarter.

No test can tell a load of .99 from 1.01 in five minutes; nothing here claims to.
Source: docs/analysis.md "Stationarity".
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from analysis.little import in_flight_at

FLOW_LIMIT = 0.03  # (A - D)/A; below it the growth is within what a stable queue wanders
DEFAULT_BATCH = 32  # K when the config does not tell
MIN_BUCKETS = 8
TREND_BUCKETS = 24  # bucket means of in-flight for the trend tests (10 s each at 240 s)
TREND_P = 0.01
TREND_P_STRONG = 0.001
RESIDUAL_LIMIT = -0.02
MIN_ARRIVALS = 30  # fewer say nothing about a trend
MIN_RESIDENCES = 5  # window / residence below this is too short
STRONG_GROWTH = 0.25  # a quarter of all arrivals left behind needs no full batch to be seen


@dataclass(frozen=True)
class Stationarity:
    """The verdict and its evidence."""

    verdict: str
    flow_imbalance: float | None  # (A - D)/A
    in_flight_rise: float  # end minus start, requests
    growth_qps: float | None  # slope of the number in flight, 1/s; = lambda - X in overload
    trend_p: float | None  # Mann-Kendall, one-sided for growth
    slope_p: float | None  # least squares on bucket means, one-sided
    residences: float | None  # window length in residences of its early arrivals
    needed_s: float | None  # window length that would do, when it was too short


def stationarity(
    sent_s: np.ndarray,
    done_s: np.ndarray,
    t0: float,
    t1: float,
    *,
    batch: float | None = None,
    little_residual: float | None = None,
) -> Stationarity:
    """The verdict for [t0, t1). `sent_s`, `done_s`: (n,) requests of the run near the window, seconds.

    `batch`: K, sequences that the service runs at once. `little_residual`: L/(lambda W) - 1.
    """  # fmt: skip
    window_s = t1 - t0
    inside = (sent_s >= t0) & (sent_s < t1)
    arrivals = int(np.count_nonzero(inside))
    if arrivals == 0 or window_s <= 0:
        return Stationarity("TOO_SHORT", None, 0.0, None, None, None, None, None)
    departures = int(np.count_nonzero((done_s >= t0) & (done_s < t1)))
    imbalance = (arrivals - departures) / arrivals
    rise = float(arrivals - departures)
    early = np.argsort(sent_s[inside])[: max(1, arrivals // 5)]
    residence = float(np.median((done_s[inside] - sent_s[inside])[early]))
    residences = window_s / residence if residence > 0 else math.inf
    # Buckets of two residences or more: shorter ones repeat each other and fake a trend.
    buckets = int(min(max(residences / 2, MIN_BUCKETS), TREND_BUCKETS))
    level, centres = bucket_means(sent_s, done_s, t0, t1, buckets)
    slope, slope_p = ols_growth(centres, level)
    trend_p = mann_kendall(level)
    if arrivals < MIN_ARRIVALS:
        needed = window_s * MIN_ARRIVALS / arrivals
        return Stationarity("TOO_SHORT", imbalance, rise, slope, trend_p, slope_p, residences, needed)
    verdict = _verdict(
        flow=_flow_rule(imbalance, rise, trend_p, batch),
        late_flow=_still_growing(sent_s, done_s, t0, t1),
        strong=trend_p < TREND_P_STRONG and little_residual is not None and little_residual < RESIDUAL_LIMIT,
        weak=trend_p < TREND_P or slope_p < TREND_P,
        residences=residences,
    )
    needed = 10 * residence if verdict == "TOO_SHORT" else None
    return Stationarity(verdict, imbalance, rise, slope, trend_p, slope_p, residences, needed)


def _flow_rule(imbalance: float, rise: float, trend_p: float, batch: float | None) -> bool:
    if imbalance <= FLOW_LIMIT:
        return False
    if rise > (batch or DEFAULT_BATCH):
        return True
    return imbalance > STRONG_GROWTH and rise > 8 and trend_p < TREND_P


def _still_growing(sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float) -> bool:
    """Arrivals exceed departures in the last quarter too, by three standard deviations: no mere start.

    A system that fills up from empty has its departures catch up; an overloaded one never does.
    """
    begin = t1 - (t1 - t0) / 4
    arrivals = int(np.count_nonzero((sent_s >= begin) & (sent_s < t1)))
    departures = int(np.count_nonzero((done_s >= begin) & (done_s < t1)))
    gap = arrivals - departures
    return gap > FLOW_LIMIT * arrivals and gap > 3 * math.sqrt(arrivals + departures)


def _verdict(*, flow: bool, late_flow: bool, strong: bool, weak: bool, residences: float) -> str:
    short = residences < MIN_RESIDENCES
    if flow and (not short or late_flow):
        return "UNSTABLE"
    if short:
        return "TOO_SHORT"
    # The combined clause needs a window long enough that its edges do not make the residual.
    if strong and residences >= 1 / abs(RESIDUAL_LIMIT):
        return "UNSTABLE"
    return "SUSPECT" if weak or strong else "STABLE"


def bucket_means(
    sent_s: np.ndarray, done_s: np.ndarray, t0: float, t1: float, buckets: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean number in flight per bucket (20 instants each), and the buckets' centres in seconds."""
    per = 20
    width = (t1 - t0) / (buckets * per)
    t = t0 + (np.arange(buckets * per) + 0.5) * width
    level = in_flight_at(t, sent_s, done_s).reshape(buckets, per).mean(axis=1)
    return level, t.reshape(buckets, per).mean(axis=1)


def ols_growth(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope of y over x and the one-sided p-value for growth."""
    n = len(x)
    dx = x - x.mean()
    sxx = float((dx * dx).sum())
    if n < 3 or sxx <= 0:
        return 0.0, 1.0
    slope = float((dx * y).sum()) / sxx
    rest = y - y.mean() - slope * dx
    variance = float((rest * rest).sum()) / (n - 2)
    if variance <= 0:
        return slope, 0.0 if slope > 0 else 1.0
    t = slope / math.sqrt(variance / sxx)
    return slope, float(1 - special.stdtr(n - 2, t))


def mann_kendall(y: np.ndarray) -> float:
    """One-sided p-value for an upward trend; normal approximation with tie correction."""
    n = len(y)
    if n < 4:
        return 1.0
    s = float(np.sum(np.sign(y[None, :] - y[:, None])[np.triu_indices(n, 1)]))
    _, ties = np.unique(y, return_counts=True)
    variance = (n * (n - 1) * (2 * n + 5) - float(np.sum(ties * (ties - 1) * (2 * ties + 5)))) / 18
    if variance <= 0:
        return 1.0
    z = (s - math.copysign(1, s)) / math.sqrt(variance) if s else 0.0
    return float(special.ndtr(-z))
