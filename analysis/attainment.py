"""Attainment: the share of ALL planned arrivals that meet the SLO, clause by clause.

Input: arrays over the arrivals of one window. Output: hits per clause and
`Interval`s with Wilson bounds widened for dependence.
Does not: drop an arrival. Rejected, failed, late, truncated and never-sent
arrivals are misses of every clause.

1. denominator = planned arrivals of the window, whatever happened to them;
2. an answer of a few tokens has no TPOT and meets that clause; one of many whose TPOT was not measured does not;
3. `joint` = TTFT and TPOT; `e2e` stands apart (its target is a percentile);
4. low <= value <= high, where high counts as met what nobody can know.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from analysis.intervals import variance_inflation, wilson
from bench.records.analysis import Interval

CLAUSES = ("ttft", "tpot", "joint", "e2e")


@dataclass(frozen=True)
class Slo:
    """The targets of one run; seconds and shares."""

    ttft_deadline_s: float
    tpot_deadline_s: float
    e2e_target_s: float
    attainment_target: float

    def as_dict(self) -> dict[str, float]:
        """The `slo` object of analysis.json."""
        return {
            "ttft_deadline_s": self.ttft_deadline_s,
            "tpot_deadline_s": self.tpot_deadline_s,
            "e2e_target_s": self.e2e_target_s,
            "attainment_target": self.attainment_target,
        }


@dataclass(frozen=True)
class Hits:
    """Boolean arrays over arrivals: which clause was met, and who is unknown."""

    ttft: np.ndarray
    tpot: np.ndarray
    joint: np.ndarray
    e2e: np.ndarray
    unknown: np.ndarray  # neither a hit nor a proven miss of the joint SLO


def meets_tpot(tpot_s: np.ndarray, deadline_s: np.ndarray | float, no_tpot: np.ndarray | bool) -> np.ndarray:
    """(n,) bool by rule 2, for answers that are ok; `no_tpot` as in `hits`."""
    return (np.isnan(tpot_s) & ~np.asarray(no_tpot)) | (tpot_s <= deadline_s)


def hits(
    *,
    ok: np.ndarray,
    ttft_s: np.ndarray,
    tpot_s: np.ndarray,
    e2e_s: np.ndarray,
    ttft_deadline_s: np.ndarray | float,
    tpot_deadline_s: np.ndarray | float,
    e2e_target_s: float,
    unsent: np.ndarray,
    cut_off: np.ndarray,
    age_s: np.ndarray,
    no_tpot: np.ndarray | bool = False,
) -> Hits:
    """Which arrivals met each clause. All arrays (n,), NaN = absent; deadlines per arrival or one.

    `cut_off`: still open when our waiting ended (drain limit, stop), `age_s`: their age then.
    A cut-off request whose first token was in time, or that was younger than the deadline
    without one, may still have met the SLO: it is a miss in the value and a hit in the upper bound.
    `no_tpot`: answers of many tokens, or of nobody knows how many, whose TPOT was not measured.
    """
    with np.errstate(invalid="ignore"):
        ttft = ok & (ttft_s <= ttft_deadline_s)
        tpot = ok & meets_tpot(tpot_s, tpot_deadline_s, no_tpot)
        e2e = ok & (e2e_s <= e2e_target_s)
        first_in_time = ttft_s <= ttft_deadline_s
        young = np.isnan(ttft_s) & (age_s <= ttft_deadline_s)
    unknown = unsent | (cut_off & (first_in_time | young))
    return Hits(ttft=ttft, tpot=tpot, joint=ttft & tpot, e2e=e2e, unknown=unknown & ~(ttft & tpot))


def share_interval(hit: np.ndarray) -> Interval:
    """Share of True with its Wilson interval; n shrinks to what dependent arrivals are worth."""
    n = len(hit)
    if n == 0:
        return Interval(value=None, method="no arrivals", n=0)
    count = int(np.count_nonzero(hit))
    inflation = variance_inflation(hit)
    low, high = wilson(count / inflation, n / inflation)
    method = "Wilson" if inflation == 1.0 else f"Wilson on {n / inflation:.0f} effective arrivals"
    return Interval(value=count / n, low=low, high=high, method=method, n=n)


def decide(interval: Interval, target: float) -> str:
    """ "MET", "NOT_MET" or "UNDECIDED": where the interval lies against the target."""
    if interval.value is None or interval.low is None or interval.high is None:
        return "UNDECIDED"
    if interval.low >= target:
        return "MET"
    return "NOT_MET" if interval.high < target else "UNDECIDED"


def arrivals_needed(target: float) -> int:
    """Fewest arrivals, all hits, whose Wilson lower bound reaches `target` (0 < target < 1)."""
    from analysis.intervals import z_quantile

    # all hits: low = 1 / (1 + z²/n) >= target  <=>  n >= z² target / (1 - target)
    z2 = z_quantile() ** 2
    return int(np.ceil(z2 * target / (1 - target)))


def binding_clause(found: Hits, ok: np.ndarray) -> str:
    """The clause that costs most arrivals: "failures", "ttft", "tpot", or "none" when all were met."""
    misses = {
        "failures": int(np.count_nonzero(~ok)),
        "ttft": int(np.count_nonzero(ok & ~found.ttft)),
        "tpot": int(np.count_nonzero(ok & ~found.tpot)),
    }
    worst = max(misses, key=lambda k: misses[k])
    return worst if misses[worst] else "none"
