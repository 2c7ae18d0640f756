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
from collections.abc import Iterable
from dataclasses import dataclass

from analysis.gates import amount, label, locate, where
from bench.records.analysis import ErrorGroup, Gate, Reason, StageAnalysis, Verdict
from bench.records.request import LedgerProblem

EXIT = {"PASS": 0, "FAIL": 1, "CHANNEL": 3, "INVALID": 4, "INTERRUPTED": 130}
EXIT_PRIORITY = (2, 130, 3, 4, 1, 5, 0)  # when several hold, the first of these

# Problems of the files that make every number of the run doubtful.
FATAL_PROBLEMS = {
    "LED-003": "INV-ROWS", "LED-004": "INV-ROWS", "LED-005": "INV-LEDGER", "LED-006": "INV-LEDGER",
    "LED-007": "INV-LEDGER", "LED-008": "INV-ROWS", "LED-009": "INV-ROWS", "LED-011": "INV-LEDGER",
    "LED-012": "INV-LEDGER", "LED-013": "INV-LEDGER", "LED-018": "INV-SEED",
    "LED-021": "INV-LEDGER",
}  # fmt: skip
MISSED = {"<=": "above", "<": "not below", ">=": "below", ">": "not above"}
NEXT_STEP = {
    "INV-ROWS": "look in log.txt for lost workers or a full disk; run again",
    "INV-LEDGER": "the ledger was changed or damaged after the run; use the original or run again",
    "INV-SEED": "compare seeds in stages.csv; do not merge runs by hand",
}


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


def exit_code(codes: Iterable[int]) -> int:
    """The one exit code of several that hold."""
    held = set(codes)
    return next((c for c in EXIT_PRIORITY if c in held), 0)


def run_reasons(facts: Facts) -> list[Reason]:
    """Reasons that concern the whole run."""
    out: list[Reason] = []
    if facts.unfinished:
        text = "the run has no end: its master died, or still runs; stages may be missing"
        step = "look in log.txt for what ended it; `bench recover` puts rows together that workers kept; run again"
        out.append(Reason("INV-UNFINISHED", "invalid", text, step))
    for problem in facts.problems:
        reason_id = FATAL_PROBLEMS.get(problem.problem_id)
        if reason_id:
            examples = f" ({', '.join(problem.examples[:3])})" if problem.examples else ""
            out.append(Reason(reason_id, "invalid", f"{problem.problem_id}: {problem.message}{examples}",
                              NEXT_STEP[reason_id], value=float(problem.rows), limit=0.0))  # fmt: skip
    if facts.csv_check.get("present") and not facts.csv_check.get("ok"):
        listed = "; ".join(facts.csv_check.get("mismatches", [])[:3])
        out.append(Reason("INV-CSV", "invalid", f"Locust's CSV and the ledger disagree: {listed}",
                          "requests or rows were lost on the way; look in log.txt for worker errors, run again",
                          value=float(facts.csv_check.get("mismatch_count", 0)), limit=0.0))  # fmt: skip
    if facts.clock_bound_s is not None and facts.clock_bound_s > facts.clock_limit_s:
        known = "not known" if math.isinf(facts.clock_bound_s) else f"known to {facts.clock_bound_s * 1e3:.1f} ms only"
        out.append(Reason("INV-OFFSET", "invalid", f"the offset between worker and master clocks is {known} "
                          f"(limit {facts.clock_limit_s * 1e3:.1f} ms)",
                          "use a quieter network between master and workers, or one machine",
                          value=facts.clock_bound_s, limit=facts.clock_limit_s))  # fmt: skip
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
    text = (
        f"not one of {planned} arrivals was answered; {channel} failed in the channel, most with {top.code} "
        f"({top.error_kind})"
    )
    return Reason("INV-CHANNEL", "invalid", text, "run `bench check`: it names the layer at fault and the fix",
                  value=0.0, limit=1.0)  # fmt: skip


def verdict(facts: Facts) -> Verdict:
    """The verdict of a run."""
    reasons = run_reasons(facts)
    channel = _channel_reason(facts)
    if channel:
        reasons.append(channel)
    reasons.extend(_deciding_reasons(facts))
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
        reasons.insert(0, Reason("INTERRUPTED", "warn", _interrupted_text(facts.stages), "run again to the end"))
    if facts.stopped_by:
        step = "later stages were not run; mend what the gate names, or take `abort` from the gate"
        reasons.append(Reason("WARN-ABORT", "warn", f"the run was stopped early: {facts.stopped_by}", step))
    return Verdict(status, exit_code(codes), _sentence(status, facts, failed, reasons), reasons, facts.interrupted)


def _interrupted_text(stages: list[StageAnalysis]) -> str:
    """What an interrupted run lacks."""
    lost = sum(s.verdict == "EMPTY" for s in stages)
    never = f"; {lost} of {len(stages)} stages have no measurement" if lost else ""
    return f"the run was interrupted: what was planned after the stop was never due and is left out{never}"


def _deciding_reasons(facts: Facts) -> list[Reason]:
    """Invalid reasons of the stages on which the target's gates rest."""
    measured = [s for s in facts.stages if s.verdict != "EMPTY"]
    if not measured:
        return [Reason("INV-EMPTY", "invalid", "no stage has a single planned arrival in its window",
                       "check stage duration against warm-up, and whether the run was stopped early",
                       value=0.0, limit=1.0)]  # fmt: skip
    if facts.at == "run":
        silent = [r for s in measured if (r := _silence(s)) is not None]
        return silent + [r for s in measured for r in s.reasons if r.severity == "invalid"]
    if facts.target_qps is None:
        return []
    place = locate(measured, facts.target_qps)
    if place.exact:
        return [r for s in place.exact if (r := _silence(s)) is not None]
    if place.invalid_exact:
        return [r for s in place.invalid_exact for r in s.reasons if r.severity == "invalid"]
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
    waited = stage.counts.get("timeout", 0)
    if stage.counts.get("ok", 0) or reached < 1 or waited < 0.9 * reached:
        return None
    text = f"not one of {stage.planned} arrivals of {stage.name} was answered; {waited} were open at a time limit"
    step = "run `bench check`; if answers take that long, raise sweep.drain_limit_sec and the timeouts of target"
    return Reason("INV-CHANNEL", "invalid", text, step, stage.stage, 0.0, 1.0)


def _unmeasured(gates: list[Gate], facts: Facts) -> list[Reason]:
    """One reason for all gates that lack a measurement for the same cause."""
    causes: dict[tuple[str, str], list[Gate]] = {}
    for gate in gates:
        causes.setdefault((gate.at, gate.text), []).append(gate)
    rates = sorted({s.offered_qps for s in facts.stages if s.verdict != "EMPTY"})
    ran = f"; measured rates: {', '.join(f'{r:g}' for r in rates)}" if rates and facts.at != "run" else ""
    out = []
    for (at, text), members in causes.items():
        names = " and ".join(label(g) for g in members)
        verb = "is" if len(members) == 1 else "are"
        there = at == "target" and facts.target_qps is not None and locate(facts.stages, facts.target_qps).exact
        step = "add the target rate to sweep.qps, or lengthen its stage"
        if facts.interrupted:
            step = "run again to the end"
        elif at in ("run", "all", "max") or there:
            step = "run longer stages (--stage-duration, sweep.stage_duration_sec): more arrivals decide it"
        said = f"{names} {where(members[0], facts.target_qps)} {verb} not measured: {text}{ran}"
        out.append(Reason("INV-TARGET", "invalid", said, step, limit=members[0].limit))
    return out


def _fail_reason(gate: Gate) -> Reason:
    """What was missed, by how much, and at which rate: `e2e p95 is 9.8 s at 5 requests/s, above 2 s`."""
    place = where(gate, None) if gate.measured_qps is None else f"at {gate.measured_qps:g} requests/s"
    if gate.metric == "knee_qps":
        place = ""
    limit = "" if gate.limit is None else f", {MISSED.get(gate.operator, 'not')} {amount(gate, gate.limit)}"
    found = "missed" if gate.measured is None else amount(gate, gate.measured, gate.limit)
    text = f"{label(gate)} is {found} {place}".rstrip() + limit
    # "measured at 20 requests/s" says nothing that the text has not said
    note = gate.text.removeprefix(f"measured at {gate.measured_qps:g} requests/s") if gate.measured_qps else gate.text
    if note.lstrip("; "):
        text += "; " + note.lstrip("; ")
    return Reason("SLO-MISS", "fail", text, "see the binding clause of that stage and the capacity section",
                  value=gate.measured, limit=gate.limit)  # fmt: skip


def _warnings(facts: Facts) -> list[Reason]:
    """Stages that are INVALID without deciding, and an undecided target."""
    out = []
    if facts.at == "run":
        place = None
    else:
        place = locate(facts.stages, facts.target_qps) if facts.target_qps is not None else None
    for stage in facts.stages:
        if (
            stage.verdict != "INVALID"
            or facts.at == "run"
            or (place and stage in place.invalid_exact and not place.exact)
        ):
            continue
        first = next((r for r in stage.reasons if r.severity == "invalid"), None)
        if first:
            out.append(Reason(first.reason_id, "warn", f"{stage.name} is INVALID and left out: {first.text}",
                              first.next_step, stage.stage, first.value, first.limit))  # fmt: skip
    if place and place.exact and any(s.verdict == "UNDECIDED" for s in place.exact):
        for r in (r for s in place.exact for r in s.reasons if r.reason_id == "WARN-UNDECIDED"):
            out.append(Reason(r.reason_id, "warn", r.text, r.next_step, r.stage, r.value, r.limit))
    for problem in facts.problems:
        if problem.problem_id not in FATAL_PROBLEMS:
            out.append(
                Reason(problem.problem_id, "warn", problem.message, "see docs/verdicts.md", value=float(problem.rows))
            )
    return out


def _sentence(status: str, facts: Facts, failed: list[Gate], reasons: list[Reason]) -> str:
    stopped = "INTERRUPTED. " if facts.interrupted else ""
    if status == "PASS":
        undecided = any(r.reason_id == "WARN-UNDECIDED" for r in reasons)
        note = " (not decided by the number of arrivals)" if undecided else ""
        rate, rest = _held_where(facts)
        return f"{stopped}The SLO holds {rate}{note}{rest}."
    if status == "FAIL":
        return f"{stopped}The SLO does not hold: {_fail_reason(failed[0]).text}."
    first = next(r for r in reasons if r.severity == "invalid")
    if first.reason_id == "INV-TARGET":
        return f"{stopped}The SLO is not judged: {first.text}."
    return f"{stopped}The measurement is not to be trusted: {first.text}."


def _held_where(facts: Facts) -> tuple[str, str]:
    """The rate at which the SLO was found to hold, and what to know when the target itself was not measured."""
    if facts.at == "run":
        return "over the whole run", ""
    rate = facts.target_qps
    if rate is None:
        return "where its gates ask for it", ""
    if facts.target_of_config is not None:
        rest = f", the rate of this run; the target of {facts.target_of_config:g} was not measured"
        return f"at {rate:g} requests/s", rest
    place = locate(facts.stages, rate)
    if place.exact or not place.above:
        return f"at {rate:g} requests/s", ""
    above = place.above[0].offered_qps
    if not place.below:
        return f"at {above:g} requests/s", f", and so at the target of {rate:g}, which was not measured"
    sides = f" by the stages at {place.below[0].offered_qps:g} and {above:g}; the target itself was not measured"
    return f"at {rate:g} requests/s", sides
