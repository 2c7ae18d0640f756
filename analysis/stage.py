"""Everything said about one stage, put together from the pure pieces.

Input: the checked ledger, one stage row, gauge and server samples, the SLO.
Output: `StageResult` = the public `StageAnalysis` plus what the knee needs.
Does not: look at other stages, or read files.

1. Statistics are over arrivals planned in the window, followed to their end.
2. `completed_qps` counts ok answers that ended inside the window, whoever planned
   them: in overload it is the capacity, where the arrivals' own share is not.
3. Anything not ok is `inf` in ttft, tpot and e2e; a one-token answer has no TPOT.
   An answer of many tokens without a TPOT meets no TPOT clause.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from analysis import attainment as att
from analysis.gates import E2E_SHARE
from analysis.intervals import (
    independent_states,
    inflation_ceiling,
    mser5,
    quantile_interval,
    split,
    variance_inflation,
)
from analysis.knee import score_quantile
from analysis.late_sends import held_reads, late_arrivals, late_reason
from analysis.little import in_flight_at, little
from analysis.load import OK, TIMEOUT, UNSENT, Ledger
from analysis.percentiles import ecdf_points, nearest_rank, summarise
from analysis.reasons import causes_first, known_cause, reason
from analysis.repeated_prompts import repeated_share
from analysis.row_checks import Checked, fewer_events, streamed_tokens, uncounted_tokens, unmeasured_tpot
from analysis.run_files import Gauge, ServerGauge
from analysis.stationarity import Stationarity, stationarity
from analysis.stimulus import client_health, stimulus
from bench.records.analysis import Little, Percentiles, Reason, StageAnalysis
from bench.records.clauses import lag_limit_s
from bench.records.request import FLAGS, MANY_TOKENS, STATUSES
from bench.records.sentences import said
from bench.records.stage import StageRow, drain_time_s

SCORE_BATCHES = 5
STATE_SAMPLES = 600  # of in-flight over the window, to see how long the stage remembers
BURST_LIMIT = 0.05
# Codes of a connection that is not made, or breaks; so many of them at the end of a window are a service that is away.
GONE_CODES = ("CH-REFUSED", "CH-UNREACHABLE", "CH-DNS", "CH-RESET", "CH-CLOSED", "CH-CUT", "CH-TO-CONNECT", "CH-502")
GONE_MIN = 5
PROMPT_MIN = 5  # promptly read streams before most of them speak for all
SHORT_LIMIT = 0.01
# An answer of so many tokens in so few events has no TPOT worth its name; five events are where `burst` begins to look.
FEW_TOKENS, FEW_EVENTS = MANY_TOKENS, 4
TOKENS_PER_EVENT = 4.0
CUT_OFF_CODES = ("CL-DRAIN", "CL-CANCEL", "CL-STOP")  # our waiting ended, not the answer
LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "residence_s", "send_lag_s", "ttfo_s", "itl_p99_s")


@dataclass(frozen=True)
class Context:
    """What all stages share."""

    slo: att.Slo
    class_deadlines: dict[str, tuple[float, float]]  # class -> (ttft_s, tpot_s)
    gauge: Gauge | None
    server: ServerGauge | None
    batch: float | None  # sequences the service runs at once, all replicas; None = unknown
    burstiness: float
    varying: bool  # the shape changes its rate within a stage
    loop: str
    prompts_file: str = ""  # the user's own prompts
    own_machine: bool = False  # the service is the embedded engine, on the client's machine
    ceiling_qps: float | None = None  # highest rate of the client against the null server, when it was calibrated


@dataclass(frozen=True)
class Score:
    """A quantile of an SLO score over all arrivals, and per batch; inf = too many failures."""

    value: float
    batches: tuple[float, ...]


@dataclass
class StageResult:
    """The public analysis of a stage and the parts used across stages."""

    public: StageAnalysis
    joint: Score  # max(TTFT/deadline, TPOT/deadline) at the attainment target
    e2e: Score  # whole answer / its target at 95 %
    load_sd_ratio: float  # relative sd of the work that happened to arrive
    hit_count: int
    states: float
    steady: Stationarity
    rows: np.ndarray  # indices of the window's rows in the ledger
    e2e_hits: int
    joint_worth: float  # independent arrivals that the window is worth at least, for the joint SLO
    e2e_worth: float  # the same for the whole answer
    joint_inflation: float  # of the variance of the share that meets the SLO, against independent arrivals
    e2e_inflation: float  # the same for the whole answer
    window_scores: np.ndarray  # SLO score of each arrival of the window, in order; inf = failed


def analyse_stage(checked: Checked, row: StageRow, context: Context) -> StageResult:
    """The analysis of the stage that `row` describes."""
    ledger = checked.ledger
    mine = np.flatnonzero((ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat))
    t0, t1 = row.window_start_s, row.window_end_s
    intended = ledger["intended_s"][mine]
    order = np.argsort(intended, kind="stable")
    mine, intended = mine[order], intended[order]
    window = mine[(intended >= t0) & (intended < t1)]
    values = {name: ledger[name][window].astype(np.float64) for name in LATENCIES}
    status = checked.status[window]
    sound = ~checked.impossible[window]
    has_times = np.isfinite(values["ttft_s"]) & np.isfinite(values["residence_s"])
    ok = (status == OK) & sound & has_times
    no_tpot = unmeasured_tpot(ledger, window)
    found, deadlines = _hits(checked, window, values, ok, no_tpot, context)
    near = _near(ledger.columns, checked.impossible, t0, t1)
    flow = stationarity(*near[:2], t0, t1, batch=context.batch)
    law = little(
        sent_s=near[0], done_s=near[1], worker=near[2], t0=t0, t1=t1, gauge=context.gauge, server=context.server
    )
    if law.lambda_w and law.in_flight_mean_integral is not None:
        flow = stationarity(*near[:2], t0, t1, batch=context.batch,
                            little_residual=law.in_flight_mean_integral / law.lambda_w - 1)  # fmt: skip
    grid = np.linspace(t0, t1, STATE_SAMPLES, endpoint=False)
    states = independent_states(in_flight_at(grid, near[0], near[1]))
    by_events = _by_events(ledger, window, found, values, deadlines[1], no_tpot)
    public = _public(checked, row, context, mine, window, values, status, ok, found, deadlines[0], flow, law, states,
                     by_events)  # fmt: skip
    score = np.where(ok & ~no_tpot, np.fmax(values["ttft_s"] / deadlines[0], values["tpot_s"] / deadlines[1]), np.inf)
    return StageResult(
        public=public,
        joint=_score(score, context.slo.attainment_target),
        e2e=_score(np.where(ok, values["e2e_s"] / context.slo.e2e_target_s, np.inf), 0.95),
        load_sd_ratio=_load_sd(public, ledger["output_tokens"][window][ok]),
        hit_count=int(np.count_nonzero(found.joint)),
        states=states,
        steady=flow,
        rows=window,
        e2e_hits=int(np.count_nonzero(found.e2e)),
        joint_worth=len(window) / inflation_ceiling(found.joint),
        e2e_worth=len(window) / inflation_ceiling(found.e2e),
        joint_inflation=variance_inflation(found.joint),
        e2e_inflation=variance_inflation(found.e2e),
        window_scores=np.where(found.joint, np.minimum(score, 1.0), np.maximum(score, np.nextafter(1.0, 2.0))),
    )


def _score(score: np.ndarray, share: float) -> Score:
    if not len(score):
        return Score(math.nan, ())
    parts = split(score, SCORE_BATCHES) if len(score) >= SCORE_BATCHES * 10 else []
    return Score(score_quantile(score, share), tuple(score_quantile(p, share) for p in parts))


def _load_sd(public: StageAnalysis, tokens: np.ndarray) -> float:
    """sqrt((ca² + cs²)/n): how far the work of a stage lies from its asked rate by chance."""
    if public.planned == 0:
        return 0.0
    known = tokens[np.isfinite(tokens)].astype(np.float64)
    scv = float(known.var() / known.mean() ** 2) if len(known) > 1 and known.mean() > 0 else 0.0
    gap_cv = public.stimulus.gap_cv or 0.0
    return math.sqrt((gap_cv**2 + scv) / public.planned)


def _near(c: dict[str, np.ndarray], impossible: np.ndarray, t0: float, t1: float) -> tuple[np.ndarray, ...]:
    """Sent, done and worker of every request that was in flight around the window."""
    sent, done = c["sent_s"], c["done_s"]
    with np.errstate(invalid="ignore"):
        keep = (sent < t1 + 1) & (done > t0 - 1) & ~impossible
    return sent[keep], done[keep], c["worker"][keep]


def _hits(
    checked: Checked, window: np.ndarray, values: dict[str, np.ndarray], ok: np.ndarray, no_tpot: np.ndarray,
    context: Context,
) -> tuple[att.Hits, tuple[np.ndarray, np.ndarray]]:
    ledger, slo = checked.ledger, context.slo
    ttft_deadline = np.full(len(window), slo.ttft_deadline_s)
    tpot_deadline = np.full(len(window), slo.tpot_deadline_s)
    for name, (ttft, tpot) in context.class_deadlines.items():
        if name in ledger.names["request_class"]:
            rows = ledger.codes["request_class"][window] == ledger.names["request_class"].index(name)
            ttft_deadline[rows], tpot_deadline[rows] = ttft, tpot
    status = checked.status[window]
    code_names = ledger.names["code"]
    cut = [i for i, name in enumerate(code_names) if name in CUT_OFF_CODES]
    cut_off = np.isin(ledger.codes["code"][window], cut) & (status != UNSENT) & (status != OK)
    age = ledger["done_s"][window] - ledger["intended_s"][window]
    found = att.hits(
        ok=ok, ttft_s=values["ttft_s"], tpot_s=values["tpot_s"], e2e_s=values["e2e_s"],
        ttft_deadline_s=ttft_deadline, tpot_deadline_s=tpot_deadline, e2e_target_s=slo.e2e_target_s,
        unsent=status == UNSENT, cut_off=cut_off, age_s=age,
        no_tpot=no_tpot,
    )  # fmt: skip
    return found, (ttft_deadline, tpot_deadline)


def _latency(
    values: dict[str, np.ndarray], ok: np.ndarray, states: float
) -> tuple[dict[str, Percentiles], dict[str, Percentiles]]:
    """Percentiles over all arrivals, and over the answered ones only."""
    everyone, survivors = {}, {}
    for name in LATENCIES:
        x = values[name]
        if name in ("ttft_s", "e2e_s"):
            x = np.where(ok, x, np.inf)
        elif name == "tpot_s" or (name == "ttfo_s" and np.isfinite(x).any()):
            x = np.where(ok, x, np.inf)  # NaN stays: one-token answers, answers without content
        elif name == "itl_p99_s":
            x = np.where(ok, x, np.nan)  # a sample: only promptly read streams have it
        everyone[name] = _with_interval(x, states)
        survivors[name] = summarise(values[name][ok])
    return everyone, survivors


def _with_interval(x: np.ndarray, states: float) -> Percentiles:
    x = x[~np.isnan(x)]
    interval = quantile_interval(x, states=states)
    if interval is None:
        return summarise(x)
    p = summarise(x, effective_n=interval.effective_n, effective_n_high=interval.effective_n_high)
    if p.p95 is not None:
        p.p95_low, p.p95_high = interval.low, interval.high
        p.interval_method, p.interval_reliable = interval.method, interval.reliable
    return p


def _tried_s(checked: Checked, rows: np.ndarray) -> np.ndarray:
    """When each of the rows was tried; NaN = never.

    An attempt that found no connection was due and made: not the sender's fault. What our own fault (CL-BUG) kept from
    being sent counts as unsent (`row_checks.py`).
    """
    sent_s = checked.ledger["sent_s"][rows]
    attempted = np.isnan(sent_s) & (checked.status[rows] != UNSENT)
    return np.where(attempted, checked.ledger["intended_s"][rows], sent_s)


def _public(
    checked: Checked, row: StageRow, context: Context, mine: np.ndarray, window: np.ndarray,
    values: dict[str, np.ndarray], status: np.ndarray, ok: np.ndarray, found: att.Hits, ttft_deadline_s: np.ndarray,
    flow: Stationarity, law: Little, states: float, by_events: float | None,
) -> StageAnalysis:  # fmt: skip
    ledger, slo = checked.ledger, context.slo
    t0, t1 = row.window_start_s, row.window_end_s
    window_s = max(t1 - t0, 0.0)
    n = len(window)
    everyone, survivors = _latency(values, ok, states)
    done = ledger["done_s"][mine]
    with np.errstate(invalid="ignore"):
        ended = mine[(checked.status[mine] == OK) & (done >= t0) & (done < t1)]
        sent = _tried_s(checked, mine)
        sent_in_window = int(np.count_nonzero((sent >= t0) & (sent < t1)))
    tried_s = _tried_s(checked, window)
    tokens = ledger["output_tokens"][ended]
    joint = att.share_interval(found.joint)
    kernel = ledger.is_value("clock", "kernel")[window]
    answered = int(np.count_nonzero(ok))
    health = client_health(context.gauge, t0, t1, float(kernel[ok].mean()) if answered else None)
    varying = context.varying or _rate_varies(ledger["offered_qps"][mine])
    stimulated, reasons = stimulus(
        intended_s=ledger["intended_s"][window], sent_s=tried_s, t0=t0, t1=t1, process=row.process,
        offered_qps=row.offered_qps, burstiness=context.burstiness, varying_rate=varying, health=health,
        ttft_deadline_s=slo.ttft_deadline_s, stage=row.stage, sent_in_window=sent_in_window,
        own_machine=context.own_machine,
    )  # fmt: skip
    causes = _own_faults(checked, row, context)
    if "prompts_differ" in row.marks.split(";"):  # a worker refused to send: no more of them would send more
        reasons = [r for r in reasons if r.reason_id != "INV-RATE"]
    reasons = causes + reasons
    if flow.verdict != "UNSTABLE" and not any(r.reason_id == "INV-LAG" for r in reasons):
        late = _late(ledger, context, window, status, tried_s, kernel, ttft_deadline_s)
        reasons += _late_reasons(late, found, row.stage, context, health.cpu_max_ratio)
    public = StageAnalysis(
        stage=row.stage, repeat=row.repeat, name=row.name, offered_qps=row.offered_qps, process=row.process,
        window_s=window_s, planned=n,
        counts={name: int(np.count_nonzero(status == i)) for i, name in enumerate(STATUSES)},
        arrival_qps=n / window_s if window_s else 0.0,
        completed_qps=len(ended) / window_s if window_s else 0.0,
        goodput_qps=int(np.count_nonzero(found.joint)) / window_s if window_s else 0.0,
        output_tps=float(np.nansum(tokens)) / window_s if window_s else 0.0,
        latency=everyone, survivors=survivors,
        attainment_ttft=att.share_interval(found.ttft), attainment_tpot=att.share_interval(found.tpot),
        attainment_joint=joint, attainment_e2e=att.share_interval(found.e2e),
        attainment_low=joint.value or 0.0,
        attainment_high=(int(np.count_nonzero(found.joint | found.unknown)) / n) if n else 1.0,
        attainment_survivors=float(found.joint[ok].mean()) if answered else None,
        binding_clause=att.binding_clause(found, ok), verdict="EMPTY", stationarity=flow.verdict,
        in_flight_growth_qps=flow.growth_qps if flow.verdict in ("UNSTABLE", "SUSPECT") else None,
        little=law, stimulus=stimulated, reasons=reasons,
        flags=_flags(checked, window, answered), marks=[m for m in row.marks.split(";") if m],
        ecdf_ttft=ecdf_points(np.where(ok, values["ttft_s"], np.inf)),
        ecdf_tpot=ecdf_points(np.where(ok, values["tpot_s"], np.inf)),
        drain_s=None if row.drained_s is None else drain_time_s(row.drained_s, row.end_s),
        start_s=row.start_s, window_start_s=t0, window_end_s=t1, warmup_applied_s=t0 - row.start_s,
    )  # fmt: skip
    if varying and "ramp" not in public.marks:
        public.marks.append("ramp")
    _warm_up(public, checked, row, context)
    _finish(public, checked, window, flow, context, varying, by_events)
    return public


def _own_faults(checked: Checked, row: StageRow, context: Context) -> list[Reason]:
    """Faults of our own side that kept arrivals from being sent, or sent other ones: the first cause of all others."""
    ledger, marks = checked.ledger, row.marks.split(";")
    out = []
    for mark in ("prompts_changed", "prompts_differ"):
        if mark in marks:
            out.append(reason(f"INV-PROMPTS.{mark}", "invalid", "next.prompts_file", stage=row.stage,
                              params={"file": context.prompts_file or "loadgen.prompts_file"}))  # fmt: skip
    mine = (ledger["stage"] == row.stage) & (ledger["repeat"] == row.repeat)
    count = int(np.count_nonzero(ledger.is_value("code", "CL-BUG") & mine))
    if count and "prompts_changed" not in marks:
        out.append(reason("INV-FAULT", "invalid", "next.fault", stage=row.stage, value=count, limit=0,
                          params={"count": count}))  # fmt: skip
    return out


def _late(
    ledger: Ledger, context: Context, window: np.ndarray, status: np.ndarray, tried_s: np.ndarray, kernel: np.ndarray,
    ttft_deadline_s: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Arrivals of the window that our own client was late for."""
    c = ledger.columns
    stamps = (c["first_token_s"][window], c["last_token_s"][window])
    held = held_reads(context.gauge, c["worker"][window], stamps, ~kernel, lag_limit_s(context.slo.ttft_deadline_s))
    return late_arrivals(intended_s=c["intended_s"][window], sent_s=tried_s, unsent=status == UNSENT,
                         ttft_deadline_s=ttft_deadline_s, held=held)  # fmt: skip


def _late_reasons(
    late: np.ndarray, found: att.Hits, stage: int, context: Context, cpu_ratio: float | None
) -> list[Reason]:
    """The first of the SLO's two shares that our own lateness decides, as a reason."""
    limit_s = lag_limit_s(context.slo.ttft_deadline_s)
    for hit, target, label in (
        (found.joint, context.slo.attainment_target, said("gate.label", metric="attainment")),
        (found.e2e, E2E_SHARE, said("gate.label.share")),
    ):
        decided = late_reason(late, hit, target, label, stage=stage, limit_s=limit_s, cpu_ratio=cpu_ratio,
                              own_machine=context.own_machine)  # fmt: skip
        if decided is not None:
            return [decided]
    return []


def _rate_varies(offered: np.ndarray) -> bool:
    known = offered[np.isfinite(offered)]
    return len(known) > 1 and float(known.max() - known.min()) > 1e-3 * float(known.max())


def _flags(checked: Checked, window: np.ndarray, answered: int) -> dict[str, float]:
    """Share of answers that carry each flag; flags nobody carries are left out."""
    if not answered:
        return {}
    shares = {}
    for flag in FLAGS:
        count = int(np.count_nonzero(checked.ledger.has_flag(flag)[window] & (checked.status[window] == OK)))
        if count:
            shares[flag] = count / answered
    return shares


def _warm_up(public: StageAnalysis, checked: Checked, row: StageRow, context: Context) -> None:
    """Suggested warm-up = max(10 median residences, MSER-5 on in-flight), seconds; None when MSER never settles."""
    c = checked.ledger.columns
    sent, done, _ = _near(c, checked.impossible, row.start_s, row.window_end_s)
    span = row.window_end_s - row.start_s
    if not len(sent) or span < 4:
        return
    step = max(0.2, span / 400)
    t = np.arange(row.start_s, row.window_end_s, step)
    cut = mser5(in_flight_at(t, sent, done).astype(float))
    if cut is None:
        if public.stationarity == "STABLE":
            public.reasons.append(reason("WARN-WARMUP.never", "warn", "next.longer_stages", stage=row.stage))
        return
    median = public.latency["residence_s"].p50
    public.warmup_suggested_s = max(cut * step, 10 * median if median is not None and math.isfinite(median) else 0.0)
    used = row.window_start_s - row.start_s
    if cut * step > used + 0.1 * span and public.stationarity == "STABLE":
        public.reasons.append(reason(
            "WARN-WARMUP", "warn", "next.warmup", stage=row.stage, value=cut * step, limit=used,
            params={"settles_s": cut * step, "used_s": used}, step_params={"seconds": cut * step},
        ))  # fmt: skip


def _finish(
    s: StageAnalysis, checked: Checked, window: np.ndarray, flow: Stationarity, context: Context, varying: bool,
    by_events: float | None,
) -> None:
    """Reasons that need the whole stage, and the stage's verdict."""
    stage = s.stage
    s.reasons.extend(_recording_reasons(s, checked, window, by_events, context.slo.attainment_target))
    note = {"note": {"code": s.little.code, "params": s.little.params}}
    if s.little.identity_residual is not None and s.little.ok is False:
        s.reasons.append(reason("INV-LITTLE", "invalid", "next.little", stage=stage, value=s.little.gap_ratio_gauge,
                                limit=0.02, params=note))  # fmt: skip
    elif context.gauge is not None and len(context.gauge) and s.little.ok is None and s.planned:
        s.reasons.append(reason("WARN-GAUGE", "warn", "next.gauge", stage=stage, params=note))
    if flow.verdict == "UNSTABLE" and not varying:
        s.reasons.append(_unstable_reason(s, flow))
    elif flow.verdict == "SUSPECT" and not varying:
        p = min(flow.trend_p or 1, flow.slope_p or 1)
        s.reasons.append(reason("WARN-SUSPECT", "warn", "next.repeat_longer", stage=stage, params={"p": p}))
    elif flow.verdict == "TOO_SHORT" and s.planned:
        need = said("short.seconds", needed_s=flow.needed_s) if flow.needed_s else said("short.arrivals")
        s.reasons.append(reason("WARN-SHORT", "warn", "next.stage_duration", stage=stage, value=s.window_s,
                                limit=flow.needed_s, params={"window_s": s.window_s, "need": need}))  # fmt: skip
    if context.ceiling_qps is not None and s.offered_qps > context.ceiling_qps:
        rates = {"offered_qps": s.offered_qps, "ceiling_qps": context.ceiling_qps}
        s.reasons.append(reason("INV-CEILING", "invalid", "next.ceiling", stage=stage, value=s.offered_qps,
                                limit=context.ceiling_qps, params=rates))  # fmt: skip
    _sample_reasons(s, context)
    s.reasons[:] = known_cause(causes_first(s.reasons))
    invalid = any(r.severity == "invalid" for r in s.reasons)
    if s.planned == 0 or "not_run" in s.marks:
        # Nothing was measured: nothing passed a check either, and nothing was steady.
        s.verdict, s.stationarity, s.stimulus.ok, s.little.ok = "EMPTY", "TOO_SHORT", None, None
    elif invalid:
        s.verdict = "INVALID"
    elif flow.verdict == "UNSTABLE" and not varying:
        s.verdict = "NOT_MET"
    else:
        s.verdict = att.decide(s.attainment_joint, context.slo.attainment_target)


def _unstable_reason(s: StageAnalysis, flow: Stationarity) -> Reason:
    left = said("unstable.left", share=flow.flow_imbalance) if flow.flow_imbalance else said("unstable.grows")
    growth = said("")
    if s.completed_qps > 0 and s.arrival_qps > s.completed_qps:
        # p95 of an overloaded stage = (lambda/X - 1) * .95 * duration: a function of its length.
        growth = said("unstable.growth", per_minute_s=60 * (s.arrival_qps / s.completed_qps - 1))
    params = {"left": left, "completed_qps": s.completed_qps, "arrival_qps": s.arrival_qps, "growth": growth}
    return reason("UNSTABLE", "info", "next.unstable", stage=s.stage, value=flow.flow_imbalance, limit=0.03,
                  params=params)  # fmt: skip


def _recording_reasons(
    s: StageAnalysis, checked: Checked, window: np.ndarray, by_events: float | None, target: float
) -> list[Reason]:
    ledger, stage = checked.ledger, s.stage
    out = []
    cap = int(np.count_nonzero((ledger.is_value("code", "CL-CAP") | ledger.is_value("code", "CL-FD"))[window]))
    if cap:
        out.append(reason("INV-CAP", "invalid", "next.cap", stage=stage, value=cap, limit=0, params={"count": cap}))
    given_up = int(np.count_nonzero(ledger.is_value("code", "CL-CANCEL")[window]))
    if given_up:  # a stop ended them, not the service; those that had ended by then were the quick ones
        out.append(reason("INV-CANCEL", "invalid", "next.drain", stage=stage, value=given_up, limit=0,
                          params={"count": given_up, "planned": s.planned}))  # fmt: skip
    lost = int(np.count_nonzero(ledger.is_value("code", "CL-LOST")[window]))
    gone = [mark for mark in ("worker_lost", "worker_joined", "master_lost") if mark in s.marks]
    for mark in gone:
        out.append(reason(f"INV-WORKER.{mark}", "invalid", "next.fixed_workers", stage=stage))
    if lost and gone in ([], ["worker_joined"]):  # a worker that slept or was cut off for a while; a part that is away
        out.append(reason("INV-WORKER.lost_arrivals", "invalid", "next.fixed_workers", stage=stage, value=lost, limit=0,
                          params={"count": lost, "planned": s.planned}))  # fmt: skip
    for mark in ("schedule_differs", "not_prepared"):
        if mark in s.marks and not (mark == "not_prepared" and "prompts_differ" in s.marks):
            out.append(reason(f"INV-PLAN.{mark}", "invalid", "next.same_version", stage=stage))
    for flag, limit, code, step in (("burst", BURST_LIMIT, "INV-BURST", "next.buffering"),
                                    ("short", SHORT_LIMIT, "INV-SHORT", "next.short")):  # fmt: skip
        share = _burst_share(s, checked, window) if flag == "burst" else s.flags.get(flag, 0.0)
        if share > limit:
            out.append(reason(code, "invalid", step, stage=stage, value=share, limit=limit,
                              params={"share": share, "limit": limit}))  # fmt: skip
    counted = s.flags.get("tokens_estimated", 0.0)
    if counted > BURST_LIMIT:
        out.append(reason("WARN-USAGE", "warn", "next.stream_options", stage=stage, value=counted, limit=BURST_LIMIT,
                          params={"share": counted}))  # fmt: skip
    answers = s.flags.get("cached", 0.0)
    cached = _cached_share(checked, window) if answers else 0.0
    if cached > BURST_LIMIT:
        out.append(reason("WARN-CACHED", "info", "next.unique_prompts", stage=stage, value=cached, limit=BURST_LIMIT,
                          params={"share": cached, "answers": answers}))  # fmt: skip
    repeated = repeated_share(checked, window)
    if repeated:
        out.append(reason("WARN-PROMPTS", "warn" if repeated > BURST_LIMIT else "info", "next.prompts", stage=stage,
                          value=repeated, limit=BURST_LIMIT, params={"share": repeated}))  # fmt: skip
    other = s.flags.get("other_model", 0.0)
    if other:
        out.append(reason("WARN-MODEL", "warn", "next.model", stage=stage, value=other, limit=0.0,
                          params={"share": other}))  # fmt: skip
    if gone := _gone(checked, window):
        out.append(reason("WARN-GONE", "warn", "next.gone", stage=stage, value=gone["share"], limit=0.0, params=gone))
    out += _token_reasons(s, checked, window, by_events, target)
    steps = int(np.count_nonzero(checked.impossible[window]))
    if steps:
        out.append(reason("INV-CLOCK", "invalid", "next.clock", stage=stage, value=steps, limit=0,
                          params={"count": steps}))  # fmt: skip
    return out


def _gone(checked: Checked, window: np.ndarray) -> dict[str, float | int | str]:
    """Since when nobody got an answer any more because the connection failed; {} when somebody did to the end.

    A service that died says nothing of the rate that it could carry: its misses are no queue.
    """
    c, ledger = checked.ledger.columns, checked.ledger
    order = window[np.argsort(c["intended_s"][window], kind="stable")]
    order = order[checked.status[order] != UNSENT]
    broken = np.zeros(len(order), dtype=bool)
    for code in GONE_CODES:
        broken |= ledger.is_value("code", code)[order]
    working = np.flatnonzero(~broken)
    tail = order[int(working[-1]) + 1 :] if len(working) else order
    if len(tail) < GONE_MIN:
        return {}
    names, counts = np.unique(ledger.codes["code"][tail], return_counts=True)
    return {"since_s": float(c["intended_s"][tail[0]]), "count": len(tail), "share": len(tail) / len(order),
            "code": ledger.names["code"][int(names[np.argmax(counts)])]}  # fmt: skip


def _burst_share(s: StageAnalysis, checked: Checked, window: np.ndarray) -> float:
    """Share of the answers that came in bursts; that of the promptly read ones when most of them did.

    Gaps are kept of promptly read streams only, a sample: pieces that are let go together are seen there alone.
    """
    share, ledger = s.flags.get("burst", 0.0), checked.ledger
    prompt = window[(checked.status[window] == OK) & np.isfinite(ledger["itl_p99_s"][window])]
    seen = int(np.count_nonzero(ledger.has_flag("burst")[prompt]))
    return max(share, seen / len(prompt)) if len(prompt) >= PROMPT_MIN and 2 * seen > len(prompt) else share


def _cached_share(checked: Checked, window: np.ndarray) -> float:
    """Share of the answers' prompt tokens that the service took from its cache; an answer that names none had none.

    Tokens and not answers: a cache that works token by token finds the start of the chat template in every prompt.
    """
    c, ok = checked.ledger.columns, window[checked.status[window] == OK]
    counted, asked = c["prompt_tokens"][ok].astype(float), c["input_tokens"][ok].astype(float)
    prompt = np.nan_to_num(np.where(np.isfinite(counted), counted, asked))
    taken = np.minimum(np.nan_to_num(c["cached_tokens"][ok].astype(float)), prompt)
    return float(taken.sum() / prompt.sum()) if prompt.any() else 0.0


def _by_events(
    ledger: Ledger, window: np.ndarray, found: att.Hits, values: dict[str, np.ndarray], deadline_s: np.ndarray,
    no_tpot: np.ndarray,
) -> float | None:  # fmt: skip
    """Share of all arrivals that would meet the SLO were each event one token; None when no answer has fewer events.

    An event holds a token at least, so the true TPOT of an answer lies between the one over the service's count and
    this one.
    """
    c = ledger.columns
    chunks = c["chunks"][window].astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        fewer = (chunks >= 2) & (chunks < streamed_tokens(ledger, window))
        if not fewer.any():
            return None
        slower = (c["last_token_s"][window] - c["first_token_s"][window]) / (chunks - 1)
    tpot = att.meets_tpot(np.where(fewer, slower, values["tpot_s"]), deadline_s, no_tpot)
    return float(np.count_nonzero(found.joint & tpot)) / len(window)


def _token_reasons(
    s: StageAnalysis, checked: Checked, window: np.ndarray, by_events: float | None, target: float
) -> list[Reason]:
    """Whether the answers' tokens and events can carry a TPOT: it is (last - first) / (streamed tokens - 1)."""
    c, stage = checked.ledger.columns, s.stage
    ok = window[checked.status[window] == OK]
    answers = len(ok)
    if not answers:
        return []
    out = []
    tokens, chunks, allowed = c["output_tokens"][ok], c["chunks"][ok], c["max_tokens"][ok]
    streamed = streamed_tokens(checked.ledger, ok)
    with np.errstate(invalid="ignore", divide="ignore"):
        over = float(np.count_nonzero((allowed > 0) & (tokens > allowed))) / answers
        few = float(np.count_nonzero((streamed >= FEW_TOKENS) & (chunks >= 0) & (chunks <= FEW_EVENTS))) / answers
        each = np.sort((streamed / chunks)[(streamed > 0) & (chunks > 0)])
        several = float(np.count_nonzero(fewer_events(streamed, chunks))) / answers
    if over > SHORT_LIMIT:
        out.append(reason("INV-TOKENS", "invalid", "next.usage", stage=stage, value=over, limit=SHORT_LIMIT,
                          params={"share": over, "limit": SHORT_LIMIT}))  # fmt: skip
    if few > BURST_LIMIT:
        params = {"share": few, "limit": BURST_LIMIT, "events": FEW_EVENTS, "tokens": FEW_TOKENS}
        out.append(reason("INV-EVENTS", "invalid", "next.events", stage=stage, value=few, limit=BURST_LIMIT,
                          params=params))  # fmt: skip
    out += _unknown_length(checked, ok, stage, said_few=few > BURST_LIMIT)
    per_event = nearest_rank(each, 0.5) if len(each) else 0.0
    if per_event > TOKENS_PER_EVENT:
        out.append(reason("WARN-EVENTS", "warn", "next.events", stage=stage, value=per_event, limit=TOKENS_PER_EVENT,
                          params={"ratio": per_event}))  # fmt: skip
    elif several > BURST_LIMIT and by_events is not None and s.attainment_joint.value is not None:
        joint = s.attainment_joint.value  # `by_events` is never above it
        low, high = (nearest_rank(each, share) for share in (0.05, 0.95))
        params = {"share": several, "ratio": per_event, "low": low, "high": high, "by_events": by_events,
                  "joint": joint}  # fmt: skip
        out.append(reason("WARN-EVENTS.several", "warn" if by_events < target <= joint else "info", "next.token_count",
                          stage=stage, value=per_event, limit=1.0, params=params))  # fmt: skip
    return out


def _unknown_length(checked: Checked, ok: np.ndarray, stage: int, *, said_few: bool) -> list[Reason]:
    """Answers whose number of tokens is not known from their events, else those of many tokens without a TPOT."""
    c = checked.ledger.columns
    far = ok[uncounted_tokens(checked.ledger, ok)]
    if len(far) > BURST_LIMIT * len(ok):
        share = len(far) / len(ok)
        events, asked = (float(nearest_rank(np.sort(c[name][far]), 0.5)) for name in ("chunks", "max_tokens"))
        params = {"share": share, "limit": BURST_LIMIT, "events": events, "asked": asked}
        return [reason("INV-EVENTS.uncounted", "invalid", "next.uncounted", stage=stage, value=share, limit=BURST_LIMIT,
                       params=params)]  # fmt: skip
    share = float(np.count_nonzero(unmeasured_tpot(checked.ledger, ok))) / len(ok)
    if share <= BURST_LIMIT or said_few:
        return []
    params = {"share": share, "limit": BURST_LIMIT, "tokens": FEW_TOKENS}
    return [reason("INV-EVENTS.unmeasured", "invalid", "next.uncounted", stage=stage, value=share, limit=BURST_LIMIT,
                   params=params)]  # fmt: skip


def _sample_reasons(s: StageAnalysis, context: Context) -> None:
    """What the sample is too small for, and survivors that look better than everybody."""
    target = context.slo.attainment_target
    need = att.arrivals_needed(target)
    joint = s.attainment_joint
    if s.planned and joint.value is not None and att.decide(joint, target) == "UNDECIDED":
        step = "next.arrivals" if s.planned < need else "next.longer_stage"
        params = {"value": joint.value, "low": joint.low, "high": joint.high, "target": target}
        s.reasons.append(reason("WARN-UNDECIDED", "info", step, stage=s.stage, value=joint.value, limit=target,
                                params=params, step_params={"need": need}))  # fmt: skip
    alive = s.attainment_survivors
    if alive is not None and joint.value is not None and alive >= target > joint.value:
        count = s.counts.get("rejected", 0)
        refused = said("survivors.refused", count=count) if count else said("")
        s.reasons.append(reason("WARN-SURVIVORS", "warn", "next.denominator", stage=s.stage, value=joint.value,
                                limit=alive, params={"alive": alive, "joint": joint.value, "refused": refused}))
    open_rows = s.counts.get(STATUSES[TIMEOUT], 0)
    if s.attainment_high - s.attainment_low > 1e-9 and open_rows:
        params = {"count": open_rows, "low": s.attainment_low, "high": s.attainment_high}
        s.reasons.append(reason("WARN-OPEN", "info", "next.drain_limit", stage=s.stage, params=params))
