"""Plain sentences about causes, each with its evidence and the next experiment.

Input: stage analyses, errors, server samples, the rows. Output: `Reason`s with ids DIA-xxx.
Does not: change a verdict, or guess where the data are silent.
"""
from __future__ import annotations

import math

import numpy as np

from analysis.attainment import Slo
from analysis.load import OK
from analysis.row_checks import Checked
from analysis.run_files import ServerGauge
from analysis.stimulus import IDLE_CPU, QUIET_MACHINE
from bench.records.analysis import ErrorGroup, Reason, StageAnalysis


def diagnose(
    stages: list[StageAnalysis], slo: Slo, errors: list[ErrorGroup], server: ServerGauge | None, checked: Checked
) -> list[Reason]:
    """All findings, the run's first."""
    measured = [s for s in stages if s.planned]
    out: list[Reason] = []
    for case in (_floor, _clause, _rejects, _client, _contradiction):
        out.extend(case(measured, slo))
    out.extend(_buffering(measured))
    out.extend(_falling_throughput(measured))
    out.extend(_prefill(measured, checked))
    out.extend(_churn(measured, checked))
    out.extend(_kv(measured, server))
    out.extend(_overhead(measured))
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
    for metric, deadline, word in (("ttft_s", slo.ttft_deadline_s, "TTFT"), ("tpot_s", slo.tpot_deadline_s, "TPOT")):
        p50 = low.survivors[metric].p50
        if p50 is not None and math.isfinite(p50) and p50 > deadline:
            text = (
                f"the {word} deadline of {deadline * 1e3:.0f} ms lies under the idle floor: at "
                f"{low.offered_qps:g} requests/s "
                f"half of the answers already take {p50 * 1e3:.0f} ms, so attainment cannot be high at any rate"
            )
            fix = "run the smoke shape (2 requests/s), take its p99 as the floor and set the deadline above it"
            out.append(Reason("DIA-FLOOR", "info", text, fix, low.stage, p50, deadline))
    return out


def _clause(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Attainment is low though the latency that people look at seems normal: one sentence per clause, all its rates."""
    found: dict[str, list[tuple[StageAnalysis, str, str]]] = {}
    for s in stages:
        joint, p50 = s.attainment_joint.value, s.survivors["e2e_s"].p50
        if joint is None or joint >= slo.attainment_target or s.stationarity == "UNSTABLE" or p50 is None:
            continue
        if p50 > slo.e2e_target_s:
            continue
        words = {
            "failures": (f"{s.planned - s.counts.get('ok', 0)} of {s.planned}",
                         "arrivals failed or were refused, and stay in the denominator"),
            "ttft": (f"{s.attainment_ttft.value or 0:.2%}", "of all arrivals have their first token in time (TTFT)"),
            "tpot": (f"{s.attainment_tpot.value or 0:.2%}", "of all arrivals keep the token pace (TPOT)"),
        }.get(s.binding_clause)  # fmt: skip
        if words is not None:
            found.setdefault(s.binding_clause, []).append((s, *words))
    out = []
    for clause, hits in found.items():
        stages_said = ", ".join(
            f"{s.attainment_joint.value or 0:.2%} at {s.offered_qps:g} requests/s (median answer "
            f"{s.survivors['e2e_s'].p50 or 0:.2f} s)" for s, _, _ in hits
        )  # fmt: skip
        only = "" if clause == "failures" else "only "
        text = (
            f"attainment is low though the median answer looks normal: {stages_said}; the cause is that {only}"
            f"{', '.join(share for _, share, _ in hits)} {hits[0][2]}"
        )
        fix = "read attainment per clause; do not compare a median with an SLO on all arrivals"
        first = hits[0][0]
        out.append(Reason("DIA-CLAUSE", "info", text, fix, first.stage, first.attainment_joint.value,
                          slo.attainment_target))  # fmt: skip
    return out


def _rejects(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Rejections keep the survivors fast: one sentence for all rates."""
    said, first = [], None
    for s in stages:
        share = s.counts.get("rejected", 0) / s.planned
        alive, joint = s.attainment_survivors, s.attainment_joint.value
        if share > 0.005 and alive is not None and joint is not None and alive - joint > 0.005:
            said.append(
                f"at {s.offered_qps:g} requests/s {share:.1%} of the arrivals were refused; {alive:.2%} of the "
                f"answered meet the SLO, {joint:.2%} of all arrivals do"
            )
            first = first or (s.stage, share, joint)
    if first is None:
        return []
    fix = "compare with admission off at the same seed; count what clients do after a refusal (retry-after)"
    return [Reason("DIA-REJECTS", "info", "rejections bought the latency: " + "; ".join(said), fix, *first)]


def _client(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """Our own client was late: names the stages, and says whether it was the client's doing."""
    bad = [s for s in stages if any(r.reason_id in ("INV-LAG", "INV-CPU", "INV-LOOP", "INV-CAP") for r in s.reasons)]
    if not bad:
        return []
    cpus = [s.stimulus.client_cpu_max_ratio for s in bad if s.stimulus.client_cpu_max_ratio is not None]
    cpu = max(cpus) if cpus else None
    lag = max((s.stimulus.send_lag_p99_s or 0.0) for s in bad)
    names = ", ".join(s.name for s in bad)
    used = f", worker CPU {cpu:.0%}" if cpu is not None else ""
    if cpu is not None and cpu < IDLE_CPU:
        text = f"something else held the machine during {names}: send lag p99 up to {1e3 * lag:.1f} ms{used} of a core"
        fix = QUIET_MACHINE
    else:
        text = f"the client limits these stages: {names}; send lag p99 up to {1e3 * lag:.1f} ms{used}"
        fix = "double the workers at the same seed: if the latencies fall, it was the client"
    return [Reason("DIA-CLIENT", "info", text, fix, bad[0].stage, lag, None)]


def _contradiction(stages: list[StageAnalysis], slo: Slo) -> list[Reason]:
    """The P95 target is missed by answers that meet both token deadlines: the targets contradict each other."""
    low = _lowest(stages)
    if low is None or low.attainment_joint.value is None or low.attainment_e2e.value is None:
        return []
    if low.attainment_joint.value < slo.attainment_target or low.attainment_e2e.value >= 0.95:
        return []
    p95 = low.latency["e2e_s"].p95
    text = (
        f"even at {low.offered_qps:g} requests/s, where {low.attainment_joint.value:.2%} meet the TTFT and TPOT "
        "deadlines, only "
        f"{low.attainment_e2e.value:.2%} end within {slo.e2e_target_s:g} s"
    )
    text += f" (P95 is {p95:.2f} s)" if p95 is not None and math.isfinite(p95) else ""
    fix = (
        "the answers are too long for this P95 target: P95 length x TPOT must fit in it; change the target or "
        "the lengths"
    )
    return [Reason("DIA-TARGETS", "info", text, fix, low.stage, low.attainment_e2e.value, 0.95)]


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
            text = (
                f"TTFT is {ttft / e2e:.0%} of the whole answer at {s.offered_qps:g} requests/s and {burst:.0%} "
                "of the streams "
                "arrive in bursts: a proxy or the service buffers the stream"
            )
            fix = "send one request around the proxy with `bench probe`, or switch off its response buffering"
            out.append(Reason("DIA-BUFFER", "info", text, fix, s.stage, ttft / e2e, 0.9))
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
    text = (
        f"throughput falls from {best.completed_qps:.2f} to {s.completed_qps:.2f} requests/s while in-flight "
        "rises from "
        f"{best.little.in_flight_mean_integral or 0:.0f} to {s.little.in_flight_mean_integral or 0:.0f}: the "
        "batch is past its useful size"
    )
    fix = (
        "sweep max_num_seqs (for example 8, 16, 32) at this rate, plot throughput against it and set the cap "
        "where the gain ends"
    )
    return [Reason("DIA-BATCH", "info", text, fix, s.stage, s.completed_qps, best.completed_qps)]


def _prefill(stages: list[StageAnalysis], checked: Checked) -> list[Reason]:
    """TTFT follows the prompt length: prefill, not waiting, is the cost."""
    low = _lowest(stages)
    if low is None or low.window_start_s is None or low.window_end_s is None:
        return []
    c = checked.ledger.columns
    rows = (c["stage"] == low.stage) & (checked.status == OK) & np.isfinite(c["ttft_s"])
    tokens = np.where(np.isfinite(c["prompt_tokens"]), c["prompt_tokens"], c["input_tokens"])[rows].astype(float)
    ttft, e2e = c["ttft_s"][rows], c["e2e_s"][rows]
    known = np.isfinite(tokens) & np.isfinite(e2e)
    if known.sum() < 50 or tokens[known].std() == 0:
        return []
    r = float(np.corrcoef(tokens[known], ttft[known])[0, 1])
    share = float(np.median(ttft[known] / np.maximum(e2e[known], 1e-9)))
    if not (r > 0.7 and share > 0.3):
        return []
    slope = float(np.polyfit(tokens[known], ttft[known], 1)[0])
    text = (
        f"prefill dominates: at {low.offered_qps:g} requests/s TTFT is {share:.0%} of an answer and follows the "
        "prompt length "
        f"(correlation {r:.2f}, {slope * 1e6:.1f} µs per prompt token)"
    )
    fix = "repeat the stage with half the prompt length; try prefix caching or a larger max_num_batched_tokens"
    return [Reason("DIA-PREFILL", "info", text, fix, low.stage, r, 0.7)]


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
    text = (
        f"{share:.0%} of {total} requests opened a new connection (median {median * 1e3:.1f} ms each): "
        "keep-alive does not work"
    )
    fix = "check the service's keep-alive timeout and `Connection: close`; compare TTFT of new and reused connections"
    return [Reason("DIA-CHURN", "info", text, fix, None, share, 0.8)]


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
            text = (
                f"KV memory binds at {s.offered_qps:g} requests/s: above 95 % in {high:.0%} of the samples, "
                f"{float(waiting.mean()) if len(waiting) else 0:.1f} waiting on average, {moved:.0f} preemptions"
            )
            fix = (
                "lower kv_reserve_ratio or max_model_len, or halve the output lengths at the same seed: the "
                "knee should move"
            )
            return [Reason("DIA-KV", "info", text, fix, s.stage, high, 0.2)]
    return []


def _overhead(stages: list[StageAnalysis]) -> list[Reason]:
    """Time between the client's count and the service's own: network, proxy, HTTP queue, tokenizer."""
    out = []
    for s in stages:
        law = s.little
        if law.in_flight_mean_server is None or not law.arrival_qps or law.in_flight_mean_integral is None:
            continue
        outside = (law.in_flight_mean_integral - law.in_flight_mean_server) / law.arrival_qps
        if law.residence_mean_s and outside > max(0.02, 0.1 * law.residence_mean_s):
            text = (
                f"{outside * 1e3:.0f} ms of each request at {s.offered_qps:g} requests/s pass outside the engine "
                f"({outside / law.residence_mean_s:.0%} of its residence): HTTP queue, tokenizer, proxy or network"
            )
            fix = (
                "compare with a request from the service's own machine; look at the scheduler's step overhead "
                "at this batch size"
            )
            out.append(Reason("DIA-OUTSIDE", "info", text, fix, s.stage, outside, 0.1 * law.residence_mean_s))
    return out[-1:]
