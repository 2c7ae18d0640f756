"""Whether the client's own lateness decides if a stage meets the SLO.

Input: who was late by our own fault, who met the SLO. Output: an INVALID reason, or none.
Does not: judge how late the sender was on the whole (`stimulus.py` does, by p99).

1. Latency counts from the intended time, so a late send makes our own fault a miss. One pause of the client can spoil
   less than 1 % of the arrivals, which no p99 shows, and still decide about a target of .995.
2. Nobody knows what a late arrival would have got in time. So it is counted both ways: all of them as met, all of them
   as missed. When the target lies between the two shares, the sender decides and not the service.
3. Late is a send later than 5 % of the TTFT deadline (at least 5 ms), the limit of the p99; an arrival that was never
   sent; and an answer whose first or last output came while the loop stood still, unless the kernel stamped it.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from analysis.reasons import reason
from analysis.run_files import Gauge
from analysis.stimulus import LOOP_LAG_LIMIT_S, late_sender
from bench.records.analysis import Reason
from bench.records.clauses import LAG_FLOOR_S, LAG_SHARE


def late_arrivals(
    *, intended_s: np.ndarray, sent_s: np.ndarray, unsent: np.ndarray, ttft_deadline_s: np.ndarray,
    held: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """(n,) bool: arrivals that our own client was late for. `held`: see `held_reads`."""
    with np.errstate(invalid="ignore"):
        late = sent_s - intended_s > np.maximum(LAG_SHARE * ttft_deadline_s, LAG_FLOOR_S)
    return late | unsent | held


def held_reads(gauge: Gauge | None, worker: np.ndarray, stamps_s: tuple[np.ndarray, ...], user: np.ndarray,
               limit_s: float) -> np.ndarray:  # fmt: skip
    """(n,) bool: rows with a stamp of our own reader during a pause of its loop that was longer than `limit_s`.

    A sample of the gauge at t that came `lag` late tells of a pause [t - lag, t]; what waited in it is read right
    after. `user`: rows that the kernel did not stamp.
    """
    held = np.zeros(len(worker), dtype=bool)
    if gauge is None or not len(gauge) or not user.any():
        return held
    limit_s = max(limit_s, LOOP_LAG_LIMIT_S)
    with np.errstate(invalid="ignore"):
        long = gauge.loop_lag_s > limit_s
    for w in np.unique(gauge.worker[long]):
        mine = long & (gauge.worker == w)
        end = gauge.t_s[mine] + LOOP_LAG_LIMIT_S
        start = gauge.t_s[mine] - gauge.loop_lag_s[mine]
        order = np.argsort(start)
        start, end = start[order], np.maximum.accumulate(end[order])
        for stamp in stamps_s:
            before = np.searchsorted(start, stamp, side="right") - 1  # NaN sorts behind every pause
            held |= (worker == int(w)) & (before >= 0) & (stamp <= end[np.maximum(before, 0)])
    return held & user


def late_reason(
    late: np.ndarray, hit: np.ndarray, target: float, label: dict[str, Any], *, stage: int, limit_s: float,
    cpu_ratio: float | None, own_machine: bool,
) -> Reason | None:  # fmt: skip
    """INVALID when the share that meets the SLO passes `target` with the late ones as met and not as missed."""
    n, count = len(hit), int(np.count_nonzero(late))
    if not count:
        return None
    as_met, as_missed = float(np.count_nonzero(hit | late)) / n, float(np.count_nonzero(hit & ~late)) / n
    if (as_met >= target) == (as_missed >= target):
        return None
    cause, step = late_sender(cpu_ratio, own_machine)
    params = {
        "late": count, "planned": n, "limit_ms": limit_s * 1e3, "label": label, "as_met": as_met,
        "as_missed": as_missed, "target": target, "cause": cause,
    }  # fmt: skip
    return reason("INV-LAG.decides", "invalid", step, stage=stage, value=float(count), limit=0.0, params=params)
