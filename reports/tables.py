"""The lower parts of the report in words: stages, errors, workers, reproduction, glossary.

Input: a `Context`. Output: dicts and rows of ready texts for the templates.
Does not: draw, judge, or hold markup.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from bench.records.analysis import Percentiles, Repeatability, StageAnalysis
from reports.charts import NOT_RUN, Context, stage_label
from reports.charts_detail import LAYERS
from reports.figures import finite, number
from reports.view import STAGE_KINDS, reasons_view, statistic_name, withheld_text

SECRET = re.compile(r"api_?key$|token$|secret|password|authorization|cookie", re.IGNORECASE)
CLIENT_KEYS = (
    "worker",
    "planned",
    "rows",
    "sent",
    "connections_new",
    "send_lag_p50_s",
    "send_lag_p99_s",
    "send_lag_max_s",
    "loop_lag_p99_s",
    "cpu_mean_ratio",
    "cpu_max_ratio",
    "rss_max_bytes",
    "offset_s",
    "bound_s",
)
WORST_KEYS = (  # stage and arrival name a request; its id repeats them and takes a third of the page
    "stage",
    "arrival",
    "status",
    "code",
    "worker",
    "intended_s",
    "send_lag_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "input_tokens",
    "output_tokens",
    "flags",
)
STATUSES = ("ok", "rejected", "timeout", "error", "truncated", "unsent")
UNIT = re.compile(r"_(s|ms|qps|tps|tokens|bytes|ratio)$")
GLOSSARY = (
    "arrival",
    "window",
    "offered",
    "completed",
    "goodput",
    "tokens",
    "failed",
    "attainment",
    "ttft",
    "tpot",
    "e2e",
    "residence",
    "percentile",
    "batch_means",
    "wilson",
    "knee",
    "knee_interval",
    "watermark",
    "flattening",
    "lambda_max",
    "little",
    "stationarity",
    "growth",
    "drain",
    "spread",
    "margin",
    "service",
    "pk",
    "mgk",
    "birth_death",
    "replay",
    "residual",
    "kv",
    "lag",
    "rate_error",
    "loop_lag",
    "cv",
    "dispersion",
    "ks",
    "calibration",
    "status",
    "validity",
)
FORMULAS = {
    "ttft": "TTFT = first_token − intended",
    "tpot": "TPOT = (last_token − first_token) / (output_tokens − 1)",
    "e2e": "E2E = last_token − intended",
    "residence": "W = done − sent",
    "attainment": "hits / planned arrivals",
    "goodput": "hits / window seconds",
    "lag": "lag = sent − intended",
    "percentile": "x₍⌈q·n⌉₎",
    "wilson": "(p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n), z = 1.96",
    "watermark": "0.7 … 0.8 × knee (lower bound)",
    "cv": "σ(gap) / mean(gap)",
    "dispersion": "var(N₁ₛ) / mean(N₁ₛ)",
    "offered": "λₒ",
    "completed": "X = answers that ended / window seconds",
    "tokens": "output tokens / window seconds",
    "batch_means": "P95 · exp(± t(0.975, 4) · sd(ln batch P95) / √5)",
    "knee": "attainment(λ) = target",
    "knee_interval": "2.5 % … 97.5 % of the redrawn crossings",
    "flattening": "mean X of UNSTABLE stages",
    "lambda_max": "max n / E[S(n)], n ≤ K",
    "service": "C² = E[S²] / E[S]² − 1",
    "pk": "Wq = λ·E[S²] / (2(1 − ρ))",
    "mgk": "Wq(M/M/K) · correction for C²",
    "birth_death": "πₙ₊₁ = πₙ · λ / X(n+1)",
    "spread": "(max − min) / mean",
    "residual": "model / measured − 1",
    "rate_error": "sent / planned − 1",
    "failed": "planned − ok",
    "growth": "(A − D) / window seconds",
    "margin": "(limit − measured) / limit",
    "kv": "used / all blocks",
    "drain": "drained − last planned",
    "loop_lag": "CPU seconds / seconds",
    "little": "L = λ · W; L/(λ·W) − 1 = (Rs − Re)/(λ·W·T)",
    "stationarity": "(A − D) / A > 3 % and A − D > K",
}


def stage_columns(ctx: Context) -> list[tuple[str, str]]:
    """Headings of the stage table: what stands in the first line of a cell, and what below it."""
    t = ctx.words
    return [
        (t("col_stage"), ""),
        (t("col_verdict"), ""),
        (t("col_offered_short"), ""),
        (t("rate_completed"), t("rate_goodput")),
        (t("col_planned"), t("col_failed")),
        (t("col_attainment"), ""),
        *[("p50", ""), ("p95", "p99")] * 3,
        (t("col_steady"), "L"),
    ]


def stage_row(ctx: Context, s: StageAnalysis) -> dict[str, Any]:
    """One stage: its cells, facts and reasons."""
    t, f = ctx.words, ctx.figures
    failed = s.planned - s.counts.get("ok", 0)
    parts = [f"{t.known('status_' + k, k)} {v}" for k, v in s.counts.items() if v and k != "ok"]

    def cell(text: str, sort: Any = None, **more: Any) -> dict[str, Any]:
        value = number(sort)
        return {
            "text": text,
            "sort": "" if value is None else f"{value:.9g}",
            "css": "",
            "title": "",
            "kind": "",
            "sub": "",
            "sub_css": "muted",
            "sub_title": "",
            "sub_sort": "",
            **more,
        }

    def below(text: str, sort: Any, *, title: str = "", css: str = "muted") -> dict[str, Any]:
        """The second line of a cell."""
        value = number(sort)
        return {
            "sub": text,
            "sub_sort": "" if value is None else f"{value:.9g}",
            "sub_title": title,
            "sub_css": css,
        }

    if NOT_RUN in s.marks:  # it has no numbers: shares of no arrivals would read like a result
        blank = [cell("–", css="dim") for _ in stage_columns(ctx)[3:]]
        head = [cell(stage_label(s), s.stage), cell(t("stagemark_not_run"), 9, kind="none")]
        return {
            "number": s.stage,
            "name": s.name,
            "cells": [*head, cell(f.asked(s.offered_qps), s.offered_qps, css="edge"), *blank],
            "facts": [(t("fact_marks"), ", ".join(t.known(f"stagemark_{m}", m) for m in s.marks))],
            "reasons": reasons_view(ctx, s.reasons),
            "figures": [],
        }
    cells = [
        cell(stage_label(s), s.stage),
        cell(
            t.known(f"stage_{s.verdict}", s.verdict),
            list(STAGE_KINDS).index(s.verdict) if s.verdict in STAGE_KINDS else 9,
            kind=STAGE_KINDS.get(s.verdict, "none"),
        ),
        cell(f.asked(s.offered_qps), s.offered_qps, css="edge"),
        cell(f.rate(s.completed_qps), s.completed_qps, **below(f.rate(s.goodput_qps), s.goodput_qps, css="")),
        cell(
            f.count(s.planned),
            s.planned,
            css="edge",
            **below(f.count(failed), failed, title=", ".join(parts), css="bad" if failed else "muted"),
        ),
        cell(
            f.share(s.attainment_joint.value),
            s.attainment_joint.value,
            sub=f.interval(s.attainment_joint.low, s.attainment_joint.high, f.share),
        ),
    ]
    for metric, deadline in (("ttft_s", "ttft_deadline_s"), ("tpot_s", "tpot_deadline_s"), ("e2e_s", "e2e_target_s")):
        p, limit = s.latency.get(metric), finite(ctx.analysis.slo.get(deadline))
        p50, p95, p99 = (_percentile_cell(ctx, p, name, limit) for name in ("p50", "p95", "p99"))
        cells.append(cell(p50["text"], p50["value"], css=f"{p50['css']} edge".strip(), title=p50["title"]))
        cells.append(
            cell(
                p95["text"],
                p95["value"],
                css=p95["css"],
                title=p95["title"],
                **below(p99["text"], p99["value"], title=p99["title"], css=p99["css"]),
            )
        )
    flow = "bad" if s.stationarity == "UNSTABLE" else "dim" if s.stationarity != "STABLE" else ""
    in_flight = s.little.in_flight_mean_integral
    cells.append(
        cell(
            t.known(f"steady_{s.stationarity}", s.stationarity),
            None,
            css=f"{flow} edge".strip(),
            **below(f.plain(in_flight, 1), in_flight),
        )
    )
    return {
        "number": s.stage,
        "name": s.name,
        "cells": cells,
        "facts": _facts(ctx, s),
        "reasons": reasons_view(ctx, s.reasons),
        "figures": [],
    }


def _percentile_cell(ctx: Context, p: Percentiles | None, name: str, limit: float | None) -> dict[str, Any]:
    """Text, value to sort by, class and hint of one percentile."""
    f = ctx.figures
    value = number(getattr(p, name)) if p else None
    withheld = p is not None and name in p.withheld
    css = "dim" if withheld or value is None else "bad" if limit is not None and value > limit else ""
    text = "∞" if value == float("inf") and not withheld else f.percentile(p, name)
    title = withheld_text(ctx, p, name) if withheld and p else f"n = {p.n}" if p else ""
    return {"text": text, "value": None if withheld else value, "css": css, "title": title}


def _facts(ctx: Context, s: StageAnalysis) -> list[tuple[str, str]]:
    t, f = ctx.words, ctx.figures
    statuses = list(dict.fromkeys([*STATUSES, *s.counts]))  # with their noughts: "none" is an answer
    counts = (f"{t.known('status_' + k, k)} {f.count(s.counts.get(k, 0))}" for k in statuses)
    facts = [
        (t("fact_counts"), ", ".join(counts)),
        (t("fact_clause"), t.known(f"clause_{s.binding_clause}", s.binding_clause)),
        (t("fact_bounds"), f.interval(s.attainment_low, s.attainment_high, f.share)),
        (t("clause_survivors"), f.share(s.attainment_survivors)),
        (t("fact_ttft"), _survivors(ctx, s.survivors.get("ttft_s"))),
        (t("col_tokens"), f.count(s.output_tps)),
        (t("col_drain"), f.duration(s.drain_s)),
        (t("fact_warmup_cut"), f.duration(_warmup_cut_s(s))),
        (t("fact_warmup"), f.duration(s.warmup_suggested_s)),
        (t("col_growth"), f.plain(s.in_flight_growth_qps, 2)),
    ]
    if s.flags:
        facts.append((t("fact_flags"), ", ".join(f"{k} {f.share(v, 1)}" for k, v in s.flags.items())))
    if s.marks:
        facts.append((t("fact_marks"), ", ".join(t.known(f"stagemark_{m}", m) for m in s.marks)))
    return facts


def _warmup_cut_s(s: StageAnalysis) -> float | None:
    """What was cut from the start of the stage, as configured."""
    return None if s.window_start_s is None or s.start_s is None else s.window_start_s - s.start_s


def _survivors(ctx: Context, p: Percentiles | None) -> str:
    f = ctx.figures
    return (
        f"p50 {f.percentile(p, 'p50')}, p95 {f.percentile(p, 'p95')} (n = {f.count(p.n)})"
        if p and p.n
        else ctx.words("not_measured")
    )


def stage_notes(ctx: Context) -> list[str]:
    """Footnotes: what the rates count, what ∞ means, withheld percentiles with their reason."""
    t = ctx.words
    notes = [t("cap_rates_sets")] if any(s.completed_qps or s.goodput_qps for s in ctx.stages) else []
    notes += (
        [t("note_infinite")]
        if any(number(p.p99) == float("inf") for s in ctx.stages for p in s.latency.values())
        else []
    )
    cells: dict[str, list[str]] = {}
    for s in ctx.stages:
        for metric, p in s.latency.items():
            for name in p.withheld if metric in ("ttft_s", "tpot_s", "e2e_s") else ():
                cells.setdefault(name, []).append(f"{s.stage:02d}")
    for name, where in cells.items():
        stages = list(dict.fromkeys(where))
        shown = ", ".join(stages) if len(stages) <= 8 else f"{', '.join(stages[:3])} … {stages[-1]}"
        notes.append(t("note_withheld", name=name, n=len(where), stages=shown))
    return notes


def error_layers(ctx: Context) -> list[dict[str, Any]]:
    """Failures by layer and code, each with one redacted sample."""
    t, f = ctx.words, ctx.figures
    out = []
    for layer in LAYERS:
        codes: dict[str, list[Any]] = {}
        for group in ctx.analysis.errors:
            if group.layer == layer or (layer == "client" and group.layer not in LAYERS):
                codes.setdefault(group.code, []).append(group)
        rows = []
        for code, groups in sorted(codes.items(), key=lambda pair: -sum(g.count for g in pair[1])):
            stages = sorted({g.stage for g in groups})
            shown = ", ".join(f"{s:02d}" for s in stages[:6]) + (f" … {stages[-1]:02d}" if len(stages) > 6 else "")
            rows.append(
                {
                    "code": code,
                    "kind": t.known(f"kind_{groups[0].error_kind}", groups[0].error_kind),
                    "count": f.count(sum(g.count for g in groups)),
                    "stages": shown,
                    "first": f.duration(min(g.first_s for g in groups)),
                    "last": f.duration(max(g.last_s for g in groups)),
                    "sample": next((g.sample for g in groups if g.sample), "")[:400],
                }
            )
        if rows or layer != "client":
            out.append({"title": t(f"layer_{layer}"), "meaning": t(f"layer_{layer}_meaning"), "rows": rows})
    return out


def by_suffix(ctx: Context, key: str, value: Any) -> str:
    """A value of a free-form record, by the unit at the end of its name."""
    f = ctx.figures
    if isinstance(value, bool) or value is None or isinstance(value, (list, dict)) or number(value) is None:
        if value is None:
            return ctx.words("not_measured") if UNIT.search(key) else "–"
        return str(value)
    if key.endswith("_s"):
        return f.duration(value)
    if key.endswith("_ratio"):
        return f.share(value, 1)
    if key.endswith("_bytes"):
        return f"{float(value) / 2**20:,.0f} MiB"
    if key.endswith("_qps"):
        return f.rate(value)
    return f.count(value) if float(value) == int(float(value)) else f.significant(value)


def free_form(ctx: Context, records: list[dict[str, Any]], *, only: tuple[str, ...]) -> dict[str, Any] | None:
    """A table of records whose keys are not fixed: those of `only` that occur, in its order."""
    keys = [k for k in only if any(r.get(k) not in (None, "", [], {}) for r in records)]
    if not keys:
        return None
    return {
        "columns": [ctx.words.known(f"key_{k}", k) for k in keys],
        "rows": [
            [
                str(r.get(k))
                if isinstance(r.get(k), str) and r.get(k) not in ("inf", "-inf")
                else by_suffix(ctx, k, r.get(k))
                for k in keys
            ]
            for r in records
        ],
    }


def repeats(ctx: Context) -> dict[str, Any] | None:
    """Spread of repeats against its limit."""
    t, f = ctx.words, ctx.figures
    if not ctx.analysis.repeatability:
        return None
    rows = []
    for r in ctx.analysis.repeatability:
        how = (
            f.duration
            if r.statistic.endswith("_s")
            else f.share
            if r.statistic.startswith("attainment")
            else f.significant
        )
        rows.append(
            [
                f.asked(r.offered_qps),
                statistic_name(ctx, r.statistic),
                ", ".join(how(v) for v in r.values),
                f.share(r.range_ratio, 1),
                f.share(r.limit_ratio, 0),
                _repeat_status(ctx, r),
                t.remark(r.note),
            ]
        )
    return {
        "columns": [
            t("col_offered"),
            t("col_statistic"),
            t("col_values"),
            t("col_spread"),
            t("col_limit"),
            t("col_status"),
            t("col_note"),
        ],
        "rows": rows,
    }


def _repeat_status(ctx: Context, r: Repeatability) -> str:
    t = ctx.words
    if r.ok is not None:
        return t("within") if r.ok else t("beyond")
    members = [s for s in ctx.stages if abs(s.offered_qps - r.offered_qps) < 1e-6 and s.verdict != "INVALID"]
    return t("repeat_unstable") if any(s.stationarity == "UNSTABLE" for s in members) else t("not_measured")


def calibration(ctx: Context) -> list[tuple[str, str]]:
    """What the client itself adds and how fast it can send, from run.json; empty when it was not calibrated."""
    t, f = ctx.words, ctx.figures
    made = ctx.client_calibration
    if not made:
        return []
    adds = made.get("adds") if isinstance(made.get("adds"), dict) else {}
    known = {k: v for k, v in adds.items() if finite(v) is not None}
    out = [(t("cal_adds", name=statistic_name(ctx, k)), f.duration(v)) for k, v in known.items()]
    kind, ceiling = str(made.get("ceiling_kind")), finite(made.get("ceiling_qps"))
    if kind == "below":
        out.append((t("cal_ceiling"), t("cal_ceiling_below")))
    elif ceiling is not None:
        text = t("cal_ceiling_at_least", qps=f.capacity(ceiling))
        if kind == "between":
            text = t("cal_ceiling_between", qps=f.capacity(ceiling), miss=f.asked(made.get("first_miss_qps")))
        out.append((t("cal_ceiling"), text))
    out.append((t("cal_way"), f"{f.count(made.get('workers'))}, {made.get('read') or '–'}"))
    out.append((t("cal_made"), " · ".join(str(made[k]) for k in ("made_utc", "file") if made.get(k))))
    return out


def checks(ctx: Context) -> list[tuple[str, str]]:
    """Bookkeeping of ledger and CSV."""
    t, f = ctx.words, ctx.figures
    out = []
    for source, prefix in ((ctx.analysis.ledger, "ledger"), (ctx.analysis.csv_check, "csv")):
        for key, value in source.items():
            if isinstance(value, dict):
                continue
            if isinstance(value, list):
                if not value:
                    continue
                text = "; ".join(_problem(ctx, v) for v in value[:5])
            elif isinstance(value, bool):
                text = t("yes") if value else t("no")
            elif number(value) is not None:
                text = by_suffix(ctx, key, value)
            else:
                text = t("not_measured") if value is None else t.remark(str(value))
            out.append((f"{t('check_' + prefix)}: {t.known('key_' + key, key)}", text))
    residuals = [abs(v) for s in ctx.stages if (v := finite(s.little.identity_residual)) is not None]
    if residuals:
        out.append((t("check_identity"), f.share(max(residuals), 2)))
    return out


def _problem(ctx: Context, problem: Any) -> str:
    """A problem of the ledger in this language; other remarks as they are."""
    if not isinstance(problem, dict):
        return ctx.words.remark(str(problem))
    message = str(problem.get("message") or problem)
    if ctx.words.lang == "en" or not problem.get("problem_id"):
        return message
    text = ctx.words.known(f"problem_{problem['problem_id']}", message)
    rows = number(problem.get("rows"))
    return ctx.words("problem_rows", text=text, n=ctx.figures.count(rows)) if rows else text


def masked(value: Any, key: str = "") -> Any:
    """The value with anything that looks like a secret replaced; the run already masks, this is the second lock."""
    if isinstance(value, dict):
        return {k: masked(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [masked(v, key) for v in value]
    return "***" if isinstance(value, str) and value and SECRET.search(key) else value


def command(ctx: Context, folder: str = "") -> str:
    """What to type to do it again; `folder`: where the run lies, else where a run of its name is put."""
    run, t = ctx.analysis.run, ctx.words
    argv = [str(a) for a in run.get("command") or []]
    lines = [shlex.join(argv) if argv else t("command_unknown")]
    if folder or run.get("run_id"):
        where = shlex.quote(folder or f"runs/{run['run_id']}")
        lines += [
            f"# {t('comment_again')}",
            f"bench analyse {where}",
            f"bench report {where}",
        ]
    lines += [f"# seed {run.get('seed')}", f"# schedule {run.get('schedule_hash') or t('not_measured')}"]
    return "\n".join(lines)


def environment(ctx: Context) -> list[tuple[str, str]]:
    """Who, where, with what."""
    run, t = ctx.analysis.run, ctx.words
    facts = [
        (t("env_run"), run.get("run_id")),
        (t("env_started"), run.get("started_utc")),
        (t("env_finished"), run.get("finished_utc")),
        (t("env_tool"), run.get("tool_version")),
        (t("env_workers"), run.get("workers")),
        (t("env_loop"), run.get("loop")),
        (t("env_exit"), ctx.analysis.verdict.exit_code),
    ]
    facts += [(str(k), v) for k, v in (run.get("versions") or {}).items()]
    facts += [
        (f"{t('env_host')}: {k}", by_suffix(ctx, str(k), v) if str(k).endswith("_bytes") else v)
        for k, v in (run.get("host") or {}).items()
    ]
    facts += [(f"{t('env_target')}: {k}", v) for k, v in masked(run.get("target") or {}).items()]
    return [
        (k, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str))
        for k, v in facts
        if v is not None and v != ""
    ]


def config_text(ctx: Context) -> str:
    """The resolved config as JSON, secrets masked."""
    return json.dumps(masked(ctx.analysis.run.get("config") or {}), ensure_ascii=False, indent=2, default=str)


def glossary(ctx: Context) -> list[dict[str, str]]:
    """Definitions, each with its formula and denominator."""
    return [
        {"term": ctx.words(f"term_{k}"), "formula": FORMULAS.get(k, ""), "text": ctx.words(f"gloss_{k}")}
        for k in GLOSSARY
    ]
