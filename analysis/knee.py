"""The knee: the offered rate at which attainment crosses its target, with an interval in QPS.

Input: one `Level` per offered rate. Output: `Capacity`.
Does not: average different definitions. SLO crossing, last met rate, lambda_max and
the flattening point are four numbers with four names.

1. A rate holds the SLO when its attainment reaches the target and the stage is not
   UNSTABLE. `last_met_qps` is the last rate before the first that does not hold: a
   lucky trial above a failed one counts for nothing.
2. Between the two, the crossing is interpolated on the SLO score: score of an arrival =
   max(TTFT/deadline, TPOT/deadline), inf when it failed; attainment >= a holds exactly
   when the a-quantile of the score is <= 1. Its logarithm is smooth where the share
   itself jumps from 1 to 0 within one step of the sweep.
3. The interval redraws every rate's log quantile from its batches (Student t), finds
   the first crossing of each draw, and interpolates half of the draws along a line and
   half along a shape-preserving cubic, so that the error of interpolating shows as well.
   A draw that crosses outside the measured rates is continued with the slope there.
   Whatever the draws say, the interval ends at the lowest rate that clearly misses (`ceiling_qps`).
   Its lower end also allows for the excursions that a stage may not have held (`share_draws`): misses come in
   few clusters, and a stage at the knee itself may hold none. So it may lie below a rate whose stages are MET;
   `below_met` says so, and why, where it does.
4. Never met: "below" the lowest rate. Always met: "at_least" the highest. No number
   is invented in between.
5. Watermark = 70-80 % of the lower bound.
6. Text rounds a capacity down and an upper bound up: no printed rate may claim more than was found.

Source: docs/analysis.md "Knee".
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.intervals import memory_factor
from analysis.percentiles import nearest_rank
from bench.records.analysis import Capacity
from bench.records.sentences import joined, render, said, text_of

Said = dict[str, Any]  # {"code", "params"}, see bench/records/sentences.py
DRAWS = 2000
DRAW_SEED = 20261129  # fixed: the same rows must give the same interval
WATERMARK = (0.70, 0.80)
# Clusters of misses per independent state of the number in flight, where a stage shows none: by simulation 2.1
# (a stage of 270 s at the knee of the reference service: 50 states, 1.05 clusters of 63 arrivals in 6,600).
CLUSTERS_PER_STATE = 2.0
# Log odds of a miss per logarithm of the rate, below the lowest rate: 17 to 20 near the knee of M/M/1 and of the
# reference service; half of it is on the safe side.
ODDS_SLOPE = 10.0
# The same between two measured rates, of which the lower may lie far below the knee, where the slope is less (M/M/1:
# 1 + rate * deadline, 9 at 10 requests/s and .8 s). With 10 the interval of sweeps with stages of 60 s covered .93.
BORROWED_SLOPE = 5.0
SIZE_WEIGHT = 2.0  # clusters' worth of trust in the size that the memory suggests
MIN_SHARE = 1e-7
MIN_SD = 0.005  # of a log quantile: timers and rounding alone give half a percent


@dataclass(frozen=True)
class Level:
    """One offered rate, repeats pooled."""

    qps: float
    attainment: float
    arrivals: int
    score: float  # target quantile of the SLO score over all arrivals, inf possible
    batch_scores: tuple[float, ...]  # the same per batch
    stable: bool
    completed_qps: float
    states: float = 1000.0  # independent states of the window, see intervals.independent_states
    attainment_most: float = 1.0  # upper 97.5 % bound of attainment under the largest plausible dependence
    load_sd_ratio: float = 0.0  # sd of the work that happened to arrive, relative: sqrt((ca² + cs²)/n)
    inflation: float | None = None  # of the variance of the share of misses, by its batches; None: not known

    @property
    def misses(self) -> float:
        """Arrivals that missed the SLO."""
        return (1 - self.attainment) * self.arrivals


@dataclass(frozen=True)
class Crossing:
    """Where a curve crosses its limit; QPS."""

    kind: str  # "crossing" | "at_least" | "below" | "none"
    value: float | None
    low: float | None
    high: float | None
    method: str
    last_met: float | None
    between: tuple[float, float] | None = None  # the measured rates on both sides of the crossing
    open_above: bool = False  # `high` lies above every measured rate
    finished_qps: float | None = None  # at the rate above, when it is UNSTABLE and its answers were still in time


def score_quantile(scores: np.ndarray, target: float) -> float:
    """Smallest s with at least `target` of all arrivals at or below s; inf allowed."""
    return nearest_rank(np.sort(scores), target)


def crossing(levels: list[Level], target: float) -> Crossing:
    """The SLO crossing over rates in any order; see the module's rules."""
    levels = sorted(levels, key=lambda x: x.qps)
    if not levels:
        return Crossing("none", None, None, None, "no valid stage", None)
    holds = [x.stable and x.attainment >= target for x in levels]
    thin = share_interval(levels, target)
    if all(holds):
        top = levels[-1].qps
        least = top if thin is None else min(thin[0], top)
        return Crossing("at_least", top, least, None, "every measured rate held the target", top)
    first_bad = holds.index(False)
    if first_bad == 0:
        low = levels[0].qps
        return Crossing("below", None, None, low, "the lowest measured rate missed the target", None)
    top = ceiling_qps(levels, target)
    good, bad = levels[first_bad - 1], levels[first_bad]
    if not (math.isfinite(bad.score) and bad.score > 1 and 0 < good.score <= 1):
        found = _share_crossing(good, bad, target)
        if thin is None or found.low is None or found.high is None:
            return found
        return replace(found, low=min(found.low, thin[0]), high=min(max(found.high, thin[1]), max(top, found.high)))
    scored = [x for x in levels if math.isfinite(x.score) and x.score > 0]
    q = np.array([x.qps for x in scored])
    y = np.array([math.log(x.score) for x in scored])
    # The curve bends up: a line between two rates crosses too early, the cubic a little late.
    value = (first_crossing(q, y, cubic=False) + first_crossing(q, y, cubic=True)) / 2
    value = min(value, bad.qps * (1 - 1e-6))  # the rate that missed is not itself the crossing
    low, high = _interval(scored, q, y)
    high = min(high, top)
    method = "log of the SLO score quantile, mean of linear and cubic interpolation; redrawn from its batches"
    if thin is not None and thin[0] < low:
        low, method = thin[0], method + "; lower end by the clusters of misses"
    high = max(high, value)
    return Crossing("crossing", value, min(low, value), high, method, good.qps, (good.qps, bad.qps),
                    high > levels[-1].qps)  # fmt: skip


def share_interval(levels: list[Level], target: float) -> tuple[float, float] | None:
    """95 % interval, 1/s, of where the true share of misses passes 1 - target; None when the dependence is not known.

    A crossing above every rate counts as the highest one.
    The curve through drawn shares is continued between two rates along a line in log odds. Rates above the lowest
    that clearly misses are left out, and so are rates below two that held: a stage that held by luck, below another
    one that held by luck, is rare enough. A rate without a miss cannot have missed as often as a higher one: its log
    odds lie at least BORROWED_SLOPE times the logarithm of the ratio of both rates below those drawn there.
    """
    levels = sorted(levels, key=lambda x: x.qps)
    if any(x.inflation is None for x in levels):
        return None
    top = ceiling_qps(levels, target)
    near = [x for x in levels if x.qps <= top]
    holds = [x.stable and x.attainment >= target for x in near]
    first_bad = holds.index(False) if False in holds else len(near)
    start = max(first_bad - 2, 0)
    near = near[start:]
    shares, allowed = share_draws(near), 1 - target
    if start > 0:
        shares[:, 0] = np.minimum(shares[:, 0], 0.999 * allowed)
    if near[-1].qps == top:
        shares[:, -1] = np.maximum(shares[:, -1], 1.001 * allowed)
    odds = np.log(shares / (1 - shares)) - math.log(allowed / (1 - allowed))
    q = np.array([x.qps for x in near])
    for i in range(min(first_bad - start, len(q) - 1) - 1, -1, -1):
        if not near[i].misses:
            odds[:, i] = np.minimum(odds[:, i], odds[:, i + 1] - BORROWED_SLOPE * math.log(q[i + 1] / q[i]))
    odds = np.maximum.accumulate(odds, axis=1)  # more load misses no less
    found = np.where(odds[:, 0] > 0, q[0] * np.exp(-np.maximum(odds[:, 0], 0.0) / ODDS_SLOPE), q[-1])
    for piece in range(1, len(q)):
        rows = (odds[:, piece] > 0) & (odds[:, piece - 1] <= 0)
        y0, y1 = odds[rows, piece - 1], odds[rows, piece]
        found[rows] = q[piece - 1] - y0 / (y1 - y0) * (q[piece] - q[piece - 1])
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def share_draws(levels: list[Level]) -> np.ndarray:
    """(DRAWS, n) draws of the true share of misses of each rate, as a compound Poisson process of clusters.

    Misses come in clusters, one for each time the queue passes the deadline. With exponential sizes of mean s the
    variance of the share is 2 s times that of independent misses, so s = inflation/2 and K misses are N = K/s
    clusters; a stage with few of them leans on the size that its memory suggests, n/(clusters per state * states).
    share = (clusters, Gamma(N + 1/2)) * (size) / n, the size known to its own N exponential values. A stage without
    a miss may have had half a cluster by chance (Jeffreys), however long it was.
    """
    rng = np.random.default_rng(DRAW_SEED + 1)
    out = np.empty((DRAWS, len(levels)))
    for i, level in enumerate(levels):
        n, k = max(level.arrivals, 1), level.misses
        memory = max(n / (CLUSTERS_PER_STATE * max(level.states, 1.0)), 1.0)
        seen = 2 * k / max(level.inflation or 1.0, 2.0)
        size = (max((level.inflation or 1.0) / 2, 1.0) * seen + memory * SIZE_WEIGHT) / (seen + SIZE_WEIGHT)
        clusters = k / size
        share = rng.gamma(clusters + 0.5, 1.0, DRAWS) * size / n
        if k and size > 1.5:  # misses that come one by one have no size to be unsure of
            share *= (clusters + 1) / rng.gamma(clusters + 1, 1.0, DRAWS)
        out[:, i] = np.clip(share, MIN_SHARE, 1 - MIN_SHARE)
    return out


def below_met(made: Capacity, met: list[Level]) -> Said:
    """Why the lower end lies below a rate whose stages are decided MET, as a sentence; an empty one when it does not.

    `met`: the rates whose every stage is MET. They are no floor: at the knee of the reference service one stage in
    three has no miss, and with the highest of them as a floor the interval covers the knee in 18 to 75 % of the sweeps
    (docs/evidence/knee_sweeps.md).
    """
    low, last = made.knee_low_qps, made.last_met_qps
    if made.knee_kind != "crossing" or low is None:
        return said("")
    above = [x for x in met if low < x.qps * (1 - 1e-9) and (last is None or x.qps <= last)]
    if not above:
        return said("")
    top = max(above, key=lambda x: x.qps)
    if top.misses:
        return said("capacity.below_met", rate_qps=top.qps)
    return said("capacity.below_met.clusters", rate_qps=top.qps, arrivals=top.arrivals, states=round(top.states))


def ceiling_qps(levels: list[Level], target: float) -> float:
    """The lowest rate, 1/s, that clearly misses the SLO: the knee cannot lie above it; inf when none does.

    Clear is an UNSTABLE rate, whose attainment only waits for a longer stage, and a rate whose attainment
    stays below the target under the largest dependence that its own batches allow: n is divided by the upper
    95 % bound of the variance inflation before the 97.5 % Wilson bound is taken. An overloaded stage is worth
    one or two arrivals by that, and is clear all the same: one arrival bounds a share of .7 below .99.
    """
    return min((x.qps for x in levels if not x.stable or x.attainment_most < target), default=math.inf)


def first_crossing(q: np.ndarray, y: np.ndarray, *, cubic: bool) -> float:
    """The rate at which y (log score, per rate q ascending) first passes 0; an end of q when it does not."""
    return float(np.clip(crossings(q, y[None, :], cubic=cubic)[0], q[0], q[-1]))


def crossings(q: np.ndarray, y: np.ndarray, *, cubic: bool) -> np.ndarray:
    """First crossings of many curves: q (n,) ascending, y (d, n). Outside the rates by the slope of the end piece.

    A curve that falls there gives 0 (below) or twice the highest rate (above): nothing is known.
    """
    d, n = y.shape
    if n == 1:
        return np.where(y[:, 0] > 0, 0.0, 2 * q[0])
    rise = np.diff(y, axis=1) / np.diff(q)
    above = y > 0
    k = np.argmax(above, axis=1)
    inside = above.any(axis=1) & (k > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        under = np.where(rise[:, 0] > 0, np.maximum(q[0] - y[:, 0] / rise[:, 0], 0.0), 0.0)
        over = np.where(rise[:, -1] > 0, np.minimum(q[-1] - y[:, -1] / rise[:, -1], 2 * q[-1]), 2 * q[-1])
    found = np.where(above[:, 0], under, over)
    for piece in range(1, n):
        rows = np.flatnonzero(inside & (k == piece))
        if not len(rows):
            continue
        y0, y1, h = y[rows, piece - 1], y[rows, piece], q[piece] - q[piece - 1]
        share = -y0 / (y1 - y0)
        if cubic and piece >= 2:
            left, right = _end_slopes(np.diff(q[piece - 2 : piece + 1]), rise[rows, piece - 2 : piece])
            share = _hermite_root(y0, y1, left * h, right * h)
        found[rows] = q[piece - 1] + h * share
    return found


def _end_slopes(h: np.ndarray, rise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slopes at both ends of the last of two pieces of a monotone cubic (Fritsch-Carlson). rise: (d, 2)."""
    before, last = rise[:, 0], rise[:, 1]
    w1, w2 = 2 * h[1] + h[0], h[1] + 2 * h[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(before * last > 0, (w1 + w2) / (w1 / before + w2 / last), 0.0)
    right = ((2 * h[1] + h[0]) * last - h[1] * before) / (h[0] + h[1])
    return np.maximum(left, 0.0), np.clip(right, 0.0, 3 * last)


def _hermite_root(y0: np.ndarray, y1: np.ndarray, s0: np.ndarray, s1: np.ndarray) -> np.ndarray:
    """Where cubics from y0 <= 0 to y1 > 0 on [0, 1] first pass 0, on a grid of 1/200 with a line between."""
    t = np.linspace(0, 1, 201)[None, :]
    y0, y1, s0, s1 = (v[:, None] for v in (y0, y1, s0, s1))
    curve = y0 * (1 + 2 * t) * (1 - t) ** 2 + s0 * t * (1 - t) ** 2 + y1 * t * t * (3 - 2 * t) + s1 * t * t * (t - 1)
    k = np.maximum(np.argmax(curve > 0, axis=1), 1)
    rows = np.arange(len(k))
    before, after = curve[rows, k - 1], curve[rows, k]
    return (k - 1 - before / np.where(after > before, after - before, 1.0)) / 200


def _interval(levels: list[Level], q: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """2.5 % and 97.5 % points of redrawn crossings, both interpolants together.

    Every rate is redrawn, so that the pair of rates around the crossing may change as well.
    """
    rng = np.random.default_rng(DRAW_SEED)
    draws = np.empty((DRAWS, len(levels)))
    slope = np.maximum(np.gradient(y, q), 0.0) if len(q) > 1 else np.zeros(len(q))
    for i, level in enumerate(levels):
        # A stage is loaded by the work that happened to arrive: its rate is known to load_sd only.
        load_sd = float(slope[i]) * level.qps * level.load_sd_ratio
        finite = np.array([s for s in level.batch_scores if math.isfinite(s) and s > 0])
        b = len(finite)
        if b < 2:
            draws[:, i] = y[i] + load_sd * rng.standard_normal(DRAWS)
            continue
        sd = float(np.log(finite).std(ddof=1)) * math.sqrt(memory_factor(level.states, b) / b)
        draws[:, i] = y[i] + max(sd, MIN_SD) * rng.standard_t(b - 1, DRAWS) + load_sd * rng.standard_normal(DRAWS)
    found = np.concatenate([crossings(q, draws[::2], cubic=False), crossings(q, draws[1::2], cubic=True)])
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf")
    return float(low), float(high)


def _share_crossing(good: Level, bad: Level, target: float) -> Crossing:
    """Interpolation on the share of misses, when the score has no finite quantile (failures, rejections).

    Linear in the share gives the lower bound, log-linear the upper one: a queue that
    rejects misses nothing up to its capacity and 1 - C/lambda above it.
    """
    allowed = 1 - target
    m0, m1 = 1 - good.attainment, 1 - bad.attainment
    if m1 <= allowed:  # unstable, though its attainment still held
        # Nothing says where between them; not below what it finished, which a short window counts too low.
        text = "the next rate is UNSTABLE although its attainment still held: the middle, or what was finished there"
        value = min(max(bad.completed_qps, (good.qps + bad.qps) / 2), bad.qps * (1 - 1e-6))
        return Crossing("crossing", value, good.qps, bad.qps, text, good.qps, (good.qps, bad.qps),
                        finished_qps=bad.completed_qps)  # fmt: skip
    linear = good.qps + (bad.qps - good.qps) * min(max((allowed - m0) / (m1 - m0), 0.0), 1.0)
    floor = max(m0, 0.5 / max(good.arrivals, 1))
    log = good.qps + (bad.qps - good.qps) * min(
        max(math.log(allowed / floor) / math.log(m1 / floor), 0.0) if m1 > floor else 1.0, 1.0
    )
    low, high = min(linear, log), max(linear, log)
    method = "share of misses between the rates around it: linear (low) to log-linear (high)"
    return Crossing("crossing", (low + high) / 2, low, high, method, good.qps, (good.qps, bad.qps))


def flattening(levels: list[Level]) -> float | None:
    """Mean completed rate of UNSTABLE stages: where throughput stops following the load; None without one."""
    flat = [x.completed_qps for x in levels if not x.stable]
    return float(np.mean(flat)) if flat else None


def capacity(
    levels: list[Level], target: float, *, lambda_max_qps: float | None = None, note: Said | None = None,
    found: Crossing | None = None,
) -> Capacity:  # fmt: skip
    """Everything said about capacity. `lambda_max_qps`: from the batching model, when it was fitted.

    `found`: the knee, when a search knows it better than the levels do.
    """
    found = found or crossing(levels, target)
    base = found.low if found.low is not None else None
    told = _sentence(found, target)
    made = Capacity(
        knee_qps=found.value,
        knee_low_qps=found.low,
        knee_high_qps=found.high,
        knee_kind=found.kind,
        knee_method=found.method,
        last_met_qps=found.last_met,
        watermark_low_qps=None if base is None else WATERMARK[0] * base,
        watermark_high_qps=None if base is None else WATERMARK[1] * base,
        lambda_max_qps=lambda_max_qps,
        flattening_qps=flattening(levels),
        attainment_target=target,
        sentence=text_of(told),
        code=told["code"],
        params=told["params"],
    )
    if found.finished_qps is not None and found.between is not None:
        made.grows_qps = found.between[1]
        add_note(made, said("capacity.grows", above_qps=found.between[1], finished_qps=rate_text(found.finished_qps)))
    over = [x.qps for x in levels if not x.stable]
    if made.flattening_qps is not None and over != [made.grows_qps]:  # one such rate has said it above
        add_note(made, said("capacity.flat", flat_qps=rate_text(made.flattening_qps), rates=joined("comma", over)))
    if note is not None:
        add_note(made, note)
    return made


def add_note(made: Capacity, note: Said) -> None:
    """Append a sentence to what is said about capacity."""
    if note["code"]:
        made.params = {"sentence": {"code": made.code, "params": made.params}, "note": note}
        made.code = "capacity.noted"
        made.sentence = render(made.code, made.params)


def _sentence(found: Crossing, target: float) -> Said:
    if found.kind == "none":
        return said("capacity.undecided" if "decided" in found.method else "capacity.none")
    if found.kind == "below":
        return said("capacity.below", target=target, high_qps=_rate_up(found.high))
    rates = {
        "low_qps": rate_text(found.low), "safe_low_qps": rate_text(WATERMARK[0] * (found.low or 0)),
        "safe_high_qps": rate_text(WATERMARK[1] * (found.low or 0)),
    }  # fmt: skip
    if found.kind == "at_least":
        thin = found.last_met is not None and found.low is not None and found.low < found.last_met * (1 - 1e-9)
        return said("capacity.at_least.thin" if thin else "capacity.at_least", **rates)
    stages = said("")
    if found.between:
        stages = said("capacity.stages", below_qps=found.between[0], above_qps=found.between[1])
    beyond = said("capacity.beyond") if found.open_above else said("")
    return said("capacity.crossing", knee_qps=rate_text(found.value), high_qps=_rate_up(found.high), stages=stages,
                beyond=beyond, **rates)  # fmt: skip


def _step(qps: float) -> int:
    """Printed rates per unit: tenths from 1 requests/s on, finer below."""
    return 10 if qps >= 1 else 100 if qps >= 0.1 else 1000


def rate_text(qps: float) -> str:
    """A capacity in requests/s, rounded down: 19.98 is 19.9. The 1e-9 keeps .7 * 20 at 14.0."""
    step = _step(qps)
    return f"{math.floor(qps * step + 1e-9) / step:.{len(str(step)) - 1}f}"


def _rate_up(qps: float) -> str:
    """An upper bound in requests/s, rounded up."""
    step = _step(qps)
    return f"{math.ceil(qps * step - 1e-9) / step:.{len(str(step)) - 1}f}"
