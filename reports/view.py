"""The top of the report in words: verdict, tiles, gates, reasons.

Input: a `Context`. Output: dicts of ready texts for the templates.
Does not: draw, judge, or hold markup.

1. An INVALID verdict gives no capacity figure: no knee, no watermark, no
   sentence that holds one.
2. Every state has a word and a symbol; colour is a third sign.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.records.analysis import Analysis, Gate, Percentiles, Reason, StageAnalysis
from reports import capacity
from reports.charts import Context, middle, spread
from reports.charts_little import WEDGE, gap, tightest
from reports.figures import THIN, finite, number

SYMBOLS = {"pass": "✓", "fail": "✕", "invalid": "!", "warn": "!", "none": "–"}
VERDICT_KINDS = {"PASS": "pass", "FAIL": "fail", "INVALID": "invalid"}
SEVERITY_KINDS = {"invalid": "invalid", "fail": "fail", "warn": "warn", "info": "none"}
GATE_KINDS = {"pass": "pass", "fail": "fail", "invalid": "invalid", "not_measured": "none"}
STAGE_KINDS = {"MET": "pass", "NOT_MET": "fail", "UNDECIDED": "warn", "INVALID": "invalid", "EMPTY": "none"}


def title(ctx: Context) -> str:
    """`model · sweep 5 → 40 req/s`."""
    run, t, f = ctx.analysis.run, ctx.words, ctx.figures
    config = run.get("config") or {}
    rates = sorted({s.offered_qps for s in ctx.stages})
    parts = [str(config.get("model") or (run.get("target") or {}).get("model") or t("model_unknown"))]
    shape = str(run.get("shape") or "")
    if rates:
        span = f.asked(rates[0]) if len(rates) == 1 else f"{f.asked(rates[0])} → {f.asked(rates[-1])}"
        parts.append(f"{t.known('shape_' + shape, shape)} {span} {t('unit_qps')}".strip())
    return " · ".join(parts)


def meta(ctx: Context) -> list[str]:
    """Short facts under the title."""
    run, t, f = ctx.analysis.run, ctx.words, ctx.figures
    target = run.get("target") or {}
    server = " ".join(str(target[k]) for k in ("server", "version") if target.get(k))
    rows = sum(s.planned for s in ctx.stages)
    out = [
        str(run.get("started_utc") or "").replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC"),
        str(run.get("run_id") or ""),
    ]
    if server:
        out.append(server)
    if rows:
        out.append(t("meta_arrivals", n=f.count(rows), stages=len(ctx.stages)))
    missing = len(ctx.planned_stages) - len(ctx.stages)
    if missing:
        out.append(t("meta_not_run", n=missing))
    if run.get("loop"):
        out.append(t("meta_loop", loop=t.known(f"loop_{run['loop']}", str(run["loop"]))))
    if run.get("seed") is not None:
        out.append(t("meta_seed", seed=run["seed"]))
    return [m for m in out if m]


def reason_view(ctx: Context, reason: Reason, said: str = "") -> dict[str, Any]:
    """One line of a reasons list; its text is left out where `said`, the sentence above it, holds it."""
    kind = SEVERITY_KINDS.get(reason.severity, "none")
    text = ctx.words.said(reason.code, reason.params, reason.text)
    return {
        "kind": kind,
        "severity": reason.severity,
        "word": ctx.words.known(f"severity_{reason.severity}", reason.severity),
        "text": "" if text and text in said else text,
        "next_step": ctx.words.said(reason.next_code, reason.next_params, reason.next_step).rstrip(".。 "),
        "reason_id": reason.reason_id,
        "times": 1,
    }


def reasons_view(ctx: Context, reasons: Iterable[Reason], said: str = "") -> list[dict[str, Any]]:
    """The lines of a reasons list; what repeats say alike stands once, with how often."""
    lines: list[dict[str, Any]] = []
    for reason in reasons:
        made = reason_view(ctx, reason, said)
        same = next((x for x in lines if {**x, "times": 1} == made), None)
        if same is None:
            lines.append(made)
        else:
            same["times"] += 1
    return lines


def is_interrupted(analysis: Analysis) -> bool:
    """Whether the run was stopped before its end."""
    return bool(analysis.verdict.interrupted or analysis.run.get("interrupted"))


def marks(ctx: Context) -> list[str]:
    """Words that belong to the verdict: without them it would say more than it can."""
    run, t = ctx.analysis.run, ctx.words
    said = (
        (is_interrupted(ctx.analysis), "mark_interrupted"),
        (bool(run.get("simulated")), "mark_simulated"),
        (bool(run.get("unchecked")), "mark_unchecked"),
        (run.get("loop") == "closed", "mark_closed"),
    )
    return [t(key) for holds, key in said if holds]


def headline(ctx: Context) -> str:
    """`FAIL (INTERRUPTED, SIMULATED)`: the verdict with its marks, for places that hold one line."""
    word, said = ctx.words(f"verdict_{ctx.analysis.verdict.status}"), marks(ctx)
    return f"{word} ({', '.join(said)})" if said else word


def p95_crossing(ctx: Context) -> str:
    """Where the P95 of the whole answer crosses its target: another limit than the knee. Empty where not known."""
    c, f, t = ctx.analysis.capacity, ctx.figures, ctx.words
    value, target = finite(c.p95_crossing_qps), finite(ctx.analysis.slo.get("e2e_target_s"))
    if not ctx.shows_capacity or value is None or target is None or c.p95_crossing_kind != "crossing":
        return ""
    span = f.capacity_span(c.p95_crossing_low_qps, c.p95_crossing_high_qps)
    return t("p95_crossing", value=f"{f.capacity(value)} {t('unit_qps')} {span}".strip(), target=f.duration(target))


def verdict(ctx: Context) -> dict[str, Any]:
    """The bar at the top."""
    v, t = ctx.analysis.verdict, ctx.words
    kind = VERDICT_KINDS.get(v.status, "invalid")
    sentence = verdict_sentence(ctx)
    undecided = kind == "pass" and {s.verdict for s in target_stages(ctx)} == {"UNDECIDED"}
    notes = [t("verdict_note_channel") if v.exit_code == 3 else t(f"verdict_note_{'thin' if undecided else kind}")]
    if ctx.shows_capacity and v.exit_code != 3:
        c, f = ctx.analysis.capacity, ctx.figures
        low, high = finite(c.watermark_low_qps), finite(c.watermark_high_qps)
        known = low is not None and high is not None
        notes.append(t("verdict_safe", low=f.capacity(low), high=f.capacity(high)) if known else t("verdict_safe_none"))
    if is_interrupted(ctx.analysis):
        notes.append(t("note_interrupted"))
    if ctx.analysis.run.get("simulated"):
        notes.append(t("note_simulated"))
    if ctx.analysis.run.get("unchecked"):
        notes.append(t("note_unchecked"))
    if other := _other_slo(ctx):
        notes.append(t("note_other_slo", list=other))
    return {
        "kind": kind,
        "word": t(f"verdict_{v.status}"),
        "sentence": sentence,
        "notes": notes,
        "marks": marks(ctx),
        "headline": headline(ctx),
        "reasons": reasons_view(ctx, (r for r in v.reasons if r not in ctx.analysis.warnings), sentence),
        "exit_code": v.exit_code,
    }


def _other_slo(ctx: Context) -> str:
    """`TTFT 500 ms (run: 800 ms)` for every deadline and target that is not the one of the run's config."""
    config, f = ctx.analysis.run.get("config"), ctx.figures
    asked = config.get("slo") if isinstance(config, dict) else None
    out = []
    for key, own_key, name in (
        ("ttft_deadline_s", "ttft_deadline_ms", "TTFT"),
        ("tpot_deadline_s", "tpot_deadline_ms", "TPOT"),
        ("e2e_target_s", "p95_target_ms", "E2E p95"),
        ("attainment_target", "attainment_target", metric_name(ctx, "attainment")),
    ):
        own = finite(asked.get(own_key)) if isinstance(asked, dict) else None
        used = finite(ctx.analysis.slo.get(key))
        own = own / 1e3 if own is not None and own_key.endswith("_ms") else own
        if own is not None and used is not None and abs(own - used) > 1e-9:
            show = f.duration if key.endswith("_s") else f.share
            out.append(ctx.words("other_slo", name=name, used=show(used), own=show(own)))
    return ", ".join(out)


def verdict_sentence(ctx: Context) -> str:
    """The analysis' own sentence in this language; without its code one made from its numbers."""
    v, t, f = ctx.analysis.verdict, ctx.words, ctx.figures
    if v.sentence and (t.lang == "en" or v.code):
        return t.said(v.code, v.params, v.sentence)
    share = _share_at_target(ctx)
    if v.status == "INVALID" or share is None:
        return t(f"sentence_{v.status}_plain")
    return t(
        f"sentence_{v.status}",
        qps=f.asked(ctx.analysis.target_qps),
        share=f.share(share),
        target=f.share(ctx.analysis.slo.get("attainment_target"), 1),
    )


def target_stages(ctx: Context) -> list[StageAnalysis]:
    """The stages run at the target rate."""
    target = finite(ctx.analysis.target_qps)
    return [] if target is None else [s for s in ctx.stages if abs(s.offered_qps - target) < 1e-9]


def _share_at_target(ctx: Context) -> float | None:
    return middle(s.attainment_joint.value for s in target_stages(ctx) if s.verdict != "INVALID")


def tiles(ctx: Context) -> list[dict[str, Any]]:
    """The eight figures that a reader looks for first."""
    return [
        _safe(ctx),
        _knee(ctx),
        _attainment(ctx),
        _goodput(ctx),
        _requests(ctx),
        _little(ctx),
        _repeats(ctx),
        _sender(ctx),
    ]


def _tile(
    label: str, value: str, detail: str = "", unit: str = "", kind: str = "", words: bool = False
) -> dict[str, Any]:
    return {"label": label, "value": value, "unit": unit, "detail": detail, "kind": kind, "words": words}


def _no_figure(ctx: Context, label: str) -> dict[str, Any]:
    return _tile(label, ctx.words("no_figure"), ctx.words("no_figure_why"), words=True)


def _safe(ctx: Context) -> dict[str, Any]:
    t, f, c = ctx.words, ctx.figures, ctx.analysis.capacity
    if not ctx.shows_capacity:
        return _no_figure(ctx, t("tile_safe"))
    low, high = finite(c.watermark_low_qps), finite(c.watermark_high_qps)
    if low is None or high is None:
        return _tile(t("tile_safe"), t("not_found"), t("tile_safe_missing"), words=True)
    bound = finite(c.knee_low_qps) if finite(c.knee_low_qps) is not None else low / 0.7
    detail = t("tile_safe_detail", low=f.capacity(bound))
    return _tile(t("tile_safe"), capacity.safe_rate(ctx), detail, t("unit_qps"), "lead-tile")


def _knee(ctx: Context) -> dict[str, Any]:
    t, f, c = ctx.words, ctx.figures, ctx.analysis.capacity
    if not ctx.shows_capacity:
        return _no_figure(ctx, t("tile_knee"))
    figure = capacity.knee(ctx)
    if not figure.value:
        return _tile(t("tile_knee"), t("not_found"), t("tile_knee_none"), words=True)
    if c.knee_kind == "crossing":
        why = t("tile_knee_alone", target=f.share(c.attainment_target, 1))
        if c.grows_qps is not None:
            why = t("tile_knee_grows", rate=f.rate(c.grows_qps))
        detail = t("tile_knee_detail", interval=figure.interval, why=why) if figure.interval else why
    elif c.knee_kind == "at_least":
        top = finite(c.knee_qps) if finite(c.knee_qps) is not None else finite(c.last_met_qps)
        detail = t(_if_decided(ctx, top, "tile_knee_at_least", "tile_knee_at_least_undecided"))
        low = finite(c.knee_low_qps)
        if low is not None and top is not None and low < top * (1 - 1e-9):
            detail = t("tile_knee_bound", held=detail, top=f.asked(top), low=f.capacity(low))
    else:
        detail = t("tile_knee_below")
    return _tile(t("tile_knee"), figure.value, detail, t("unit_qps"))


def _if_decided(ctx: Context, qps: float | None, met: str, undecided: str) -> str:
    """The key `met`, or `undecided` for a rate at or above the target that no stage had the arrivals to decide."""
    verdicts = {s.verdict for s in ctx.trusted() if qps is not None and abs(s.offered_qps - qps) < 1e-9}
    return undecided if "UNDECIDED" in verdicts and "MET" not in verdicts else met


def _attainment(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    label = t("tile_attainment")
    if not ctx.shows_capacity:
        return _no_figure(ctx, label)
    asked = target_stages(ctx)
    stages = [s for s in asked if s.verdict != "INVALID"]
    if asked and not stages:
        return _tile(label, t("no_figure"), t("tile_attainment_left_out"), words=True)
    if not stages:
        return _tile(label, t("not_measured"), t("tile_attainment_missing"), words=True)
    share = _share_at_target(ctx)
    one = min(stages, key=lambda s: abs((s.attainment_joint.value or 0) - (share or 0)))
    interval = f.interval(one.attainment_joint.low, one.attainment_joint.high, f.share)
    target = finite(ctx.analysis.slo.get("attainment_target"))
    kind = "" if share is None or target is None else "pass" if share >= target else "fail"
    return _tile(
        label,
        f.share(share),
        t(
            "tile_attainment_detail",
            qps=f.asked(ctx.analysis.target_qps),
            interval=interval,
            n=f.count(one.attainment_joint.n),
        ),
        kind=kind,
        words=share is None,
    )


def _goodput(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    if not ctx.shows_capacity:
        return _no_figure(ctx, t("tile_goodput"))
    held = finite(ctx.analysis.capacity.last_met_qps)
    group = [s for s in ctx.trusted() if held is not None and abs(s.offered_qps - held) < 1e-9]
    if not group:
        return _tile(t("tile_goodput"), t("not_found"), t("tile_goodput_missing"), words=True)
    return _tile(
        t(_if_decided(ctx, held, "tile_goodput", "tile_goodput_undecided")),
        f.rate(spread(group, lambda s: s.goodput_qps)),
        t("tile_goodput_detail", qps=f.asked(held), tps=f.count(spread(group, lambda s: s.output_tps))),
        t("unit_qps"),
    )


def _requests(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    total = sum(s.planned for s in ctx.stages)
    ok = sum(s.counts.get("ok", 0) for s in ctx.stages)
    failed = total - ok
    return _tile(t("tile_requests"), f.count(total), t("tile_requests_detail", ok=f.count(ok), failed=f.count(failed)))


def _little(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    steady = [(abs(g), s) for s in ctx.stages if s.stationarity == "STABLE" and (g := gap(s.little)) is not None]
    if not steady:
        return _tile(t("tile_little"), t("not_measured"), t("tile_little_missing"), words=True)
    worst, stage = max(steady, key=lambda pair: pair[0])
    return _tile(
        t("tile_little"),
        f.share(worst, 1),
        t("tile_little_detail", n=len(steady), qps=f.asked(stage.offered_qps), tight=_tight(ctx)),
        kind="pass" if worst <= WEDGE else "warn",
    )


def _tight(ctx: Context) -> str:
    """The widest gap of the tight check in stationary stages, with its limit."""
    worst = tightest(ctx)
    if worst is None:
        return ctx.words("little_tight_none")
    return ctx.words("little_tight", bias=ctx.figures.share(worst[0], 2), limit=ctx.figures.share(worst[1], 1))


def _repeats(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    known = [r for r in ctx.analysis.repeatability if finite(r.range_ratio) is not None]
    if not known:
        why = t("tile_repeats_missing")
        counted = [(getattr(r, "valid", 0), n) for r in ctx.analysis.repeatability if (n := getattr(r, "repeats", 0))]
        if counted:
            valid, n = max(counted, key=lambda pair: (pair[1], -pair[0]))
            why = t("tile_repeats_none", n=valid, all=n)
        elif again := _repeated_stages(ctx):  # of an analysis that did not count them
            valid = sum(s.verdict not in ("INVALID", "EMPTY") for s in again)
            why = t("tile_repeats_none", n=valid, all=len(again))
        return _tile(t("tile_repeats"), t("not_measured"), why, words=True)
    worst = max(known, key=lambda r: r.range_ratio or 0)
    return _tile(
        t("tile_repeats"),
        f.share(worst.range_ratio, 1),
        t(
            "tile_repeats_detail",
            n=len(worst.values),
            statistic=statistic_name(ctx, worst.statistic),
            qps=f.asked(worst.offered_qps),
            limit=f.share(worst.limit_ratio, 0),
        ),
        kind="warn" if any(r.ok is False for r in known) else "pass",
    )


def _repeated_stages(ctx: Context) -> list[StageAnalysis]:
    """The stages of the rate that was run most often, when that is more than once."""
    groups: dict[float, list[StageAnalysis]] = {}
    for stage in ctx.stages:
        groups.setdefault(round(stage.offered_qps, 6), []).append(stage)
    most = max(groups.values(), key=len, default=[])
    return most if len(most) > 1 else []


def _sender(ctx: Context) -> dict[str, Any]:
    t, f = ctx.words, ctx.figures
    judged = [s.stimulus.ok for s in ctx.stages if s.stimulus.ok is not None]
    lags = [v for s in ctx.stages if (v := finite(s.stimulus.send_lag_p99_s)) is not None]
    if ctx.analysis.run.get("simulated"):
        return _tile(t("tile_sender"), t("not_measured"), t("tile_sender_simulated"), words=True)
    if not judged:
        return _tile(t("tile_sender"), t("not_measured"), t("tile_sender_missing"), words=True)
    good = all(judged)
    if not good and any(judged):
        return _tile(
            t("tile_sender"),
            t("sender_partly", ok=sum(judged), n=len(judged)),
            t("tile_sender_detail", lag=f.duration(max(lags)) if lags else t("not_measured")),
            kind="warn",
            words=True,
        )
    detail = t("tile_sender_detail", lag=f.duration(max(lags)) if lags else t("not_measured"))
    return _tile(
        t("tile_sender"),
        f"{SYMBOLS['pass' if good else 'invalid']} {t('sender_ok' if good else 'sender_not')}",
        detail,
        kind="pass" if good else "warn",
        words=True,
    )


def statistic_name(ctx: Context, statistic: str) -> str:
    """`ttft_p95_s` as `TTFT p95`; unknown names as they are."""
    head, _, tail = statistic.removesuffix("_s").removesuffix("_qps").removesuffix("_ratio").rpartition("_")
    if head and tail in ("p50", "p90", "p95", "p99", "mean", "maximum", "value"):
        return f"{metric_name(ctx, head)} {tail}"
    return metric_name(ctx, statistic)


def metric_name(ctx: Context, metric: str) -> str:
    """A metric's printed name; unknown ones as they are."""
    return ctx.words.known(f"metric_{metric.removesuffix('_s').removesuffix('_qps')}", metric)


def withheld_text(ctx: Context, p: Percentiles, name: str) -> str:
    """Why a percentile is not printed, in this language."""
    said = p.withheld_said.get(name) or {}
    return ctx.words.said(said.get("code", ""), said.get("params"), p.withheld[name])


def p95_interval(ctx: Context, p: Percentiles | None) -> str:
    """The 95 % interval of a p95, or why there is none."""
    t, f = ctx.words, ctx.figures
    if p is None or not p.n:
        return t("not_measured")
    if "p95" in p.withheld:
        return t("interval_withheld", why=withheld_text(ctx, p, "p95"))
    if number(p.p95_low) is not None and number(p.p95_high) is not None:
        return f.interval(p.p95_low, p.p95_high, f.duration)
    if number(p.p95) == float("inf"):
        return t("interval_endless")
    if p.effective_n is None:
        return t("interval_few", n=f.count(p.n))
    return t("interval_unreliable", n=f.count(p.n), worth=f.count(min(p.n, p.effective_n)))


def _gate_unit(gate: Gate) -> str:
    return "share" if gate.metric.startswith("attainment") or gate.metric.endswith("ratio") else gate.unit


def gate_view(ctx: Context, gate: Gate) -> dict[str, Any]:
    """One row of the gates table."""
    t, f = ctx.words, ctx.figures
    measured, limit = number(gate.measured), number(gate.limit)
    elsewhere = gate.status == "not_measured" and gate.measured_qps is not None
    margin = ""
    if not elsewhere and finite(measured) is not None and finite(limit):
        margin = f.signed_share(
            (limit - measured) / limit if gate.operator.startswith("<") else (measured - limit) / limit
        )
    found = f.measure(measured, unit := _gate_unit(gate))
    if gate.metric == "knee_qps" and measured is not None:  # as tile and sentence round it
        least = "≥ " if ctx.analysis.capacity.knee_kind == "at_least" else ""
        found = f"{least}{f.capacity(measured)}{THIN}{t('unit_qps')}"
    statistic = "" if gate.statistic in ("", "value") else f" {gate.statistic}"
    at = (
        t("at_target", qps=f.asked(ctx.analysis.target_qps))
        if gate.at == "target"
        else t("at_rate", qps=f.asked(gate.at))
        if number(gate.at) is not None
        else t.known(f"at_{gate.at}", f"{gate.at}")
    )
    return {
        "name": f"{metric_name(ctx, gate.metric)}{statistic}",
        "text": t.said(gate.code, gate.params, gate.text) if t.lang == "en" or gate.code else "",
        "at": at,
        "limit": f"{gate.operator.replace('<=', '≤').replace('>=', '≥')} {f.measure(limit, unit)}",
        # judged without its number: there is one, but too few samples to print it (the text says so)
        "measured": t("withheld")
        if measured is None and gate.status in ("pass", "fail")
        else found + (f" @{f.asked(gate.measured_qps)}" if elsewhere else ""),
        "margin": margin,
        "kind": GATE_KINDS.get(gate.status, "none"),
        "word": t.known(f"gate_{gate.status}", gate.status)
        + (f" ({t('gate_warn_only')})" if gate.severity == "warn" else ""),
    }
