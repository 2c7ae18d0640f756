"""`junit.xml`: one test case per gate, so that a CI shows the verdict as tests.

Input: an `Analysis`. Output: XML text.
Does not: judge. A missed gate is a failure, an INVALID one an error, one that
was not measured is skipped. A gate of severity "warn" never fails the suite:
its miss is written to the case's output. A run without gates gives one case
named "verdict".
"""

from __future__ import annotations

import re

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from bench.records.analysis import Analysis, Gate
from reports import capacity
from reports.charts import Context
from reports.figures import Figures
from reports.view import gate_view
from reports.words import Words

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # not allowed in XML 1.0


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def junit(analysis: Analysis) -> str:
    """The JUnit document, in English whatever the report's language."""
    words = Words("en")
    ctx = Context(analysis, words, Figures(words))
    suite = TestSuite(f"scheduler-bench {analysis.run.get('shape') or 'run'}")
    for key in ("run_id", "seed", "schedule_hash", "tool_version", "started_utc"):
        if analysis.run.get(key) is not None:
            suite.add_property(key, _clean(str(analysis.run[key])))
    suite.add_property("verdict", analysis.verdict.status)
    suite.add_property("exit_code", str(analysis.verdict.exit_code))
    for key, text in (("knee_qps", capacity.knee(ctx).text), ("safe_rate_qps", capacity.safe_rate(ctx))):
        if text:
            suite.add_property(key, text)
    for gate in analysis.gates:
        suite.add_testcase(_case(ctx, gate))
    if not analysis.gates:
        case = TestCase("verdict", "scheduler-bench.run", 0.0)
        text = _clean(analysis.verdict.sentence)
        if analysis.verdict.status == "INVALID":
            case.result = [Error(text, "invalid")]
        elif analysis.verdict.status == "FAIL":
            case.result = [Failure(text, "slo")]
        suite.add_testcase(case)
    suite.update_statistics()
    document = JUnitXml("scheduler-bench")
    document.add_testsuite(suite)
    document.update_statistics()
    return document.tostring().decode("utf-8") if isinstance(document.tostring(), bytes) else str(document.tostring())


def _case(ctx: Context, gate: Gate) -> TestCase:
    shown = gate_view(ctx, gate)
    case = TestCase(
        _clean(f"{gate.gate_id}: {shown['name']} {shown['limit']}"),
        _clean(f"scheduler-bench.{gate.at}"),
        _seconds(ctx, gate),
    )
    message = _clean(
        f"{shown['name']} at {shown['at']}: measured {shown['measured']}, limit {shown['limit']}. {gate.text}".strip()
    )
    if gate.status == "invalid":
        case.result = [Error(message, "invalid")]
    elif gate.status == "not_measured":
        case.result = [Skipped(message, "not measured")]
    elif gate.status == "fail" and gate.severity == "warn":
        case.system_out = f"warning: {message}"
    elif gate.status == "fail":
        case.result = [Failure(message, "slo")]
    return case


def _seconds(ctx: Context, gate: Gate) -> float:
    """Length of the window that the gate looked at."""
    at = {"target": ctx.analysis.target_qps, "max": max((s.offered_qps for s in ctx.stages), default=None)}.get(gate.at)
    if at is None:
        try:
            at = float(gate.at)
        except ValueError:
            return round(sum(s.window_s for s in ctx.stages), 3)
    return round(sum(s.window_s for s in ctx.stages if abs(s.offered_qps - at) < 1e-9), 3)
