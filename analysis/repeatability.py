"""Spread of P95 over repeats of one offered rate.

Input: stage analyses. Output: `Repeatability`, one per repeated rate.
Does not: call a stage beyond the knee a failed repeat; it is unstable, not unrepeatable.

1. Same seed (same arrivals and lengths): range / mean <= 3 %. Common random numbers
   leave only the service and ourselves to differ.
2. Different seeds: <= 15 %, with the note whether 15 % was attainable: three runs stay
   within 15 % in 95 of 100 cases only when their variation (CV) is at most 4.5 %
   (the range of three normals is 3.31 sd at 95 %).
"""
from __future__ import annotations

from collections import defaultdict

import numpy as np
from scipy import special

from bench.records.analysis import Repeatability, StageAnalysis

SAME_SEED_LIMIT = 0.03
OTHER_SEED_LIMIT = 0.15
ATTAINABLE_CV = 0.045  # 0.15 / 3.31
STATISTICS = (("e2e_s", "p95"), ("ttft_s", "p95"))


def sd_interval(sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Chi-square interval of a standard deviation from n values (n >= 2)."""
    low = sd * np.sqrt((n - 1) / special.chdtri(n - 1, (1 - level) / 2))
    high = sd * np.sqrt((n - 1) / special.chdtri(n - 1, (1 + level) / 2))
    return float(low), float(high)


def repeatability(stages: list[StageAnalysis], seeds: dict[int, int]) -> list[Repeatability]:
    """One entry per statistic and rate that was measured more than once. `seeds`: stage -> seed."""
    groups: dict[float, list[StageAnalysis]] = defaultdict(list)
    for stage in stages:
        if stage.verdict not in ("EMPTY",) and "ramp" not in stage.marks:
            groups[round(stage.offered_qps, 6)].append(stage)
    found = []
    for rate, members in sorted(groups.items()):
        if len(members) < 2:
            continue
        for metric, statistic in STATISTICS:
            found.append(_one(rate, members, metric, statistic, seeds))
    return found


def _one(
    rate: float, members: list[StageAnalysis], metric: str, statistic: str, seeds: dict[int, int]
) -> Repeatability:
    name = f"{metric.removesuffix('_s')}_{statistic}_s"
    same = len({seeds.get(m.stage) for m in members}) == 1
    limit = SAME_SEED_LIMIT if same else OTHER_SEED_LIMIT
    numbers = [getattr(m.latency[metric], statistic) for m in members]
    values = [float(v) for v in numbers if v is not None and np.isfinite(v)]
    result = Repeatability(rate, name, values, None, limit, same, None)
    if any(m.stationarity == "UNSTABLE" for m in members):
        result.note = "beyond capacity: the value grows with the stage's length, so repeats say nothing"
        return result
    if any(m.verdict == "INVALID" for m in members):
        result.note = "a repeat is INVALID; see its reasons"
        return result
    if len(values) < len(members) or len(values) < 2:
        result.note = f"only {len(values)} of {len(members)} repeats have a finite, printable value"
        return result
    mean = float(np.mean(values))
    spread = max(values) - min(values)
    result.range_ratio = spread / mean if mean > 0 else 0.0
    # Below a millisecond the spread is the clock's and the network's, whatever its ratio.
    result.ok = result.range_ratio <= limit or spread < 1e-3
    result.note = _note(values, mean, same)
    return result


def _note(values: list[float], mean: float, same: bool) -> str:
    n = len(values)
    sd = float(np.std(values, ddof=1))
    low, high = sd_interval(sd, n)
    text = f"CV {sd / mean:.1%} from {n} runs (95 % interval {low / mean:.1%} to {high / mean:.1%})"
    if same:
        return text + "; same seed: same arrivals and lengths"
    attainable = "was" if sd / mean <= ATTAINABLE_CV else "was not"
    return text + f"; 15 % {attainable} attainable at this load (needs a CV of at most 4.5 %)"
