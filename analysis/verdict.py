"""PASS, FAIL or INVALID, with reasons that carry a number, a limit and a next step.

Input: gates, stages, problems of the ledger, the CSV check. Output: `Verdict`.
Does not: measure. A table of reasons is in docs/verdicts.md.

1. PASS: every gate of severity `fail` passed. The default gates are the SLO at
   `loadgen.target_qps`, so a sweep that goes on past the knee is no failure.
2. INVALID: the numbers that would decide are not to be trusted, or were not measured.
   A stage that is INVALID far from the target does not decide, it is only listed.
3. Exit codes: 0 PASS, 1 FAIL, 3 nothing answered and the channel is at fault,
   4 INVALID, 130 interrupted. Codes 2 and 5 belong to the callers.
4. The sentence names the rate that a number belongs to, and says when that is not the target.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.gates import SAME_RATE, amount, besides, label, locate, where
from analysis.intervals import wilson, z_quantile
from analysis.reasons import causes_first, left_out, reason, sentence
from analysis.repeatability import MAJORITY, repeated, sound, statistic_words
from bench.records.analysis import TRUST, ErrorGroup, Gate, Interval, Reason, Repeatability, StageAnalysis, Verdict
from bench.records.ledger import LOCUST_STATS
from bench.records.request import LedgerProblem
from bench.records.sentences import joined, said, text_of

EXIT = {"PASS": 0, "FAIL": 1, "CHANNEL": 3, "INVALID": 4, "INTERRUPTED": 130}
EXIT_PRIORITY = (2, 130, 3, 4, 1, 5, 0)  # when several hold, the first of these

# Problems of the files that make every number of the run doubtful.
FATAL_PROBLEMS = {
    "LED-003": "INV-ROWS", "LED-004": "INV-ROWS", "LED-005": "INV-LEDGER", "LED-006": "INV-LEDGER",
    "LED-007": "INV-LEDGER", "LED-008": "INV-ROWS", "LED-009": "INV-ROWS", "LED-011": "INV-LEDGER",
    "LED-012": "INV-LEDGER", "LED-013": "INV-LEDGER", "LED-018": "INV-SEED",
    "LED-021": "INV-LEDGER", "LED-022": "INV-STAGES", "LED-023": "INV-STAGES", "LED-024": "INV-STAGES",
    "LED-025": "INV-LEDGER", "LED-026": "INV-STAGES",
}  # fmt: skip
WITNESSES = 2  # Locust's table and the gauge; with neither, only the ledger speaks for itself
MISSED = ("<=", "<", ">=", ">")
NEXT_STEP = {"INV-ROWS": "next.rows", "INV-LEDGER": "next.ledger", "INV-SEED": "next.seed",
             "INV-STAGES": "next.stages"}  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """Everything the verdict is made from."""

    gates: list[Gate]
    stages: list[StageAnalysis]
    problems: list[LedgerProblem]
    csv_check: dict
    errors: list[ErrorGroup]
    target_qps: float | None
    interrupted: bool
    at: str = "target"  # "run" when the load has no single rate
    clock_bound_s: float | None = None
    clock_limit_s: float = 0.005
    target_of_config: float | None = None  # when the run was judged at its own rate instead
    stopped_by: str = ""  # the abort gate that ended the run early
    unfinished: bool = False  # the master never wrote the end of its run
    repeats: Sequence[Repeatability] = ()
    missing: tuple[str, ...] = ()  # independent records that the run should have and has not


def exit_code(codes: Iterable[int]) -> int:
    """The one exit code of several that hold."""
    held = set(codes)
    return next((c for c in EXIT_PRIORITY if c in held), 0)


def run_reasons(facts: Facts) -> list[Reason]:
    """Reasons that concern the whole run."""
    out: list[Reason] = []
    if facts.unfinished:
        out.append(reason("INV-UNFINISHED", "invalid", "next.unfinished"))
    for problem in facts.problems:
        reason_id = FATAL_PROBLEMS.get(problem.problem_id)
        if reason_id:
            named = [str(x) for x in problem.examples[:3]]
            params = {
                "problem_id": problem.problem_id, "message": problem.message, "rows": problem.rows,
                "examples": said("examples", items=joined("comma", named)) if named else said(""),
            }  # fmt: skip
            out.append(reason(reason_id, "invalid", NEXT_STEP[reason_id], value=float(problem.rows), limit=0.0,
                              params=params))  # fmt: skip
    if facts.csv_check.get("present") and not facts.csv_check.get("ok"):
        listed = joined("semicolon", list(facts.csv_check.get("mismatches", [])[:3]))
        out.append(reason("INV-CSV", "invalid", "next.csv", value=float(facts.csv_check.get("mismatch_count", 0)),
                          limit=0.0, params={"listed": listed}))  # fmt: skip
    if facts.clock_bound_s is not None and facts.clock_bound_s > facts.clock_limit_s:
        bound = facts.clock_bound_s
        known = said("offset.unknown") if math.isinf(bound) else said("offset.known", bound_ms=bound * 1e3)
        out.append(reason("INV-OFFSET", "invalid", "next.offset", value=bound, limit=facts.clock_limit_s,
                          params={"known": known, "limit_ms": facts.clock_limit_s * 1e3}))  # fmt: skip
    if len(facts.missing) >= WITNESSES:
        out.append(reason("INV-WITNESS", "invalid", "next.witness", value=float(len(facts.missing)), limit=0.0,
                          params={"files": joined("and", list(facts.missing))}))  # fmt: skip
    return out


def _channel_reason(facts: Facts) -> Reason | None:
    """Nothing was answered, and the channel (not the service's load) is why."""
    planned = sum(s.planned for s in facts.stages)
    ok = sum(s.counts.get("ok", 0) for s in facts.stages)
    failures = sum(g.count for g in facts.errors)
    if not planned or ok or not failures:
        return None
    # A run that was stopped leaves unsent rows of the layer `client`: they say nothing about the channel.
    # One that was open at the drain limit was sent and got nothing, like one that timed out.
    silent = [g for g in facts.errors if g.layer == "channel" or g.code == "CL-DRAIN"]
    reached = sum(g.count for g in facts.errors if g.layer != "client" or g.code == "CL-DRAIN")
    channel = sum(g.count for g in silent)
    if reached == 0 or channel / reached < 0.9:
        return None
    top = max(silent, key=lambda g: g.count)
    params = {"planned": planned, "failed": channel, "error_code": top.code, "error_kind": top.error_kind}
    return reason("INV-CHANNEL", "invalid", "next.check", value=0.0, limit=1.0, params=params)


def verdict(facts: Facts) -> Verdict:
    """The verdict of a run."""
    reasons = run_reasons(facts)
    channel = _channel_reason(facts)
    if channel:
        reasons.append(channel)
    reasons.extend(_deciding_reasons(facts))
    reasons = causes_first(reasons)
    binding = [g for g in facts.gates if g.severity == "fail"]
    invalid = any(r.severity == "invalid" for r in reasons)
    failed = [g for g in binding if g.status == "fail"]
    unknown = [g for g in binding if g.status in ("invalid", "not_measured")]
    if not invalid and not failed and unknown:
        reasons.extend(_unmeasured(unknown, facts))
        invalid = True
    status = "INVALID" if invalid else "FAIL" if failed else "PASS"
    if status == "FAIL":
        reasons.extend(_fail_reason(g) for g in failed)
    reasons.extend(_warnings(facts))
    codes = [EXIT[status]]
    if channel:
        codes.append(EXIT["CHANNEL"])
    if facts.interrupted:
        codes.append(EXIT["INTERRUPTED"])
        reasons.insert(0, _interrupted_reason(facts.stages))
    if facts.stopped_by:
        reasons.append(reason("WARN-ABORT", "warn", "next.abort", params={"stopped_by": facts.stopped_by}))
    first_line = _sentence(status, facts, failed, reasons)
    return Verdict(status, exit_code(codes), text_of(first_line), reasons,
                   facts.interrupted, first_line["code"], first_line["params"])  # fmt: skip


def _interrupted_reason(stages: list[StageAnalysis]) -> Reason:
    """What an interrupted run lacks."""
    lost = sum(s.verdict == "EMPTY" for s in stages)
    never = said("interrupted.never", lost=lost, stages=len(stages)) if lost else said("")
    return reason("INTERRUPTED", "warn", "next.again", params={"never": never})


def _deciding_reasons(facts: Facts) -> list[Reason]:
    """Invalid reasons of the stages on which the target's gates rest."""
    measured = [s for s in facts.stages if s.verdict != "EMPTY"]
    if not measured:
        return [reason("INV-EMPTY", "invalid", "next.empty", value=0.0, limit=1.0)]
    if facts.at == "run":
        silent = [r for s in measured if (r := _silence(s)) is not None]
        return silent + [r for s in measured for r in s.reasons if r.severity == "invalid"]
    if facts.target_qps is None:
        return []
    place = locate(measured, facts.target_qps)
    if place.exact:
        return [r for s in place.exact if (r := _silence(s)) is not None]
    if place.invalid_exact:
        invalid = [r for s in place.invalid_exact for r in s.reasons if r.severity == "invalid"]
        few = [replace(r, stage=None) for r in invalid if r.reason_id == MAJORITY][:1]  # of the rate, said once
        return few + [r for r in invalid if r.reason_id != MAJORITY]
    # The target was not a stage: an INVALID stage between it and its neighbours took the neighbour's place.
    low = place.below[0].offered_qps if place.below else 0.0
    high = place.above[0].offered_qps if place.above else float("inf")
    between = [s for s in measured if s.verdict == "INVALID" and low < s.offered_qps < high]
    if place.below or place.above:
        return []
    return [r for s in between for r in s.reasons if r.severity == "invalid"]


def _silence(stage: StageAnalysis) -> Reason | None:
    """The reason of a stage without one answer, nine in ten of which waited in vain: a frozen service."""
    reached = stage.planned - stage.counts.get("unsent", 0)
    waited = stage.counts.get("timeout", 0) - _given_up(stage)
    if stage.counts.get("ok", 0) or reached < 1 or waited < 0.9 * reached:
        return None
    params = {"planned": stage.planned, "stage_name": stage.name, "waited": waited}
    return reason("INV-CHANNEL.silent", "invalid", "next.check_limits", stage=stage.stage, value=0.0, limit=1.0,
                  params=params)  # fmt: skip


def _given_up(stage: StageAnalysis) -> int:
    """Arrivals of a stage that a stop ended: they waited in vain for nobody."""
    return int(next((r.value or 0 for r in stage.reasons if r.reason_id == "INV-CANCEL"), 0))


def _unmeasured(gates: list[Gate], facts: Facts) -> list[Reason]:
    """One reason for all gates that lack a measurement for the same cause."""
    causes: dict[tuple[str, str], list[Gate]] = {}
    for gate in gates:
        causes.setdefault((gate.at, gate.text), []).append(gate)
    rates = sorted({s.offered_qps for s in facts.stages if s.verdict != "EMPTY"})
    shown = rates and facts.at != "run"
    ran = said("target.ran", rates=joined("comma", rates)) if shown else said("")
    out = []
    for (at, _), members in causes.items():
        there = at == "target" and facts.target_qps is not None and locate(facts.stages, facts.target_qps).exact
        step = "next.add_target"
        if facts.interrupted:
            step = "next.again"
        elif at in ("run", "all", "max") or there:
            step = "next.more_arrivals"
        first = members[0]
        params = {
            "names": joined("and", [label(g) for g in members]), "where": where(first, facts.target_qps),
            "gate": {"code": first.code, "params": first.params}, "ran": ran,
        }  # fmt: skip
        code = "INV-TARGET" if len(members) == 1 else "INV-TARGET.many"
        out.append(reason(code, "invalid", step, limit=first.limit, params=params))
    return out


def _fail_reason(gate: Gate) -> Reason:
    """What was missed, by how much, and at which rate: `e2e p95 is 9.8 s at 5 requests/s, above 2 s`."""
    place = said("miss.where", where=where(gate, None))
    if gate.measured_qps is not None:
        place = said("miss.place", offered_qps=gate.measured_qps)
    if gate.metric == "knee_qps":
        place = said("")
    limit = said("")
    if gate.limit is not None:
        operator = f"miss.limit.{gate.operator}" if gate.operator in MISSED else "miss.limit"
        limit = said(operator, limit=amount(gate, gate.limit))
    # "measured at 20 requests/s" says nothing that the text has not said
    more = besides({"code": gate.code, "params": gate.params}, gate.measured_qps)
    if gate.code == "gate.unstable" and gate.measured is not None:  # the share lies on the right side of its limit
        held = {"label": label(gate), "place": place, "why": gate.params["why"],
                "found": amount(gate, gate.measured, gate.limit), "limit": amount(gate, gate.limit or 0.0)}  # fmt: skip
        return reason("SLO-MISS.unstable", "fail", "next.unstable", value=gate.measured, limit=gate.limit, params=held)
    if gate.measured is not None and math.isinf(gate.measured) and gate.limit is not None:
        never = {"label": label(gate), "place": place, "limit": amount(gate, gate.limit)}
        return reason("SLO-MISS.never", "fail", "next.binding_clause", value=gate.measured, limit=gate.limit,
                      params=never)  # fmt: skip
    params = {
        "label": label(gate), "place": place, "limit": limit,
        "found": said("miss.missed") if gate.measured is None else amount(gate, gate.measured, gate.limit),
        "note": said("") if more is None else said("miss.note", note=more),
    }  # fmt: skip
    return reason("SLO-MISS", "fail", "next.binding_clause", value=gate.measured, limit=gate.limit, params=params)


def _warnings(facts: Facts) -> list[Reason]:
    """Stages that are INVALID without deciding, an undecided target, answers of another model."""
    out = []
    if facts.at == "run":
        place = None
    else:
        place = locate(facts.stages, facts.target_qps) if facts.target_qps is not None else None
    for stage in facts.stages:
        if (
            stage.verdict != "INVALID"
            or any(r.reason_id == MAJORITY for r in stage.reasons)  # the other repeats of its rate say why
            or facts.at == "run"
            or (place and stage in place.invalid_exact and not place.exact)
        ):
            continue
        first = next((r for r in stage.reasons if r.severity == "invalid"), None)
        if first:
            out.append(left_out(first, stage.name))
    if place and place.exact:
        out += _undecided(place.exact, facts.repeats)
    other_model = [r for s in facts.stages for r in s.reasons if r.reason_id == "WARN-MODEL"]
    if other_model:  # of many stages the worst one speaks
        out.append(max(other_model, key=lambda r: r.value or 0.0))
    out += [r for s in facts.stages for r in s.reasons if r.reason_id == "WARN-GONE"][:1]  # the rest follows from it
    repeated = [r for s in facts.stages for r in s.reasons if r.reason_id == "WARN-PROMPTS"]
    if repeated:
        out.append(max(repeated, key=lambda r: r.value or 0.0))
    for r in (r for s in (place.exact if place else ()) for r in s.reasons if r.reason_id == "WARN-GAUGE"):
        out.append(r)
    out += _trust(facts)
    if facts.missing == (LOCUST_STATS,):  # LED-015 speaks for the gauge
        out.append(reason("WARN-WITNESS", "warn", "next.witness", params={"file": LOCUST_STATS}))
    for problem in facts.problems:
        if problem.problem_id not in FATAL_PROBLEMS:
            made = reason("LED", "warn", "next.verdicts", value=float(problem.rows),
                          params={"problem_id": problem.problem_id, "message": problem.message, "rows": problem.rows})
            out.append(replace(made, reason_id=problem.problem_id))
    return out


def _undecided(stages: tuple[StageAnalysis, ...], repeats: Sequence[Repeatability]) -> list[Reason]:
    """Attainment at the deciding rate that its arrivals leave open, said once for all repeats.

    Repeats with seeds of their own are independent: their arrivals decide together. Those of one seed send the same
    arrivals again, so together they are worth no more than one of them.
    """
    known = [r for s in stages if s.verdict == "UNDECIDED" for r in s.reasons if r.reason_id == "WARN-UNDECIDED"]
    if not known:
        return []
    worst = min(known, key=lambda r: r.value or 0.0)
    apart = any(not r.same_seed and math.isclose(r.offered_qps, stages[0].offered_qps, abs_tol=SAME_RATE)
                for r in repeats)  # fmt: skip
    if apart and worst.limit is not None:
        worth = [_worth(s.attainment_joint) for s in stages]
        met = sum(n * (s.attainment_joint.value or 0.0) for n, s in zip(worth, stages, strict=True))
        low, high = wilson(met, sum(worth))
        if low >= worst.limit or high < worst.limit:
            return []
    return [replace(worst, severity="warn")]


def _worth(share: Interval) -> float:
    """Independent arrivals n that a Wilson interval rests on: its centre is (p + a/2)/(1 + a) with a = z²/n."""
    if share.value is None or share.low is None or share.high is None:
        return 0.0
    centre = (share.low + share.high) / 2
    a = (share.value - centre) / (centre - 0.5) if centre != 0.5 else 0.0
    return min(z_quantile() ** 2 / a, float(share.n)) if a > 0 else float(share.n)


def _trust(facts: Facts) -> list[Reason]:
    """What the numbers of the deciding stages rest on, one line each: of many stages the worst one speaks."""
    if facts.at == "run":
        deciding = [s for s in facts.stages if s.verdict not in ("EMPTY", "INVALID")]
    elif facts.target_qps is None:
        return []
    else:
        place = locate(facts.stages, facts.target_qps)
        deciding = list(place.exact or (*place.below, *place.above))
    out = []
    for reason_id in TRUST:
        known = [r for s in deciding for r in s.reasons if r.reason_id == reason_id]
        if known:
            out.append(replace(max(known, key=lambda r: r.value or 0.0), severity="warn"))
    return out


def _sentence(status: str, facts: Facts, failed: list[Gate], reasons: list[Reason]) -> dict[str, Any]:
    stopped = said("verdict.stopped") if facts.interrupted else said("")
    missing = said("verdict.witness", files=joined("and", list(facts.missing)))
    if status == "PASS":
        undecided = any(r.reason_id == "WARN-UNDECIDED" for r in reasons)
        rate, rest = _held_where(facts)
        note = said("verdict.undecided") if undecided else said("")
        repeats = _repeat_note(facts)
        note = said("verdict.both", first=note, second=repeats) if repeats["code"] else note
        rest = said("verdict.both", first=rest, second=missing) if facts.missing else rest
        return said("verdict.PASS", stopped=stopped, where=rate, note=note, rest=rest)
    if status == "FAIL":
        missed, repeats = sentence(_fail_reason(failed[0])), _repeat_note(facts)
        missed = said("verdict.both", first=missed, second=repeats) if repeats["code"] else missed
        missed = said("verdict.both", first=missed, second=missing) if facts.missing else missed
        return said("verdict.FAIL", stopped=stopped, reason=missed)
    first = next(r for r in reasons if r.severity == "invalid")
    code = "verdict.INVALID.target" if first.reason_id == "INV-TARGET" else "verdict.INVALID"
    return said(code, stopped=stopped, reason=sentence(first))


def _repeat_note(facts: Facts) -> dict[str, Any]:
    """How many repeats of the deciding rate were valid, and whether they agree; empty when all is well."""
    if facts.at == "run" or facts.target_qps is None:
        return said("")
    place = locate(facts.stages, facts.target_qps)
    rates = [s.offered_qps for s in (place.exact or (*place.above, *place.below))]

    def deciding(rate: float) -> bool:
        return any(math.isclose(rate, other, rel_tol=SAME_RATE, abs_tol=SAME_RATE) for other in rates)

    left = said("")
    for _, members in (group for group in repeated(facts.stages) if deciding(group[0])):
        valid = len(sound(members))
        if valid < len(members):
            shown = said("verdict.not_shown") if valid < 2 else said("")
            left = said("verdict.repeats", valid=valid, repeats=len(members), shown=shown)
            break
    wide = [r for r in facts.repeats if r.ok is False and deciding(r.offered_qps)]
    if not wide:
        return left
    worst = max(wide, key=lambda r: r.range_ratio or 0.0)
    apart = said("verdict.spread", ratio=worst.range_ratio, limit=worst.limit_ratio,
                 statistic=statistic_words(worst.statistic))  # fmt: skip
    return said("verdict.both", first=left, second=apart) if left["code"] else apart


def _held_where(facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rate at which the SLO was found to hold, and what to know when the target itself was not measured."""
    if facts.at == "run":
        return said("verdict.run"), said("")
    rate = facts.target_qps
    if rate is None:
        return said("verdict.gates"), said("")
    here = said("verdict.at", offered_qps=rate)
    if facts.target_of_config is not None:
        return here, said("verdict.own_rate", target_qps=facts.target_of_config)
    place = locate(facts.stages, rate)
    if place.exact or not place.above:
        return here, said("")
    above = place.above[0].offered_qps
    if not place.below:
        return said("verdict.at", offered_qps=above), said("verdict.above", target_qps=rate)
    return here, said("verdict.between", low_qps=place.below[0].offered_qps, high_qps=above)
