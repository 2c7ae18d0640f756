"""Spread of P95 over repeats of one offered rate.

Input: stage analyses. Output: `Repeatability`, two per repeated rate, and the reasons that follow from them.
Does not: call a stage beyond the knee a failed repeat; it is unstable, not unrepeatable.

1. Same seed (same arrivals and lengths): range / mean <= 3 %. Common random numbers
   leave only the service and ourselves to differ.
2. Different seeds: <= 15 %, with the note whether 15 % was attainable: three runs stay
   within 15 % in 95 of 100 cases only when their variation (CV) is at most 4.5 %
   (the range of three normals is 3.31 sd at 95 %).
3. INVALID repeats are left out. When more than half of a rate's repeats are INVALID, the
   measurement is INVALID at that rate: what is left was picked by our own faults.
4. Whether a limit was attainable is asked of another source where there is one: with other
   seeds, the intervals of P95 within the stages. Else of the chi-square interval of the CV.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from scipy import special

from analysis.reasons import reason, sentence
from bench.records.analysis import Reason, Repeatability, StageAnalysis
from bench.records.sentences import joined, said

SAME_SEED_LIMIT = 0.03
OTHER_SEED_LIMIT = 0.15
ATTAINABLE_CV = 0.045  # 0.15 / 3.31
# 95 % point of the range of n standard normals (studentised range, infinite degrees of freedom).
RANGE_SD = {2: 2.772, 3: 3.314, 4: 3.633, 5: 3.858, 6: 4.030, 7: 4.170, 8: 4.286, 9: 4.387, 10: 4.474}
STATISTICS = (("e2e_s", "p95"), ("ttft_s", "p95"))
CLOSE_S = 1e-3  # below a millisecond the spread is the clock's and the network's, whatever its ratio
NORMAL_95 = 1.96
MAJORITY = "INV-REPEATS"


def sd_interval(sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Chi-square interval of a standard deviation from n values (n >= 2)."""
    low = sd * np.sqrt((n - 1) / special.chdtri(n - 1, (1 - level) / 2))
    high = sd * np.sqrt((n - 1) / special.chdtri(n - 1, (1 + level) / 2))
    return float(low), float(high)


def repeated(stages: list[StageAnalysis]) -> list[tuple[float, list[StageAnalysis]]]:
    """(rate, its stages) of every constant rate that was measured more than once, lowest first."""
    groups: dict[float, list[StageAnalysis]] = defaultdict(list)
    for stage in stages:
        if stage.verdict != "EMPTY" and "ramp" not in stage.marks and stage.process != "closed":
            groups[round(stage.offered_qps, 6)].append(stage)
    return [(rate, members) for rate, members in sorted(groups.items()) if len(members) > 1]


def sound(members: list[StageAnalysis]) -> list[StageAnalysis]:
    """The repeats that are valid for themselves, whatever became of the others."""
    return [s for s in members if not any(r.severity == "invalid" and r.reason_id != MAJORITY for r in s.reasons)
            and (s.verdict != "INVALID" or any(r.reason_id == MAJORITY for r in s.reasons))]  # fmt: skip


def refuse_minorities(stages: list[StageAnalysis]) -> None:
    """Make the valid repeats of a rate INVALID where more than half of its repeats are; each is told why."""
    for rate, members in repeated(stages):
        valid = sound(members)
        if 2 * len(valid) >= len(members):
            continue
        bad = next(s for s in members if s not in valid)
        why = next((sentence(r) for r in bad.reasons if r.severity == "invalid"), said("gate.see_reasons"))
        params = {"valid": len(valid), "repeats": len(members), "offered_qps": rate, "reason": why}
        for stage in valid:
            stage.verdict = "INVALID"
            stage.reasons.insert(0, reason(MAJORITY, "invalid", "next.repeats_invalid", stage=stage.stage,
                                           value=float(len(valid)), limit=len(members) / 2, params=params))  # fmt: skip


def repeatability(stages: list[StageAnalysis], seeds: dict[int, int]) -> list[Repeatability]:
    """One entry per statistic and rate that was measured more than once. `seeds`: stage -> seed."""
    return [_one(rate, members, metric, statistic, seeds)
            for rate, members in repeated(stages) for metric, statistic in STATISTICS]  # fmt: skip


def _one(
    rate: float, members: list[StageAnalysis], metric: str, statistic: str, seeds: dict[int, int]
) -> Repeatability:
    name = f"{metric.removesuffix('_s')}_{statistic}_s"
    same = len({seeds.get(m.stage) for m in members}) == 1
    limit = SAME_SEED_LIMIT if same else OTHER_SEED_LIMIT
    valid = sound(members)
    numbers = [getattr(m.latency[metric], statistic) for m in valid]
    values = [float(v) for v in numbers if v is not None and np.isfinite(v)]
    result = Repeatability(rate, name, values, None, limit, same, None, repeats=len(members), valid=len(values))
    if any(m.stationarity == "UNSTABLE" for m in valid):
        result.unstable = True
        result.note = "beyond capacity: the value grows with the stage's length, so repeats say nothing"
        return result
    if 2 * len(valid) < len(members):
        result.note = f"{len(valid)} of {len(members)} repeats are valid; see the reasons of the others"
        return result
    if len(values) < len(valid) or len(values) < 2:
        result.note = f"{len(values)} of {len(members)} repeats are valid and have a finite, printable value"
        return result
    mean = float(np.mean(values))
    spread = max(values) - min(values)
    result.range_ratio = spread / mean if mean > 0 else 0.0
    result.ok = result.range_ratio <= limit or spread < CLOSE_S
    result.note = _note(values, mean, same)
    if len(valid) < len(members):
        result.note = f"{len(valid)} of {len(members)} repeats are valid; {result.note}"
    if not result.ok:
        ends = [(p.p95_low, p.p95_high) for p in (m.latency[metric] for m in valid)]
        result.reachable = _reachable(values, limit, [] if same else ends)
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


def _reachable(values: list[float], limit: float, ends: list[tuple[float | None, float | None]]) -> dict[str, Any]:
    """Whether the limit was attainable at this load, as a sentence. `ends`: 95 % interval of each value, [] = unknown.

    The limit is attainable when n values stay within it in 95 of 100 cases: CV <= limit / RANGE_SD[n].
    """
    n, mean = len(values), float(np.mean(values))
    needed = limit / RANGE_SD[min(n, max(RANGE_SD))]
    known = [(high - low) / (2 * NORMAL_95) for low, high in ends if low is not None and high is not None]
    if known and len(known) == n:
        cv = float(np.sqrt(np.mean(np.square(known)))) / mean
        return said("repeat.attainable" if cv <= needed else "repeat.chance", cv=cv, runs=n, needed=needed)
    sd = float(np.std(values, ddof=1))
    low_sd, high_sd = sd_interval(sd, n)
    code = "repeat.unattainable" if low_sd / mean > needed else "repeat.open"
    return said(code, cv=sd / mean, low=low_sd / mean, high=high_sd / mean, runs=n, needed=needed)


def repeat_reasons(stages: list[StageAnalysis], found: list[Repeatability]) -> list[Reason]:
    """Warnings about repeats: those left out, too few for repeatability, and those that differ."""
    out = []
    for rate, members in repeated(stages):
        valid = sound(members)
        counts = {"valid": len(valid), "repeats": len(members), "offered_qps": rate}
        if len(valid) < len(members):
            left = joined("comma", [s.name + f" #{s.repeat + 1}" for s in members if s not in valid])
            few = len(valid) < 2
            out.append(reason("WARN-REPEAT.few" if few else "WARN-REPEAT.invalid", "warn", "next.repeats_invalid",
                              value=float(len(valid)), limit=float(len(members)),
                              params=counts if few else counts | {"names": left}))  # fmt: skip
        wide = [r for r in found if r.ok is False and r.offered_qps == rate]
        if not wide:
            continue
        worst = max(wide, key=lambda r: r.range_ratio or 0.0)
        params = {
            "offered_qps": rate, "statistic": statistic_words(worst.statistic), "ratio": worst.range_ratio,
            "limit": worst.limit_ratio, "seeds": said("repeat.same" if worst.same_seed else "repeat.other"),
            "values": joined("comma", list(worst.values)), "reachable": worst.reachable,
        }  # fmt: skip
        out.append(reason("WARN-REPEAT", "warn", "next.repeats", value=worst.range_ratio, limit=worst.limit_ratio,
                          params=params))  # fmt: skip
    return out


def statistic_words(name: str) -> str:
    """`e2e_p95_s` as sentences name it: `E2E p95`."""
    metric, statistic = name.removesuffix("_s").rsplit("_", 1)
    return f"{metric.upper()} {statistic}"


def default_repeat_gate(found: list[Repeatability]) -> list[dict[str, Any]]:
    """The gate of a `repeat` run: a warning, as repeats that differ do not say that the SLO was missed."""
    limits = {r.limit_ratio for r in found} or {OTHER_SEED_LIMIT}
    return [{"metric": "repeat_spread", "statistic": "value", "operator": "<=", "value": max(limits), "at": "target",
             "severity": "warn"}]  # fmt: skip
