"""PASS, FAIL or INVALID, with reasons that carry a number, a limit and a next step.

Input: gates, stages, problems of the ledger, the CSV check. Output: `Verdict`.
Does not: measure. A table of reasons is in docs/verdicts.md.

1. PASS: every gate of severity `fail` passed. The default gates are the SLO at
   `loadgen.target_qps`, so a sweep that goes on past the knee is no failure.
2. INVALID: the numbers that would decide are not to be trusted, or were not measured.
   A stage that is INVALID far from the target does not decide, it is only listed.
3. Exit codes: 0 PASS, 1 FAIL, 3 nothing answered and the channel is at fault,
   4 INVALID, 130 interrupted. Codes 2 and 5 belong to the callers.
"""
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from analysis.gates import locate
from bench.records.analysis import ErrorGroup, Gate, Reason, StageAnalysis, Verdict
from bench.records.request import LedgerProblem

EXIT = {"PASS": 0, "FAIL": 1, "CHANNEL": 3, "INVALID": 4, "INTERRUPTED": 130}
EXIT_PRIORITY = (130, 2, 3, 4, 1, 5, 0)  # when several hold, the first of these

# Problems of the files that make every number of the run doubtful.
FATAL_PROBLEMS = {
    "LED-003": "INV-ROWS", "LED-004": "INV-ROWS", "LED-005": "INV-LEDGER", "LED-006": "INV-LEDGER",
    "LED-007": "INV-LEDGER", "LED-008": "INV-ROWS", "LED-009": "INV-ROWS", "LED-011": "INV-LEDGER",
    "LED-012": "INV-LEDGER", "LED-013": "INV-LEDGER", "LED-018": "INV-SEED",
}  # fmt: skip
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
    stopped_by: str = ""  # the abort gate that ended the run early


def exit_code(codes: Iterable[int]) -> int:
    """The one exit code of several that hold."""
    held = set(codes)
    return next((c for c in EXIT_PRIORITY if c in held), 0)


def run_reasons(facts: Facts) -> list[Reason]:
    """Reasons that concern the whole run."""
    out: list[Reason] = []
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
    reached = sum(g.count for g in facts.errors if g.layer != "client")
    channel = sum(g.count for g in facts.errors if g.layer == "channel")
    if reached == 0 or channel / reached < 0.9:
        return None
    top = max((g for g in facts.errors if g.layer == "channel"), key=lambda g: g.count)
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
        reasons.insert(0, Reason("INTERRUPTED", "warn", "the run was interrupted: what was planned and never "
                                                        "sent counts "
                                 "as a miss, later stages are missing", "run again to the end"))  # fmt: skip
    if facts.stopped_by:
        reasons.append(Reason("WARN-ABORT", "warn", f"the run was stopped early: {facts.stopped_by}",
                              "later stages were not run; mend what the gate names, or take `abort` from the gate"))  # fmt: skip
    return Verdict(status, exit_code(codes), _sentence(status, facts, failed, reasons), reasons, facts.interrupted)


def _deciding_reasons(facts: Facts) -> list[Reason]:
    """Invalid reasons of the stages on which the target's gates rest."""
    measured = [s for s in facts.stages if s.verdict != "EMPTY"]
    if not measured:
        return [Reason("INV-EMPTY", "invalid", "no stage has a single planned arrival in its window",
                       "check stage duration against warm-up, and whether the run was stopped early",
                       value=0.0, limit=1.0)]  # fmt: skip
    if facts.at == "run":
        return [r for s in measured for r in s.reasons if r.severity == "invalid"]
    if facts.target_qps is None:
        return []
    place = locate(measured, facts.target_qps)
    if place.exact:
        return []
    if place.invalid_exact:
        return [r for s in place.invalid_exact for r in s.reasons if r.severity == "invalid"]
    # The target was not a stage: an INVALID stage between it and its neighbours took the neighbour's place.
    low = place.below[0].offered_qps if place.below else 0.0
    high = place.above[0].offered_qps if place.above else float("inf")
    between = [s for s in measured if s.verdict == "INVALID" and low < s.offered_qps < high]
    if place.below or place.above:
        return []
    return [r for s in between for r in s.reasons if r.severity == "invalid"]


def _unmeasured(gates: list[Gate], facts: Facts) -> list[Reason]:
    out = []
    for gate in gates:
        label = f"{gate.metric} {gate.statistic}".removesuffix(" value")
        rates = sorted({s.offered_qps for s in facts.stages if s.verdict != "EMPTY"})
        ran = f"; measured rates: {', '.join(f'{r:g}' for r in rates)}" if rates else ""
        out.append(Reason("INV-TARGET", "invalid", f"{label} at {gate.at} is not measured: {gate.text}{ran}",
                          "add the target rate to sweep.qps, or lengthen its stage", limit=gate.limit))  # fmt: skip
    return out


def _fail_reason(gate: Gate) -> Reason:
    unit = "s" if gate.unit == "s" else "requests/s" if gate.unit == "1/s" else ""
    label = f"{gate.metric} {gate.statistic}".removesuffix(" value")
    measured = "not a number" if gate.measured is None else f"{gate.measured:.4g} {unit}".strip()
    return Reason("SLO-MISS", "fail", f"{label} at {gate.at} is {measured}, required {gate.operator} "
                                      f"{gate.limit:.4g} {unit}"
                  f".  {gate.text}".replace(".  ", "; "), "see the binding clause of that stage and the "
                                                          "capacity section",
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
    at = f"at {facts.target_qps:g} requests/s" if facts.target_qps is not None else "at the target"
    if facts.at == "run":
        at = "over the whole run"
    if status == "PASS":
        note = (
            " (not decided by the number of arrivals)" if any(r.reason_id == "WARN-UNDECIDED" for r in reasons) else ""
        )
        return f"{stopped}The SLO holds {at}{note}."
    if status == "FAIL":
        gate = failed[0]
        label = f"{gate.metric} {gate.statistic}".removesuffix(" value")
        found = "missed" if gate.measured is None else f"{gate.measured:.4g}"
        return f"{stopped}The SLO does not hold {at}: {label} is {found}, required {gate.operator} {gate.limit:.4g}."
    first = next(r for r in reasons if r.severity == "invalid")
    return f"{stopped}The measurement is not to be trusted: {first.text}."
