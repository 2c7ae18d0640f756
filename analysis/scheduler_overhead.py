"""DIA-SCHED: does the scheduler itself cost time? Three sources, each speaks only with its own data.

Input: stages, the service's page over time, the fitted step law. Output: `Reason`s, one per source at most.
Does not: change a verdict, or tell the scheduler from what else a step pays once (it says so).

1. The engine's page counts the scheduler's own time and the steps (the embedded engine does): its share of a step.
2. Requests wait while seats are empty and KV memory is free, by the service's running and waiting. The seats are the
   most that the service ever ran in this run: what it is configured to run may not be known.
3. The step law T(n) = alpha + beta n: with the batch full, alpha is most of a step. Steps per second are 1 / T(n).
"""
from __future__ import annotations

from typing import Any

import numpy as np

from analysis.reasons import reason
from analysis.run_files import ServerGauge
from bench.records.analysis import Reason, StageAnalysis
from bench.records.sentences import said

DECISION_SHARE = 0.10  # of a step: below it, halving the scheduler's time wins less than 5 % of the throughput
FIXED_SHARE = 0.50  # of a full step: the batch no longer shares most of its cost
MIN_STEPS = 100
MIN_LOOKS = 10  # samples with a queue; a page is read once a second
LOOKS_SHARE = 0.50  # of the samples with a queue
FREE_SEATS = 0.75  # fewer taken than this share: one request that is just leaving or coming is not it
MIN_QUEUE = 2.0  # requests waiting in such a look: one may only wait for the next step
KV_FREE = 0.90
FULL = 0.90


def scheduler_overhead(
    stages: list[StageAnalysis], server: ServerGauge | None, fit: dict[str, Any] | None, seats: float | None,
    replicas: float = 1.0,
) -> list[Reason]:  # fmt: skip
    """What the data say about the cost of scheduling; [] when they say nothing."""
    known = [s for s in stages if s.window_start_s is not None and s.verdict != "INVALID"]
    out = []
    if server is not None:
        for source in (_decisions, _empty_seats):
            found = [r for s in known if (r := source(s, server, replicas)) is not None]
            out += sorted(found, key=lambda r: r.value or 0.0)[-1:]
    return out + (_fixed_cost(known, fit, seats, replicas) if fit else [])


def _window(s: StageAnalysis, server: ServerGauge) -> np.ndarray:
    return np.flatnonzero((server.t_s >= (s.window_start_s or 0.0)) & (server.t_s < (s.window_end_s or 0.0)))


def _decisions(s: StageAnalysis, server: ServerGauge, replicas: float) -> Reason | None:
    assert server.steps_total is not None and server.decision_total_s is not None
    picked = _window(s, server)
    picked = picked[np.isfinite(server.steps_total[picked]) & np.isfinite(server.decision_total_s[picked])]
    if len(picked) < 2 or (np.diff(server.steps_total[picked]) < 0).any():  # a total that falls: started anew
        return None
    first, last = picked[0], picked[-1]
    steps = float(server.steps_total[last] - server.steps_total[first])
    decided_s = float(server.decision_total_s[last] - server.decision_total_s[first])
    span_s = float(server.t_s[last] - server.t_s[first])
    if steps < MIN_STEPS or decided_s <= 0:
        return None
    step_s = replicas * span_s / steps  # an idle engine has fewer steps: then this is longer, and the share smaller
    share = decided_s / steps / step_s
    if share < DECISION_SHARE:
        return None
    params = {"offered_qps": s.offered_qps, "decision_ms": 1e3 * decided_s / steps, "share": share,
              "step_ms": 1e3 * step_s, "steps_per_s": steps / span_s}  # fmt: skip
    return reason("DIA-SCHED", "info", "next.sched", stage=s.stage, value=share, limit=DECISION_SHARE, params=params)


def _empty_seats(s: StageAnalysis, server: ServerGauge, replicas: float) -> Reason | None:
    running = server.running[np.isfinite(server.running)]
    picked = _window(s, server)
    picked = picked[np.isfinite(server.running[picked]) & (server.waiting[picked] >= 1)]
    if len(picked) < MIN_LOOKS:
        return None
    seats = float(running.max())
    kv = server.kv_usage[picked]
    idle = (
        (server.running[picked] < FREE_SEATS * seats)
        & (server.waiting[picked] >= MIN_QUEUE)
        & ~(kv >= KV_FREE)  # NaN: the page does not say
    )
    share = float(idle.mean())
    if share < LOOKS_SHARE:
        return None
    at, told = picked[idle], kv[idle & np.isfinite(kv)]
    params = {
        "offered_qps": s.offered_qps, "waiting": float(server.waiting[at].mean()), "seats": seats,
        "running": float(server.running[at].mean()), "share": share, "samples": len(picked),
        "kv": said("sched.kv", kv=float(told.mean())) if len(told) else said(""),
    }  # fmt: skip
    return reason("DIA-SCHED.seats", "info", "next.sched_seats", stage=s.stage, value=share, limit=LOOKS_SHARE,
                  params=params)  # fmt: skip


def _fixed_cost(
    stages: list[StageAnalysis], fit: dict[str, Any], seats: float | None, replicas: float
) -> list[Reason]:
    if seats is None:
        return []
    full = [s for s in stages if (s.little.in_flight_mean_integral or 0.0) >= FULL * seats]
    n = seats / replicas
    step_s = fit["alpha_s"] + fit["beta_s"] * n + fit["kappa_s"] * n * n
    if not full or step_s <= 0 or fit["kv_s"] > 0 or fit["alpha_s"] / step_s < FIXED_SHARE:
        return []  # with a KV term a step also reads the context, which only a replay knows
    s = max(full, key=lambda x: x.offered_qps)
    share = fit["alpha_s"] / step_s
    params = {"offered_qps": s.offered_qps, "batch_size": int(n), "alpha_ms": 1e3 * fit["alpha_s"],
              "step_ms": 1e3 * step_s, "share": share, "steps_per_s": 1 / step_s}  # fmt: skip
    return [reason("DIA-SCHED.fixed", "info", "next.sched_fixed", stage=s.stage, value=share, limit=FIXED_SHARE,
                   params=params)]  # fmt: skip
