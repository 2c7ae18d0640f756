"""The capacity charts: latency, attainment, rates, and token speed against the offered rate.

Input: a `Context`. Output: `Chart` objects. Does not: find the knee.
"""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from bench.records.analysis import StageAnalysis
from reports import capacity
from reports.charts import (
    HALF,
    PHONE,
    PHONE_HEIGHT,
    Chart,
    Context,
    Key,
    capacity_marks,
    compose,
    cut_band,
    data,
    encodings,
    log_scale,
    marked_line,
    middle,
    rate_axis,
    rate_list,
    rule_y,
    spread,
)
from reports.figures import finite, number
from reports.labels import point_names
from reports.themes import PLAIN, ink
from reports.view import p95_interval

STATISTICS = ("p50", "p95", "p99")
STAT_SIGNS = {"p50": ((7, 3), "circle"), "p95": ((), "square"), "p99": ((2, 3), "triangle-up")}
METRICS = {
    "ttft": ("ttft_s", "ttft_deadline_s", 1e3),
    "tpot": ("tpot_s", "tpot_deadline_s", 1e3),
    "e2e": ("e2e_s", "e2e_target_s", 1.0),
}


def _value(stage: StageAnalysis, metric: str, statistic: str) -> float | None:
    p = stage.latency.get(metric)
    if p is None or not p.n or statistic in p.withheld:
        return None
    return number(getattr(p, statistic))


def latency(ctx: Context, name: str) -> Chart:
    """p50, p95, p99 of one metric over offered rate, with its SLO line (log scale)."""
    metric, deadline_key, factor = METRICS[name]
    t, f = ctx.words, ctx.figures
    unit = "ms" if factor > 1 else "s"
    points: list[dict[str, Any]] = []
    endless: list[dict[str, Any]] = []
    band: list[dict[str, Any]] = []
    dots: list[dict[str, Any]] = []
    piece = dict.fromkeys(STATISTICS, 0)  # a line is broken where its percentile is withheld
    for qps, group in ctx.by_rate():
        steady = all(s.stationarity != "UNSTABLE" for s in group)
        for row, statistic in enumerate(STATISTICS):
            value = spread(group, lambda s, st=statistic: _value(s, metric, st))
            if value is None:
                piece[statistic] += 1
                continue
            base = {
                "x": qps,
                "stat": statistic,
                "piece": piece[statistic],
                "steady": steady,
                "n": sum(s.planned for s in group),
            }
            if math.isinf(value):
                endless.append({**base, "row": row})
            elif value > 0:
                points.append({**base, "y": value * factor, "text": f.duration(value)})
            if statistic == "p95" and len(group) > 1:
                dots += [
                    {"x": qps, "y": v * factor}
                    for s in group
                    if (v := finite(_value(s, metric, "p95"))) is not None and v > 0
                ]
        low = middle(s.latency[metric].p95_low for s in group if metric in s.latency)
        high = middle(s.latency[metric].p95_high for s in group if metric in s.latency)
        if finite(low) and high is not None and low > 0:  # an infinite upper end is cut to the axis below
            band.append({"x": qps, "low": low * factor, "high": high * factor})
    deadline = finite(ctx.analysis.slo.get(deadline_key))
    scale, ticks = log_scale(
        [p["y"] for p in points] + [d["y"] for d in dots] + [deadline * factor if deadline else None],
        room=1.6,  # so that a band around the lowest and the highest point can be seen
        head=0.16 if endless else 0.0,
    )
    band = cut_band(band, *scale.to_dict()["domain"])
    y = alt.Y(
        "y:Q",
        title=t("axis_latency", metric=name.upper(), unit=unit),
        scale=scale,
        axis=alt.Axis(format=",~f", values=ticks),
    )
    drawn_stats = {p["stat"] for p in points + endless}
    keys = [Key(s, name, *STAT_SIGNS[s]) for s in STATISTICS if s in drawn_stats]
    signs = encodings("stat", keys)
    if len(band) > 1:
        keys.append(Key(t("key_p95_band"), name, area=True, opacity=0.16))
    dash, shape = signs["strokeDash"], signs["shape"]
    behind, front = capacity_marks(ctx)
    layers: list[alt.Chart] = list(behind)
    if len(band) > 1:
        layers.append(
            alt.Chart(data(band))
            .mark_area(color=ink(name), opacity=0.16)
            .encode(x=rate_axis(ctx), y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q"))
        )
    if dots:
        layers.append(
            alt.Chart(data(dots)).mark_circle(color=ink(name), opacity=0.45, size=16).encode(x=rate_axis(ctx), y=y)
        )
    drawn = alt.Chart(data(points))
    layers.append(drawn.mark_line(color=ink(name)).encode(x=rate_axis(ctx), y=y, strokeDash=dash, detail="piece:N"))
    if deadline:
        layers += rule_y(deadline * factor, t("label_slo", value=f.duration(deadline)), "slo", [8, 4], "left")
    layers += front
    layers.append(
        drawn.mark_point(size=52, stroke=ink(name), strokeWidth=1.8, filled=True).encode(
            x=rate_axis(ctx),
            y=y,
            shape=shape,
            fill=alt.FillValue(ink("panel"), condition={"test": "datum.steady", "value": ink(name)}),
            tooltip=[
                alt.Tooltip("x:Q", title=t("axis_offered")),
                alt.Tooltip("stat:N", title=name.upper()),
                alt.Tooltip("text:N", title=t("value")),
                alt.Tooltip("n:Q", title="n"),
            ],
        )
    )
    if endless:
        for row, statistic in enumerate(STATISTICS):
            mine = [e for e in endless if e["stat"] == statistic]
            if mine:
                layers.append(
                    alt.Chart(data(mine))
                    .mark_point(size=46, stroke=ink(name), fill=ink("panel"))
                    .encode(
                        x=rate_axis(ctx),
                        y=alt.YValue(9 + 13 * row),
                        shape=shape,
                        tooltip=[
                            alt.Tooltip("x:Q", title=t("axis_offered")),
                            alt.Tooltip("stat:N", title=t("did_not_finish")),
                        ],
                    )
                )
        first = min(e["x"] for e in endless)
        layers.append(
            alt.Chart(data([{"x": first, "text": "∞ " + t("did_not_finish")}]))
            .mark_text(align="right", dx=-10, color=ink("muted"), fontSize=11)
            .encode(
                x=rate_axis(ctx),
                y=alt.YValue(9 + 13 * max(e["row"] for e in endless if e["x"] == first)),
                text=alt.Text("text:N"),
            )
        )
    rows = [
        [f.asked(s.offered_qps), str(s.repeat + 1), f.count(s.latency[metric].n if metric in s.latency else None)]
        + [f.percentile(s.latency.get(metric), st) for st in STATISTICS]
        + [p95_interval(ctx, s.latency.get(metric))]
        for s in ctx.stages
    ]
    return Chart(
        f"latency-{name}",
        t("chart_latency_title", metric=name.upper()),
        ctx.caption(_latency_caption(ctx, name, metric, deadline)),
        compose(layers, 340),
        [t("col_offered"), t("col_repeat"), "n", "p50", "p95", "p99", t("col_p95_interval")],
        rows,
        label=name.upper(),
        keys=keys,
        phone=True,
    )


def _latency_caption(ctx: Context, name: str, metric: str, deadline: float | None) -> str:
    t, f = ctx.words, ctx.figures
    curve = [(qps, spread(group, lambda s: _value(s, metric, "p95"))) for qps, group in ctx.by_rate()]
    known = [(qps, value) for qps, value in curve if value is not None]
    parts = []
    if not known:
        held = any(metric in s.latency and s.latency[metric].n for s in ctx.trusted())
        return t("cap_latency_withheld" if held else "cap_latency_none", metric=name.upper())
    if deadline is None:
        parts.append(
            t("cap_latency_range", metric=name.upper(), low=f.duration(known[0][1]), high=f.duration(known[-1][1]))
        )
    else:
        over = [qps for qps, value in known if value > deadline]
        under = [qps for qps, value in known if value <= deadline and (not over or qps < over[0])]
        key = "cap_latency_crosses" if over and under else "cap_latency_above" if over else "cap_latency_below"
        parts.append(
            t(
                key,
                metric=name.upper(),
                slo=f.duration(deadline),
                low=f.asked(under[-1]) if under else "",
                high=f.asked(over[0] if over else known[-1][0]),
            )
        )
    withheld = [
        qps
        for qps, group in ctx.by_rate()
        if any(metric in s.latency and s.latency[metric].n for s in group)
        and spread(group, lambda s: _value(s, metric, "p95")) is None
    ]
    if withheld:
        parts.append(t("cap_latency_gap", list=rate_list(withheld)))
    if not any(s.latency[metric].p95_low is not None for s in ctx.trusted() if metric in s.latency):
        parts.append(t("cap_no_interval"))
    if any(s.stationarity == "UNSTABLE" for s in ctx.stages):
        parts.append(t("cap_hollow"))
    if ctx.repeated():
        parts.append(t("cap_repeats"))
    return " ".join(parts)


CLAUSES = {
    "joint": ("attainment_joint", (), "circle"),
    "ttft": ("attainment_ttft", (7, 3), "square"),
    "tpot": ("attainment_tpot", (2, 3), "triangle-up"),
}


def attainment(ctx: Context, per_10k: bool) -> Chart:
    """Share of all arrivals that meet each clause, or the misses per 10,000 on a log-like scale."""
    t, f = ctx.words, ctx.figures
    names = {"joint": t("clause_joint"), "ttft": "TTFT", "tpot": "TPOT"}

    def place(share: float) -> float:
        return (1 - share) * 1e4 if per_10k else share

    points: list[dict[str, Any]] = []
    for qps, group in ctx.by_rate():
        for clause, (attribute, *_rest) in CLAUSES.items():
            intervals = [getattr(s, attribute) for s in group]
            share = middle(i.value for i in intervals)
            if share is None:
                continue
            low, high = middle(i.low for i in intervals), middle(i.high for i in intervals)
            points.append(
                {
                    "x": qps,
                    "clause": names[clause],
                    "y": place(share),
                    "text": f.share(share),
                    "key": clause,
                    "low": place(low if low is not None else share),
                    "high": place(high if high is not None else share),
                    "n": sum(i.n for i in intervals),
                }
            )
    survivors = [
        {"x": qps, "y": place(v), "clause": t("clause_survivors")}
        for qps, group in ctx.by_rate()
        if (v := finite(spread(group, lambda s: s.attainment_survivors))) is not None
    ]
    if per_10k:
        scale = alt.Scale(type="symlog", constant=1, domain=[0, 10000])
        y = alt.Y(
            "y:Q", title=t("axis_misses"), scale=scale, axis=alt.Axis(values=[0, 1, 10, 100, 1000, 10000], format=PLAIN)
        )
    else:
        scale = alt.Scale(domain=[0, 1])
        y = alt.Y("y:Q", title=t("axis_attainment"), scale=scale, axis=alt.Axis(format=".0%", tickCount=5))
    keys = [Key(names[c], c, CLAUSES[c][1], CLAUSES[c][2]) for c in CLAUSES] + [
        Key(t("clause_survivors"), "theory", (1, 5))
    ]
    signs = encodings("clause", keys)
    behind, front = capacity_marks(ctx)
    base, x = alt.Chart(data(points)), rate_axis(ctx)
    layers = list(behind)
    for clause in CLAUSES:
        mine = [{k: p[k] for k in ("x", "low", "high")} for p in points if p["key"] == clause]
        if mine:
            layers.append(
                alt.Chart(data(mine))
                .mark_area(opacity=0.15, color=ink(clause))
                .encode(x=x, y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q"))
            )
    if survivors:
        layers.append(
            alt.Chart(data(survivors))
            .mark_line(strokeWidth=1.6)
            .encode(x=x, y=y, color=signs["color"], strokeDash=signs["strokeDash"])
        )
    layers.append(
        base.mark_line().encode(
            x=x,
            y=y,
            color=signs["color"],
            strokeDash=signs["strokeDash"],
            strokeWidth=alt.StrokeWidthValue(1.8, condition={"test": "datum.key === 'joint'", "value": 3}),
        )
    )
    target = finite(ctx.analysis.slo.get("attainment_target"))
    if target is not None:
        layers += rule_y(
            place(target), t("label_target", value=f.share(target, 1)), "slo", [8, 4], "left", below=not per_10k
        )
    layers += front
    layers.append(
        base.mark_point(filled=True, opacity=1).encode(
            x=x,
            y=y,
            color=signs["color"],
            shape=signs["shape"],
            size=alt.SizeValue(34, condition={"test": "datum.key === 'joint'", "value": 120}),
            tooltip=[
                alt.Tooltip("x:Q", title=t("axis_offered")),
                alt.Tooltip("clause:N", title=t("col_clause")),
                alt.Tooltip("text:N", title=t("value")),
                alt.Tooltip("n:Q", title="n"),
            ],
        )
    )
    rows = [
        [f.asked(s.offered_qps), str(s.repeat + 1), f.count(s.attainment_joint.n)]
        + [
            f"{f.share(i.value)} {f.interval(i.low, i.high, f.share)}".strip()
            for i in (s.attainment_joint, s.attainment_ttft, s.attainment_tpot)
        ]
        + [f.share(s.attainment_survivors), _misses(s)]
        for s in ctx.stages
    ]
    return Chart(
        "attainment-misses" if per_10k else "attainment-share",
        t("chart_attainment_title"),
        ctx.caption(_attainment_caption(ctx, target)),
        compose(layers, 320),
        [
            t("col_offered"),
            t("col_repeat"),
            "n",
            t("clause_joint"),
            "TTFT",
            "TPOT",
            t("clause_survivors"),
            t("axis_misses"),
        ],
        rows,
        label=t("tab_misses") if per_10k else t("tab_share"),
        keys=keys,
        phone=True,
    )


def _misses(stage: StageAnalysis) -> str:
    value = stage.attainment_joint.value
    return "" if value is None else f"{(1 - value) * 1e4:,.0f}"


def _attainment_caption(ctx: Context, target: float | None) -> str:
    t, f = ctx.words, ctx.figures
    curve = [(qps, spread(group, lambda s: s.attainment_joint.value)) for qps, group in ctx.by_rate()]
    known = [(q, v) for q, v in curve if v is not None]
    if not known or target is None:
        return t("cap_attainment_none")
    below = [q for q, v in known if v < target]
    above = [q for q, v in known if v >= target and (not below or q < below[0])]
    key = "cap_attainment_crosses" if below and above else "cap_attainment_below" if below else "cap_attainment_holds"
    parts = [
        t(
            key,
            target=f.share(target, 1),
            low=f.asked(above[-1]) if above else "",
            high=f.asked(below[0] if below else known[-1][0]),
        )
    ]
    gaps = [
        (s.attainment_survivors - s.attainment_joint.value, s)
        for s in ctx.trusted()
        if s.attainment_survivors is not None and s.attainment_joint.value is not None
    ]
    if gaps:
        gap, stage = max(gaps, key=lambda pair: pair[0])
        if gap >= 0.005:
            parts.append(
                t(
                    "cap_attainment_survivors",
                    qps=f.asked(stage.offered_qps),
                    all=f.share(stage.attainment_joint.value),
                    survivors=f.share(stage.attainment_survivors),
                )
            )
    methods = {s.attainment_joint.method for s in ctx.trusted() if s.attainment_joint.n}
    names = sorted({m.split(" on ")[0] for m in methods if m})
    parts.append(t("cap_band", method=", ".join(names) or "–"))
    if any(" effective " in m for m in methods):
        parts.append(t("cap_band_effective"))
    return " ".join(parts)


def rates(ctx: Context) -> Chart:
    """Offered, completed and goodput per second, with the diagonal of a service that keeps up."""
    t, f = ctx.words, ctx.figures
    names = [t("rate_completed"), t("rate_goodput")]
    points: list[dict[str, Any]] = []
    area: list[dict[str, Any]] = []
    for qps, group in ctx.by_rate():
        done, good = spread(group, lambda s: s.completed_qps), spread(group, lambda s: s.goodput_qps)
        for name, value in zip(names, (done, good), strict=True):
            if value is not None:
                points.append({"x": qps, "kind": name, "y": value, "text": f.rate(value)})
        if done is not None and good is not None:
            area.append({"x": qps, "low": min(good, done), "high": done})
    top = ctx.top_qps
    x = rate_axis(ctx)
    highest = max([top] + [p["y"] for p in points])
    y = alt.Y(
        "y:Q",
        title=t("axis_rate"),
        scale=alt.Scale(domain=[0, highest], nice=False, clamp=True),
        axis=alt.Axis(tickCount=6, format=",~f"),
    )
    keys = [
        Key(t("rate_offered"), "theory", (2, 4)),
        Key(names[0], "e2e", (7, 3), "square"),
        Key(names[1], "joint", (), "circle"),
        Key(t("rate_waste"), "waste", area=True),
    ]
    signs = encodings("kind", keys)
    behind, front = capacity_marks(ctx)
    diagonal = alt.Chart(data([{"x": 0, "y": 0, "kind": keys[0].label}, {"x": top, "y": top, "kind": keys[0].label}]))
    base = alt.Chart(data(points))
    tips = [
        alt.Tooltip("x:Q", title=t("axis_offered")),
        alt.Tooltip("kind:N", title=t("col_kind")),
        alt.Tooltip("text:N", title=t("axis_rate")),
    ]
    layers = [
        *behind,
        alt.Chart(data(area))
        .mark_area(color=ink("waste"), opacity=0.75)
        .encode(x=x, y=alt.Y("low:Q"), y2=alt.Y2("high:Q")),
        diagonal.mark_line(strokeWidth=1.6).encode(x=x, y=y, color=signs["color"], strokeDash=signs["strokeDash"]),
        *front,
        *_throughput_limits(ctx, highest),
        *marked_line(base, x, y, signs, tips),
    ]
    rows = [
        [
            f.asked(s.offered_qps),
            str(s.repeat + 1),
            f.rate(s.arrival_qps),
            f.rate(s.completed_qps),
            f.rate(s.goodput_qps),
            f.count(s.output_tps),
        ]
        for s in ctx.stages
    ]
    return Chart(
        "rates",
        t("chart_rates_title"),
        ctx.caption(_rates_caption(ctx)),
        compose(layers),
        [t("col_offered"), t("col_repeat"), t("col_arrived"), t("rate_completed"), t("rate_goodput"), t("col_tokens")],
        rows,
        keys=keys,
        width=HALF,
        phone=True,
    )


def _throughput_limits(ctx: Context, highest: float) -> list[alt.Chart]:
    """Level lines at the flattening point and at lambda_max, where they lie on the axis: both limit what finishes."""
    t, f = ctx.words, ctx.figures
    flat, top = capacity.flattening_qps(ctx), capacity.lambda_max(ctx)[0]
    layers: list[alt.Chart] = []
    if flat is not None and 0 < flat <= highest:
        layers += rule_y(flat, t("label_flattening", value=f.capacity(flat)), "e2e", [2, 3], "left", below=True)
    if top is not None and 0 < top <= highest:
        layers += rule_y(top, t("label_lambda_max", value=f.capacity(top)), "theory", [1, 3], "left")
    return layers


def _rates_caption(ctx: Context) -> str:
    t, f = ctx.words, ctx.figures
    if not any(s.completed_qps for s in ctx.trusted()):
        return t("cap_rates_none")
    best = max(ctx.trusted(), key=lambda s: s.goodput_qps)
    waste = max(ctx.trusted(), key=lambda s: s.completed_qps - s.goodput_qps)
    parts = [t("cap_rates_best", good=f.rate(best.goodput_qps), qps=f.asked(best.offered_qps))]
    if waste.completed_qps - waste.goodput_qps > 0.05 * max(waste.completed_qps, 1e-9):
        parts.append(
            t(
                "cap_rates_waste",
                qps=f.asked(waste.offered_qps),
                done=f.rate(waste.completed_qps),
                good=f.rate(waste.goodput_qps),
            )
        )
    if any(s.goodput_qps > s.completed_qps for s in ctx.trusted()):
        parts.append(t("cap_rates_sets"))
    if flat := capacity.flattening_qps(ctx):
        parts.append(t("cap_rates_flat", value=f.capacity(flat)))
    return " ".join(parts)


def token_speed(ctx: Context) -> Chart | None:
    """Output tokens per second of the service against the speed one user sees; None without TPOT."""
    t, f = ctx.words, ctx.figures
    points = []
    for qps, group in ctx.by_rate():
        tpot = finite(spread(group, lambda s: _value(s, "tpot_s", "p50")))
        tps = finite(spread(group, lambda s: s.output_tps))
        if tpot and tps:
            points.append({"x": 1 / tpot, "y": tps, "qps": qps, "text": f"{f.asked(qps)}"})
    if len(points) < 2:
        return None
    base = alt.Chart(data(points))
    slow, quick, tall = (pick(p[k] for p in points) for pick, k in ((min, "x"), (max, "x"), (max, "y")))
    room = 0.08 * (quick - slow) or 0.5 * quick
    slow, quick, tall = slow - room, quick + room, 1.1 * tall
    x = alt.X(
        "x:Q",
        title=t("axis_user_speed"),
        scale=alt.Scale(domain=[slow, quick], nice=False),
        axis=alt.Axis(format=",~f", tickCount=6),
    )
    y = alt.Y(
        "y:Q",
        title=t("axis_tps"),
        scale=alt.Scale(domain=[0, tall], nice=False),
        axis=alt.Axis(format=",~f", tickCount=5),
    )
    layers = [
        base.mark_line(color=ink("theory"), strokeWidth=1.4, strokeDash=[4, 3]).encode(
            x=x, y=y, order=alt.Order("qps:Q")
        ),
        base.mark_point(size=60, filled=True, fill=ink("tpot"), opacity=1).encode(
            x=x,
            y=y,
            tooltip=[
                alt.Tooltip("qps:Q", title=t("axis_offered")),
                alt.Tooltip("x:Q", title=t("axis_user_speed"), format=".1f"),
                alt.Tooltip("y:Q", title=t("axis_tps"), format=",.0f"),
            ],
        ),
    ]
    placed = [
        ((p["x"] - slow) / (quick - slow) * PHONE, (1 - p["y"] / tall) * PHONE_HEIGHT, p["text"]) for p in points
    ]
    layers += point_names(points, placed, x, y, "text")
    deadline = finite(ctx.analysis.slo.get("tpot_deadline_s"))
    rows = [[f.asked(p["qps"]), f.plain(p["x"], 1), f.count(p["y"])] for p in points]
    first, last = points[0], points[-1]
    return Chart(
        "token-speed",
        t("chart_speed_title"),
        t(
            "cap_speed",
            low=f.plain(first["x"], 0),
            high=f.plain(last["x"], 0),
            q1=f.asked(first["qps"]),
            q2=f.asked(last["qps"]),
            limit=f.plain(1 / deadline, 0) if deadline else "–",
        ),
        compose(layers),
        [t("col_offered"), t("axis_user_speed"), t("axis_tps")],
        rows,
        width=HALF,
        phone=True,
    )
