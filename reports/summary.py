"""`summary.json` and `summary.md`: the same verdict for programs and for a pull request.

Input: an `Analysis`. Output: a JSON-able dict (schema in
`summary.schema.json`) and Markdown text.
Does not: compute a statistic or write a file.

1. Units stand in the key names; absent is null; a latency that did not end is
   the string "inf". Keys are only ever added.
2. Under an INVALID verdict every capacity field is null.
3. The Markdown starts with the verdict and holds one table of at most 12 rows.
"""

from __future__ import annotations

import math
from typing import Any

from bench.records.analysis import TRUST, Analysis, Gate, Percentiles, StageAnalysis
from reports import capacity
from reports.charts import NOT_RUN, Context
from reports.charts_little import WEDGE, gap, tightest
from reports.figures import Figures, number
from reports.view import SYMBOLS, VERDICT_KINDS, gate_view, headline, is_interrupted, verdict_sentence
from reports.words import Words

SUMMARY_VERSION = 1
TABLE_ROWS = 12
REASONS = 5  # the first ones, and all that say what the numbers rest on


def _plain(value: Any) -> Any:
    out = number(value)
    if out is None:
        return None
    return ("inf" if out > 0 else "-inf") if math.isinf(out) else out


def _percentiles(p: Percentiles | None) -> dict[str, Any] | None:
    if p is None or not p.n:
        return None
    out: dict[str, Any] = {"n": p.n, "mean_s": _plain(p.mean)}
    for name in ("p50", "p90", "p95", "p99"):
        out[f"{name}_s"] = None if name in p.withheld else _plain(getattr(p, name))
    out["maximum_s"], out["withheld"] = _plain(p.maximum), dict(p.withheld)
    return out


def _stage(s: StageAnalysis) -> dict[str, Any]:
    return {
        "stage": s.stage,
        "repeat": s.repeat,
        "name": s.name,
        "offered_qps": s.offered_qps,
        "planned": s.planned,
        "counts": s.counts,
        "arrival_qps": _plain(s.arrival_qps),
        "completed_qps": _plain(s.completed_qps),
        "goodput_qps": _plain(s.goodput_qps),
        "output_tps": _plain(s.output_tps),
        "ttft": _percentiles(s.latency.get("ttft_s")),
        "tpot": _percentiles(s.latency.get("tpot_s")),
        "e2e": _percentiles(s.latency.get("e2e_s")),
        "attainment_joint": _plain(s.attainment_joint.value),
        "attainment_low": _plain(s.attainment_joint.low),
        "attainment_high": _plain(s.attainment_joint.high),
        "verdict": s.verdict,
        "stationarity": s.stationarity,
        "in_flight_mean": _plain(s.little.in_flight_mean_integral),
        "lambda_w": _plain(s.little.lambda_w),
        "little_gap_ratio": _plain(gap(s.little)),
        "send_lag_p99_s": _plain(s.stimulus.send_lag_p99_s),
    }


def _gate(g: Gate) -> dict[str, Any]:
    return {
        "gate_id": g.gate_id,
        "metric": g.metric,
        "statistic": g.statistic,
        "operator": g.operator,
        "limit": _plain(g.limit),
        "measured": _plain(g.measured),
        "unit": g.unit,
        "at": g.at,
        "status": g.status,
        "severity": g.severity,
        "text": g.text,
    }


def _context(analysis: Analysis) -> Context:
    words = Words("en")
    return Context(analysis, words, Figures(words))


def _lambda_max(analysis: Analysis) -> dict[str, Any]:
    value, low, high = capacity.lambda_max(_context(analysis))
    return {"value_qps": value, "low_qps": low, "high_qps": high}


def _little(analysis: Analysis) -> dict[str, Any]:
    """Little's law over the stationary stages, and the tight check with its limit."""
    ctx = _context(analysis)
    stages = [s for s in ctx.stages if s.stationarity == "STABLE"]
    gaps = [abs(g) for s in stages if (g := gap(s.little)) is not None]
    tight = tightest(ctx)
    return {
        "stationary_stages": len(stages),
        "gap_max_ratio": _plain(max(gaps, default=None)),
        "gap_limit_ratio": WEDGE,
        "gauge_bias_ratio": _plain(tight[0]) if tight else None,
        "gauge_bias_limit_ratio": _plain(tight[1]) if tight else None,
        "gauge_agrees": {s.stage: s.little.ok for s in analysis.stages if s.little.ok is not None},
    }


def _model(analysis: Analysis) -> dict[str, Any] | None:
    model = analysis.model
    if not model:
        return None
    given = analysis.verdict.status != "INVALID"
    names = ("knee_predicted_qps", "knee_predicted_low_qps", "knee_predicted_high_qps", "p95_crossing_predicted_qps")
    return {
        "predictive": model.get("predictive") if given else None,
        "worst_residual_ratio": _plain(model.get("worst_residual_ratio")),
        "calibration_stages": [int(s) for s in model.get("calibration_stages") or [] if number(s) is not None],
        **{name: _plain(model.get(name)) if given else None for name in names},
        "sentence": str(model.get("sentence") or "") if given else "",
    }


def _client(analysis: Analysis) -> dict[str, Any]:
    """The load generator: its lateness, whether it kept up, and its calibration."""
    ctx = _context(analysis)
    ran, made = ctx.stages, ctx.client_calibration
    judged = [s.stimulus.ok for s in ran if s.stimulus.ok is not None]
    lags = [v for s in ran if (v := number(s.stimulus.send_lag_p99_s)) is not None]
    adds = made.get("adds") if isinstance(made.get("adds"), dict) else {}
    return {
        "ok": all(judged) if judged else None,
        "stages_ok": sum(judged),
        "stages_judged": len(judged),
        "send_lag_p99_max_s": _plain(max(lags, default=None)),
        "calibrated": bool(made),
        "ceiling_qps": _plain(made.get("ceiling_qps")),
        "ceiling_kind": str(made["ceiling_kind"]) if made.get("ceiling_kind") else None,
        "adds": {str(k): _plain(v) for k, v in adds.items()},
    }


def artifacts(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The run's files with their digests, as run.json lists them."""
    listed = run.get("files")
    items = listed.items() if isinstance(listed, dict) else ()
    rows = [(str(name), each if isinstance(each, dict) else {"sha256": each}) for name, each in items]
    sizes = [each["bytes"] if isinstance(each.get("bytes"), int) else None for _, each in rows]
    return [
        {"name": name, "sha256": str(each.get("sha256") or ""), "bytes": size}
        for (name, each), size in zip(rows, sizes, strict=True)
    ]


def _knee_qps(analysis: Analysis) -> float | None:
    """The knee; where every rate held, the bound that was shown, never the highest rate that happened to hold."""
    c = analysis.capacity
    return capacity.knee_bound(_context(analysis)) if c.knee_kind == "at_least" else c.knee_qps


def summary(analysis: Analysis) -> dict[str, Any]:
    """The content of `summary.json`."""
    run, c = analysis.run, analysis.capacity
    given = analysis.verdict.status != "INVALID"
    return {
        "schema_version": SUMMARY_VERSION,
        "tool": {"name": "scheduler-bench", "version": str(run.get("tool_version") or "")},
        "run": {
            k: run.get(k)
            for k in ("run_id", "started_utc", "finished_utc", "seed", "schedule_hash", "shape", "loop", "workers")
        }
        | {
            "interrupted": is_interrupted(analysis),
            "simulated": bool(run.get("simulated")),
        },
        "slo": {k: _plain(v) for k, v in analysis.slo.items()},
        "target_qps": _plain(analysis.target_qps),
        "verdict": {
            "status": analysis.verdict.status,
            "exit_code": analysis.verdict.exit_code,
            "sentence": analysis.verdict.sentence,
            "reasons": [
                {
                    "reason_id": r.reason_id,
                    "severity": r.severity,
                    "text": r.text,
                    "next_step": r.next_step,
                    "stage": r.stage,
                }
                for r in analysis.verdict.reasons
            ],
        },
        "gates": [_gate(g) for g in analysis.gates],
        "capacity": {
            "knee_qps": _plain(_knee_qps(analysis)) if given else None,
            "knee_low_qps": _plain(c.knee_low_qps) if given else None,
            "knee_high_qps": _plain(c.knee_high_qps) if given else None,
            "knee_kind": c.knee_kind if given else "none",
            "last_met_qps": _plain(c.last_met_qps) if given else None,
            "watermark_low_qps": _plain(c.watermark_low_qps) if given else None,
            "watermark_high_qps": _plain(c.watermark_high_qps) if given else None,
            "flattening_qps": _plain(c.flattening_qps) if given else None,
        },
        "lambda_max": _lambda_max(analysis),
        "little": _little(analysis),
        "model": _model(analysis),
        "client": _client(analysis),
        "artifacts": artifacts(run),
        "stages": [_stage(s) for s in analysis.stages],
        "errors": [{"layer": e.layer, "code": e.code, "stage": e.stage, "count": e.count} for e in analysis.errors],
        "warnings": [r.text for r in analysis.warnings],
    }


def _escape(text: str) -> str:
    """Markdown-safe: no cell break, no markup from outside."""
    for char in "\\`*_[]<>|#":
        text = text.replace(char, f"&#{ord(char)};" if char in "<>|" else "\\" + char)
    return " ".join(text.split())


def _stage_line(ctx: Context, s: StageAnalysis) -> str:
    f, t = ctx.figures, ctx.words
    start = f"{s.stage:02d}  {f.asked(s.offered_qps):>6} {t('unit_qps')}  "
    if NOT_RUN in s.marks:
        return start + t("stagemark_not_run")
    return (
        f"{start}{f.share(s.attainment_joint.value):>9}  "
        f"TTFT p95 {f.percentile(s.latency.get('ttft_s'), 'p95'):>14}  {t.known('stage_' + s.verdict, s.verdict)}"
    )


def _capacity_line(ctx: Context) -> str:
    """Safe rate and knee in the wording of the tiles; empty where neither was found."""
    t = ctx.words
    parts = []
    if safe := capacity.safe_rate(ctx):
        parts.append(f"{t('tile_safe')}: **{safe} {t('unit_qps')}**")
    if knee := capacity.knee(ctx).text:
        parts.append(f"{t('tile_knee')}: {knee} {t('unit_qps')}")
    return " · ".join(parts)


def markdown(analysis: Analysis, *, lang: str = "en") -> str:
    """The content of `summary.md`: verdict, at most 12 rows, the rest folded."""
    words = Words(lang)
    ctx = Context(analysis, words, Figures(words))
    kind = VERDICT_KINDS.get(analysis.verdict.status, "invalid")
    lines = [f"### {SYMBOLS[kind]} {headline(ctx)}: {_escape(verdict_sentence(ctx))}", ""]
    if not ctx.shows_capacity:
        lines += [words("no_figure_why") + ".", ""]
    elif figures := _capacity_line(ctx):
        lines += [figures, ""]
    for r in [r for i, r in enumerate(analysis.verdict.reasons) if i < REASONS or r.reason_id in TRUST]:
        lines.append(
            f"- {_escape(r.text)}" + (f" ({words('next_step')}: {_escape(r.next_step)})" if r.next_step else "")
        )
    if analysis.verdict.reasons:
        lines.append("")
    if analysis.gates:
        worst = sorted(
            analysis.gates,
            key=lambda g: (
                ("fail", "invalid", "not_measured", "pass").index(g.status)
                if g.status in ("fail", "invalid", "not_measured", "pass")
                else 9
            ),
        )
        shown = worst[:TABLE_ROWS]
        lines += [
            "| " + " | ".join(words(f"col_{c}") for c in ("check", "at", "limit", "measured", "status")) + " |",
            "| --- | --- | ---: | ---: | --- |",
        ]
        for gate in shown:
            g = gate_view(ctx, gate)
            lines.append(
                f"| {_escape(g['name'])} | {_escape(g['at'])} | {_escape(g['limit'])} | {_escape(g['measured'])} "
                f"| {SYMBOLS[g['kind']]} {_escape(g['word'])} |"
            )
        if len(analysis.gates) > TABLE_ROWS:
            lines.append("")
            lines.append(words("md_more_gates", n=len(analysis.gates) - TABLE_ROWS))
        lines.append("")
    if ctx.planned_stages:
        lines += [f"<details><summary>{words('sec_stages')}</summary>", "", "```"]
        lines += [_stage_line(ctx, s) for s in ctx.planned_stages[:60]]
        lines += ["```", "", "</details>", ""]
    lines.append(
        words("md_footer", run=_escape(str(analysis.run.get("run_id") or "")), code=analysis.verdict.exit_code)
    )
    return "\n".join(lines) + "\n"
