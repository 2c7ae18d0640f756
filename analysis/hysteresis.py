"""Does the service come back after an overload: the same rate before the highest load and after it.

Input: arrivals of a run in time order, with the asked rate at each and whether it missed the SLO.
Output: `Hysteresis` per rate that was sent on both sides of the peak. Does not: read files, or explain a cause.

1. Only a rate that held the SLO before (within HELD of the target) can be worse after. The peak is the span from the
   first to the last arrival at 95 % of the highest rate or more. A load that comes back to its highest rate later has
   no "after" until then.
2. Rates of a ramp fall into RATE_BINS equal bins; stages and spikes keep their own rate. Both sides need MIN_SIDE
   arrivals. After a spike the backlog is still served: the first half of the arrivals after the peak does not count at
   a rate that was held constant, and `recovery_s` tells how long the misses went on.
3. The difference after - before has Newcombe's hybrid score interval on effective samples (n over the variance
   inflation of each side). `degraded`: the interval lies below 0. `recovers`: it lies above -MARGIN. Else `undecided`.
   Without a miss too many at the peak there was no overload, and nothing to come back from.

Source: Newcombe 1998, Interval estimation for the difference between independent proportions, method 10.
"""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from analysis.attainment import share_interval
from analysis.reasons import reason
from bench.records.analysis import Hysteresis, Interval, Reason
from bench.records.sentences import joined, said

PEAK_SHARE = 0.95
RATE_BINS = 8
MIN_SIDE = 30  # arrivals: fewer say nothing about a share
MARGIN = 0.05  # a loss of attainment that may stay unseen: 73 arrivals without a miss exclude more
HELD = 0.02  # a rate held before when it missed no more than so much above the allowed share
MAX_RATES = 12


def hysteresis(
    intended_s: np.ndarray, rate_qps: np.ndarray, missed: np.ndarray, varying: np.ndarray, target: float
) -> list[Hysteresis]:
    """One entry per rate on both sides of the peak, rates ascending; [] when none is.

    Arrays: (n,) per arrival of valid stages; `varying`: the rate changed within its stage (ramp, spike).
    """
    if not len(intended_s):
        return []
    order = np.argsort(intended_s, kind="stable")
    t, rate, missed, varying = intended_s[order], rate_qps[order], missed[order].astype(bool), varying[order]
    top = float(rate.max())
    at_peak = np.flatnonzero(rate >= PEAK_SHARE * top)
    first, last = int(at_peak[0]), int(at_peak[-1])
    peak = missed[first : last + 1]
    overloaded = len(peak) > 0 and float(np.mean(peak)) > 1 - target
    out = []
    for low, high in _bins(rate, varying, top):
        inside = (rate >= low) & (rate <= high)
        if not inside.any():
            continue  # two ramps with a gap between their rates
        before, after = np.flatnonzero(inside[:first]), last + 1 + np.flatnonzero(inside[last + 1 :])
        constant = float(np.ptp(rate[inside])) < 1e-9 and bool(varying[inside].all())
        settled = after[len(after) // 2 :] if constant else after
        if len(before) < MIN_SIDE or len(settled) < MIN_SIDE:
            continue
        if float(np.mean(missed[before])) > 1 - target + HELD:
            continue  # it did not hold before either
        qps = float(np.mean(rate[np.concatenate([before, settled])]))
        late = after[missed[after]]
        recovery_s = float(t[late[-1]] - t[last]) if constant and len(late) else None
        out.append(_compare(qps, missed[before], missed[settled], overloaded, recovery_s))
    return sorted(out, key=lambda h: h.offered_qps)[:MAX_RATES]


def _bins(rate: np.ndarray, varying: np.ndarray, top: float) -> list[tuple[float, float]]:
    """[low, high] of every rate to look at, below the peak."""
    own = np.unique(np.round(rate[~varying], 6))
    out = [(r - 1e-6, r + 1e-6) for r in own if r < PEAK_SHARE * top]
    moving = rate[varying]
    if len(moving):
        levels = np.unique(np.round(moving, 6))
        if len(levels) <= 3:  # a spike: its own rates
            return out + [(r - 1e-6, r + 1e-6) for r in levels if r < PEAK_SHARE * top]
        edges = np.linspace(float(moving.min()), top, RATE_BINS + 1)
        out += [(float(a), float(b)) for a, b in zip(edges[:-2], edges[1:-1], strict=True)]
    return out


def _compare(
    qps: float, before: np.ndarray, after: np.ndarray, overloaded: bool, recovery_s: float | None
) -> Hysteresis:
    sides = [_share(before), _share(after)]
    difference = newcombe(sides[0], sides[1])
    assert difference.low is not None and difference.high is not None
    if not overloaded:
        verdict = "no_overload"
    elif difference.high < 0:
        verdict = "degraded"
    else:
        verdict = "recovers" if difference.low > -MARGIN else "undecided"
    return Hysteresis(qps, sides[0], sides[1], difference, verdict, recovery_s)


def _share(missed: np.ndarray) -> Interval:
    return replace(share_interval(~missed), method="Wilson on the effective sample")


def newcombe(before: Interval, after: Interval) -> Interval:
    """after - before with its 95 % interval, from the score intervals of both shares."""
    p1, l1, u1 = (float(x or 0.0) for x in (before.value, before.low, before.high))
    p2, l2, u2 = (float(x or 0.0) for x in (after.value, after.low, after.high))
    d = p2 - p1
    return Interval(d, d - math.hypot(p2 - l2, u1 - p1), d + math.hypot(u2 - p2, p1 - l1), method="Newcombe",
                    n=before.n + after.n)  # fmt: skip


def findings(found: list[Hysteresis]) -> list[Reason]:
    """One sentence over all rates: what stays degraded, else that it recovers; nothing without an overload."""
    for verdict in ("degraded", "recovers"):
        mine = [h for h in found if h.verdict == verdict]
        if not mine or (verdict == "recovers" and any(h.verdict == "undecided" for h in found)):
            continue
        shown = [
            said("hysteresis.rate", offered_qps=h.offered_qps, before=h.before.value, after=h.after.value,
                 low_points=100 * (h.difference.low or 0.0), high_points=100 * (h.difference.high or 0.0),
                 recovery=said("hysteresis.recovery", seconds=h.recovery_s) if h.recovery_s is not None else said(""))
            for h in mine
        ]  # fmt: skip
        first = mine[0]
        return [reason(f"DIA-HYSTERESIS.{verdict}", "info", f"next.hysteresis_{verdict}", value=first.after.value,
                       limit=first.before.value, params={"rates": joined("semicolon", shown[:4])})]  # fmt: skip
    return []
