"""Plain sentences about causes, each with its evidence and the next experiment.

Input: stage analyses, errors, server samples, the rows. Output: `Reason`s with ids DIA-xxx.
Does not: change a verdict, or guess where the data are silent.
"""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from analysis.attainment import Slo
from analysis.computed_tokens import computed
from analysis.load import OK
from analysis.reasons import own_fault, reason
from analysis.row_checks import Checked
from analysis.run_files import ServerGauge
from analysis.scheduler_overhead import scheduler_overhead
from analysis.stimulus import IDLE_CPU, QUIET_MACHINE
from bench.records.analysis import ErrorGroup, Reason, StageAnalysis
from bench.records.sentences import joined, said


def diagnose(
    stages: list[StageAnalysis], slo: Slo, errors: list[ErrorGroup], server: ServerGauge | None, checked: Checked,
    fit: dict[str, Any] | None = None, seats: float | None = None, replicas: float = 1.0,
) -> list[Reason]:  # fmt: skip
    """All findings, the run's first.

    `fit`: the step law where the model is predictive (`Analysis.model["fit"]`), else None. `seats`: sequences that
    the service runs at once, all replicas; None = unknown.
    """
    measured = [s for s in stages if s.planned]
    # A miss that our own side made says nothing of the service or of its deadlines.
    sound = [s for s in measured if not own_fault(s.reasons)]
    out: list[Reason] = []
    # An idle floor is not seen in a queue: not where requests in flight grow, nor where half of the seats are taken.
    idle = [s for s in sound if s.stationarity not in ("UNSTABLE", "SUSPECT")
            and not (seats and (s.little.in_flight_mean_integral or 0.0) > 0.5 * seats)]  # fmt: skip
    for case, there in ((_floor, idle), (_clause, sound), (_rejects, measured), (_client, measured),
                        (_contradiction, sound)):  # fmt: skip
        out.extend(case(there, slo))
    out.extend(_buffering(measured))
    out.extend(_falling_throughput(measured))
    out.extend(_prefill(measured, checked))
    out.extend(_churn(measured, checked))
    out.extend(_kv(measured, server))
    out.extend(_overhead(measured))
    out.extend(scheduler_overhead(measured, server, fit, seats, replicas))
    return out


def _lowest(stages: list[StageAnalysis]) -> StageAnalysis | None:
    usable = [s for s in stages if s.counts.get("ok")]
    return min(usable, key=lambda s: s.offered_qps) if usable else None


def _floor(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """A deadline below what the idle service needs can never be met."""
    low = _lowest(stages)
    if low is None:
        return []
    out = []
    for metric, deadline, clause in (("ttft_s", slo.ttft_deadline_s, "ttft"), ("tpot_s", slo.tpot_deadline_s, "tpot")):
        p50 = low.survivors[metric].p50
        if p50 is not None and math.isfinite(p50) and p50 > deadline:
            params = {"deadline_ms": deadline * 1e3, "offered_qps": low.offered_qps, "p50_ms": p50 * 1e3}
            out.append(reason(f"DIA-FLOOR.{clause}", "info", "next.floor", stage=low.stage, value=p50, limit=deadline,
                              params=params))  # fmt: skip
    return out


def _clause(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Attainment is low though the latency that people look at seems normal: one sentence per clause, all its rates."""
    found: dict[str, list[tuple[StageAnalysis, dict[str, Any]]]] = {}
    for s in stages:
        joint, p50 = s.attainment_joint.value, s.survivors["e2e_s"].p50
        if joint is None or joint >= slo.attainment_target or s.stationarity == "UNSTABLE" or p50 is None:
            continue
        if p50 > slo.e2e_target_s:
            continue
        failed = s.planned - s.counts.get("ok", 0) - s.counts.get("unsent", 0)  # what was never sent, nobody refused
        share = {
            "failures": said("clause.failed", failed=failed, planned=s.planned) if failed else None,
            "ttft": said("clause.share", share=s.attainment_ttft.value or 0.0),
            "tpot": said("clause.share", share=s.attainment_tpot.value or 0.0),
        }.get(s.binding_clause)
        if share is not None:
            found.setdefault(s.binding_clause, []).append((s, share))
    out = []
    for clause, hits in found.items():
        shown = [said("clause.stage", joint=s.attainment_joint.value or 0.0, offered_qps=s.offered_qps,
                      p50_s=s.survivors["e2e_s"].p50 or 0.0) for s, _ in hits]  # fmt: skip
        first = hits[0][0]
        params = {"stages": joined("comma", shown), "shares": joined("comma", [share for _, share in hits])}
        out.append(reason(f"DIA-CLAUSE.{clause}", "info", "next.clause", stage=first.stage,
                          value=first.attainment_joint.value, limit=slo.attainment_target, params=params))  # fmt: skip
    return out


def _rejects(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Rejections keep the survivors fast: one sentence for all rates."""
    shown, first = [], None
    for s in stages:
        share = s.counts.get("rejected", 0) / s.planned
        alive, joint = s.attainment_survivors, s.attainment_joint.value
        if share > 0.005 and alive is not None and joint is not None and alive - joint > 0.005:
            shown.append(said("rejects.stage", offered_qps=s.offered_qps, refused=share, alive=alive, joint=joint))
            first = first or (s.stage, share, joint)
    if first is None:
        return []
    stage, share, joint = first
    return [reason("DIA-REJECTS", "info", "next.rejects", stage=stage, value=share, limit=joint,
                   params={"stages": joined("semicolon", shown)})]  # fmt: skip


def _client(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Our own client was late: names the stages, and says whether it was the client's doing."""
    late = ("INV-LAG", "INV-CPU", "INV-LOOP", "INV-CAP")
    ids = [{r.reason_id for r in s.reasons} for s in stages]  # the arrivals of a lost worker are sent late by others
    bad = [s for s, mine in zip(stages, ids, strict=True) if mine.intersection(late) and "INV-WORKER" not in mine]
    if not bad:
        return []
    cpus = [s.stimulus.client_cpu_max_ratio for s in bad if s.stimulus.client_cpu_max_ratio is not None]
    cpu = max(cpus) if cpus else None
    lag = max((s.stimulus.send_lag_p99_s or 0.0) for s in bad)
    other = cpu is not None and cpu < IDLE_CPU
    params = {
        "stages": joined("comma", [s.name for s in bad]), "lag_ms": 1e3 * lag,
        "used": said("client.cpu", cpu_ratio=cpu) if cpu is not None else said(""),
    }  # fmt: skip
    return [reason("DIA-CLIENT.other" if other else "DIA-CLIENT", "info",
                   QUIET_MACHINE if other else "next.double_workers", stage=bad[0].stage, value=lag,
                   params=params)]  # fmt: skip


def _contradiction(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """The P95 target is missed by answers that meet both token deadlines: the targets contradict each other."""
    low = _lowest(stages)
    if low is None or low.attainment_joint.value is None or low.attainment_e2e.value is None:
        return []
    if low.attainment_joint.value < slo.attainment_target or low.attainment_e2e.value >= 0.95:
        return []
    p95 = low.latency["e2e_s"].p95
    known = p95 is not None and math.isfinite(p95)
    params = {
        "offered_qps": low.offered_qps, "joint": low.attainment_joint.value, "e2e": low.attainment_e2e.value,
        "target_s": slo.e2e_target_s, "p95": said("targets.p95", p95_s=p95) if known else said(""),
    }  # fmt: skip
    return [reason("DIA-TARGETS", "info", "next.targets", stage=low.stage, value=low.attainment_e2e.value, limit=0.95,
                   params=params)]  # fmt: skip


def _buffering(stages: list[StageAnalysis]) -> list[Reason]:
    """TTFT close to E2E and chunks in bursts: something holds the stream back."""
    out = []
    for s in stages:
        ttft, e2e = s.survivors["ttft_s"].p50, s.survivors["e2e_s"].p50
        burst = s.flags.get("burst", 0.0)
        if ttft is None or e2e is None or not e2e:
            continue
        if (
            ttft / e2e > 0.9
            and (burst > 0.05 or (s.survivors["tpot_s"].p50 or 1) < 5e-4)
            and s.stationarity != "UNSTABLE"
        ):
            params = {"ratio": ttft / e2e, "offered_qps": s.offered_qps, "burst": burst}
            out.append(reason("DIA-BUFFER", "info", "next.probe", stage=s.stage, value=ttft / e2e, limit=0.9,
                              params=params))  # fmt: skip
    return out[:1]


def _falling_throughput(stages: list[StageAnalysis]) -> list[Reason]:
    """Completed rate falls while in-flight rises: two operating points, the upper one unstable."""
    ordered = sorted((s for s in stages if s.verdict != "INVALID"), key=lambda s: s.offered_qps)
    if len(ordered) < 2:
        return []
    best = max(ordered, key=lambda s: s.completed_qps)
    later = [s for s in ordered if s.offered_qps > best.offered_qps and s.completed_qps < 0.95 * best.completed_qps]
    grown = [s for s in later if (s.little.in_flight_mean_integral or 0) > (best.little.in_flight_mean_integral or 0)]
    if not grown:
        return []
    s = grown[0]
    params = {
        "best_qps": best.completed_qps, "completed_qps": s.completed_qps,
        "best_in_flight": best.little.in_flight_mean_integral or 0.0,
        "in_flight": s.little.in_flight_mean_integral or 0.0,
    }  # fmt: skip
    return [reason("DIA-BATCH", "info", "next.batch", stage=s.stage, value=s.completed_qps, limit=best.completed_qps,
                   params=params)]  # fmt: skip


def _prefill(stages: list[StageAnalysis], checked: Checked) -> list[Reason]:
    """TTFT follows the prompt length: prefill, not waiting, is the cost."""
    low = _lowest(stages)
    if low is None or low.window_start_s is None or low.window_end_s is None:
        return []
    c = checked.ledger.columns
    rows = (c["stage"] == low.stage) & (checked.status == OK) & np.isfinite(c["ttft_s"])
    asked = np.where(np.isfinite(c["prompt_tokens"]), c["prompt_tokens"], c["input_tokens"])[rows].astype(float)
    tokens = computed(asked, c["cached_tokens"][rows])
    ttft, e2e = c["ttft_s"][rows], c["e2e_s"][rows]
    known = np.isfinite(tokens) & np.isfinite(e2e)
    if known.sum() < 50 or tokens[known].std() == 0:
        return []
    r = float(np.corrcoef(tokens[known], ttft[known])[0, 1])
    share = float(np.median(ttft[known] / np.maximum(e2e[known], 1e-9)))
    if not (r > 0.7 and share > 0.3):
        return []
    slope = float(np.polyfit(tokens[known], ttft[known], 1)[0])
    params = {"offered_qps": low.offered_qps, "share": share, "r": r, "us_per_token": slope * 1e6}
    return [reason("DIA-PREFILL", "info", "next.prefill", stage=low.stage, value=r, limit=0.7, params=params)]


def _churn(stages: list[StageAnalysis], checked: Checked) -> list[Reason]:
    """Most requests open a connection of their own."""
    c = checked.ledger
    new, reused = c.is_value("connection", "new"), c.is_value("connection", "reused")
    total = int(new.sum() + reused.sum())
    if total < 100:
        return []
    share = float(new.sum()) / total
    # A growing pool opens connections too; only a pool that never reuses is churn.
    if share < 0.8:
        return []
    cost = c["connect_s"][new]
    cost = cost[np.isfinite(cost)]
    median = float(np.median(cost)) if len(cost) else 0.0
    params = {"share": share, "total": total, "median_ms": median * 1e3}
    return [reason("DIA-CHURN", "info", "next.churn", value=share, limit=0.8, params=params)]


def _kv(stages: list[StageAnalysis], server: ServerGauge | None) -> list[Reason]:
    """KV memory is full while requests wait."""
    if server is None:
        return []
    for s in sorted(stages, key=lambda x: x.offered_qps):
        if s.window_start_s is None or s.window_end_s is None:
            continue
        inside = (server.t_s >= s.window_start_s) & (server.t_s < s.window_end_s)
        usage = server.kv_usage[inside & np.isfinite(server.kv_usage)]
        waiting = server.waiting[inside & np.isfinite(server.waiting)]
        if not len(usage):
            continue
        high = float(np.mean(usage > 0.95))
        preempted = server.preemptions_total[inside & np.isfinite(server.preemptions_total)]
        moved = float(preempted[-1] - preempted[0]) if len(preempted) > 1 else 0.0
        if (high > 0.2 and len(waiting) and float(waiting.mean()) > 0.5) or moved > 0.01 * max(s.planned, 1):
            params = {"offered_qps": s.offered_qps, "share": high, "preemptions": moved,
                      "waiting": float(waiting.mean()) if len(waiting) else 0.0}  # fmt: skip
            return [reason("DIA-KV", "info", "next.kv", stage=s.stage, value=high, limit=0.2, params=params)]
    return []


def _overhead(stages: list[StageAnalysis]) -> list[Reason]:
    """Time between the client's count and the service's own: network, proxy, HTTP queue, tokenizer."""
    out = []
    for s in stages:
        law = s.little
        if law.outside_s is None or law.outside_se_s is None:
            continue
        outside = law.outside_s
        sure = outside > 3 * law.outside_se_s  # 0.1 % by chance; a page is read once a second
        if sure and law.residence_mean_s and outside > max(0.02, 0.1 * law.residence_mean_s):
            params = {"outside_ms": outside * 1e3, "offered_qps": s.offered_qps,
                      "ratio": outside / law.residence_mean_s}  # fmt: skip
            out.append(reason("DIA-OUTSIDE", "info", "next.outside", stage=s.stage, value=outside,
                              limit=0.1 * law.residence_mean_s, params=params))  # fmt: skip
    return out[-1:]
