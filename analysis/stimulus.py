"""Proof of the stimulus: what was planned against what was sent, for one window.

Input: intended and sent times of the window's arrivals, gauge samples of the client.
Output: `Stimulus` and the reasons why a stage is not to be trusted.
Does not: look at answers.

1. planned = rows of the window; delivered = arrivals that were sent inside it.
2. The gap test compares the sent gaps of all workers together with the process that
   was asked for, with the rate that was asked for (no fitted parameter, so the
   Kolmogorov-Smirnov p-value is exact): Poisson exponential, gamma with its shape;
   constant by the spread of the gaps; trace by its own plan only.
3. The gap test fails on effect and evidence together: p < 1e-4 and a distance above
   5 %, or above what the mean send lag can do to the gaps.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from analysis.percentiles import nearest_rank
from analysis.reasons import reason
from analysis.run_files import Gauge
from bench.records.analysis import Reason, Stimulus
from bench.records.clauses import LAG_FLOOR_S, lag_limit_s
from bench.records.sentences import said

RATE_LIMIT = 0.01  # the project's promise: delivered within 1 % of the plan
RATE_SLACK = 2  # arrivals that lag may move across a window's edge
GAP_P = 1e-4  # one false alarm in ten thousand stages
GAP_DISTANCE = 0.05  # a smaller shift of the gap distribution changes no queue noticeably
CONSTANT_CV = 0.10
DRIFT_Z = 4.0
LOOP_LAG_LIMIT_S = 0.020
CPU_LIMIT = 0.85
IDLE_CPU = 0.5  # of a core: below it a worker was not what kept itself from sending
MIN_GAPS = 30
QUIET_MACHINE = "next.quiet_machine"


@dataclass(frozen=True)
class ClientHealth:
    """The sender's own state in one window."""

    loop_lag_p99_s: float | None
    cpu_max_ratio: float | None  # worst worker, 95th percentile of its samples
    kernel_share: float | None  # answers whose first and last output were stamped by the kernel


def client_health(gauge: Gauge | None, t0: float, t1: float, kernel_share: float | None) -> ClientHealth:
    """Loop lag and CPU of the workers over [t0, t1]."""
    if gauge is None or not len(gauge):
        return ClientHealth(None, None, kernel_share)
    inside = (gauge.t_s >= t0) & (gauge.t_s <= t1)
    lag = gauge.loop_lag_s[inside]
    lag = np.sort(lag[np.isfinite(lag)])
    cpu = []
    for worker in np.unique(gauge.worker[inside]):
        values = gauge.cpu_ratio[inside & (gauge.worker == worker)]
        values = np.sort(values[np.isfinite(values)])
        if len(values):
            cpu.append(nearest_rank(values, 0.95))
    return ClientHealth(nearest_rank(lag, 0.99) if len(lag) else None, max(cpu) if cpu else None, kernel_share)


def gap_test(gaps: np.ndarray, process: str, rate_qps: float, burstiness: float) -> tuple[float, float] | None:
    """Kolmogorov-Smirnov distance and p-value of gaps against the asked process; None when it has none.

    `gaps`: (n,) seconds; `burstiness`: gamma shape, 1 = Poisson.
    """
    n = len(gaps)
    if n < MIN_GAPS or rate_qps <= 0 or process not in ("poisson", "gamma"):
        return None
    shape = 1.0 if process == "poisson" else burstiness
    expected = special.gammainc(shape, shape * rate_qps * np.sort(gaps))
    rank = np.arange(1, n + 1)
    distance = float(max(np.max(rank / n - expected), np.max(expected - (rank - 1) / n)))
    # Kolmogorov's limit law with Stephens' correction for finite n.
    root = math.sqrt(n)
    return distance, float(special.kolmogorov(distance * (root + 0.12 + 0.11 / root)))


def dispersion(times_s: np.ndarray, t0: float, t1: float) -> tuple[float | None, float | None]:
    """Variance over mean of counts per second (1 for Poisson), and its two-sided chi-square p-value."""
    bins = int(t1 - t0)
    if bins < 10:
        return None, None
    counts = np.histogram(times_s, bins=bins, range=(t0, t0 + bins))[0]
    mean = counts.mean()
    if mean <= 0:
        return None, None
    index = float(counts.var(ddof=1) / mean)
    upper = float(special.chdtrc(bins - 1, index * (bins - 1)))
    return index, 2 * min(upper, 1 - upper)


def drift_z(times_s: np.ndarray, t0: float, t1: float) -> float:
    """How far the first half's count is from the second's, in standard deviations of a Poisson process."""
    first = int(np.count_nonzero(times_s < (t0 + t1) / 2))
    n = len(times_s)
    return (n - 2 * first) / math.sqrt(n) if n else 0.0


def stimulus(
    *,
    intended_s: np.ndarray,
    sent_s: np.ndarray,
    t0: float,
    t1: float,
    process: str,
    offered_qps: float,
    burstiness: float,
    varying_rate: bool,
    health: ClientHealth,
    ttft_deadline_s: float,
    stage: int,
    sent_in_window: int,
    own_machine: bool = False,
) -> tuple[Stimulus, list[Reason]]:
    """Planned against delivered over [t0, t1), and what is wrong with it.

    `intended_s`, `sent_s`: (n,) of the window's planned arrivals, NaN = never sent.
    `sent_in_window`: requests of this stage sent between t0 and t1, planned there or not.
    `own_machine`: the service runs on the client's machine by our own choice, so it cannot be moved away.
    """  # fmt: skip
    window_s = t1 - t0
    planned = len(intended_s)
    known = np.isfinite(sent_s)
    sent = np.sort(sent_s[known])
    lag = np.sort(sent_s[known] - intended_s[known])
    gaps = np.diff(sent)
    planned_qps = planned / window_s if window_s > 0 else 0.0
    delivered_qps = sent_in_window / window_s if window_s > 0 else 0.0
    index, _ = dispersion(sent, t0, t1)
    rated = None if varying_rate else gap_test(gaps, process, offered_qps, burstiness)
    result = Stimulus(
        planned=planned,
        sent=int(known.sum()),
        planned_qps=planned_qps,
        delivered_qps=delivered_qps,
        rate_error_ratio=(sent_in_window - planned) / planned if planned else 0.0,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None,
        dispersion=index,
        ks_p=rated[1] if rated else None,
        send_lag_p50_s=nearest_rank(lag, 0.50) if len(lag) else None,
        send_lag_p99_s=nearest_rank(lag, 0.99) if len(lag) else None,
        loop_lag_p99_s=health.loop_lag_p99_s,
        client_cpu_max_ratio=health.cpu_max_ratio,
    )
    reasons = [
        *_rate_reasons(result, sent_in_window, stage),
        *_gap_reasons(result, rated, gaps, process, offered_qps, float(lag.mean()) if len(lag) else 0.0, varying_rate,
                      stage),
        *_client_reasons(result, health, ttft_deadline_s, stage, own_machine),
        *_plan_reasons(planned, sent, process, offered_qps, varying_rate, t0, t1, stage),
    ]
    result.ok = not any(r.severity == "invalid" for r in reasons)
    return result, reasons


def _rate_reasons(s: Stimulus, sent_in_window: int, stage: int) -> list[Reason]:
    if s.planned == 0 or abs(s.rate_error_ratio) <= RATE_LIMIT or abs(sent_in_window - s.planned) <= RATE_SLACK:
        return []
    return [
        reason(
            "INV-RATE", "invalid", "next.rate", stage=stage, value=abs(s.rate_error_ratio), limit=RATE_LIMIT,
            params={"delivered_qps": s.delivered_qps, "planned_qps": s.planned_qps,
                    "error_ratio": s.rate_error_ratio, "limit": RATE_LIMIT},
        )
    ]  # fmt: skip


def _gap_reasons(
    s: Stimulus, rated: tuple[float, float] | None, gaps: np.ndarray, process: str, offered_qps: float,
    lag_mean_s: float, varying_rate: bool, stage: int,
) -> list[Reason]:  # fmt: skip
    if process == "constant" and not varying_rate and len(gaps) >= MIN_GAPS and s.gap_cv is not None:
        spread = float(gaps.std())
        if s.gap_cv > CONSTANT_CV and spread > LAG_FLOOR_S:
            return [reason("INV-GAPS.constant", "invalid", "next.gaps_constant", stage=stage, value=s.gap_cv,
                           limit=CONSTANT_CV, params={"gap_cv": s.gap_cv, "sd_ms": spread * 1e3})]  # fmt: skip
        return []
    if rated is None:
        return []
    distance, p = rated
    # Lags d and d' at its ends move a gap by |d - d'|, 2 E[d] in the mean at most, and the distribution by that times
    # its density, which is at most the rate (exponential).
    allowed = max(GAP_DISTANCE, 2 * offered_qps * max(lag_mean_s, 0.0))
    if p < GAP_P and distance > allowed:
        params = {"process": process, "distance": distance, "p": p, "allowed": allowed, "p_limit": GAP_P}
        return [reason("INV-GAPS", "invalid", "next.gaps", stage=stage, value=distance, limit=allowed, params=params)]
    return []


def late_sender(cpu_ratio: float | None, own_machine: bool) -> tuple[dict[str, Any], str]:
    """Why a sender was late as far as its CPU tells, and what to do (code). One with CPU to spare did not cause it."""
    if cpu_ratio is not None and cpu_ratio < IDLE_CPU:
        return said("cause.other", cpu_ratio=cpu_ratio), QUIET_MACHINE
    return said(""), "next.workers_or_quiet" if own_machine else "next.workers_or_move"


def _client_reasons(
    s: Stimulus, health: ClientHealth, ttft_deadline_s: float, stage: int, own_machine: bool
) -> list[Reason]:
    reasons = []
    cause, step = late_sender(s.client_cpu_max_ratio, own_machine)
    limit = lag_limit_s(ttft_deadline_s)
    if s.send_lag_p99_s is not None and s.send_lag_p99_s > limit:
        params = {"lag_ms": s.send_lag_p99_s * 1e3, "limit_ms": limit * 1e3, "cause": cause}
        reasons.append(reason("INV-LAG", "invalid", step, stage=stage, value=s.send_lag_p99_s, limit=limit,
                              params=params))  # fmt: skip
    kernel = (health.kernel_share or 0.0) >= 0.99
    # With kernel stamps a late reader does not move a time stamp; without, it does.
    severity = "warn" if kernel else "invalid"
    if s.loop_lag_p99_s is not None and s.loop_lag_p99_s > LOOP_LAG_LIMIT_S:
        params = {"lag_ms": s.loop_lag_p99_s * 1e3, "limit_ms": LOOP_LAG_LIMIT_S * 1e3, "cause": cause}
        step = QUIET_MACHINE if cause["code"] else "next.workers_or_lazy"
        reasons.append(reason("INV-LOOP.kernel" if kernel else "INV-LOOP", severity, step, stage=stage,
                              value=s.loop_lag_p99_s, limit=LOOP_LAG_LIMIT_S, params=params))  # fmt: skip
    if s.client_cpu_max_ratio is not None and s.client_cpu_max_ratio > CPU_LIMIT:
        params = {"cpu_ratio": s.client_cpu_max_ratio, "limit": CPU_LIMIT}
        reasons.append(reason("INV-CPU", severity, "next.workers", stage=stage, value=s.client_cpu_max_ratio,
                              limit=CPU_LIMIT, params=params))  # fmt: skip
    return reasons


def _plan_reasons(
    planned: int, sent: np.ndarray, process: str, offered_qps: float, varying_rate: bool, t0: float, t1: float,
    stage: int,
) -> list[Reason]:  # fmt: skip
    """The plan itself against the asked rate: chance, but worth a line."""
    reasons: list[Reason] = []
    expected = offered_qps * (t1 - t0)
    if varying_rate or expected <= 0 or process in ("trace", "closed"):
        return reasons
    off = (planned - expected) / expected
    bound = 3 / math.sqrt(expected)
    if abs(off) > max(bound, RATE_LIMIT):
        params = {"planned": planned, "expected": expected, "off_ratio": off}
        reasons.append(reason("WARN-PLAN", "warn", "next.plan", stage=stage, value=off, limit=bound, params=params))
    z = drift_z(sent, t0, t1)
    if abs(z) > DRIFT_Z and process == "poisson":
        reasons.append(reason("WARN-DRIFT", "warn", "next.drift", stage=stage, value=z, limit=DRIFT_Z,
                              params={"z": abs(z)}))  # fmt: skip
    return reasons
