"""Charts of single stages and of the run's side: ECDF, errors, heatmap, sender, model.

Input: a `Context`. Output: `Chart` objects or None where nothing was measured.
Does not: bin requests (analysis does; here bins are only merged by adding counts).
"""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from bench.records.analysis import StageAnalysis
from reports.charts import (
    Chart,
    Context,
    Curve,
    Key,
    compose,
    data,
    encodings,
    log_scale,
    rate_axis,
    rule_y,
    stage_label,
)
from reports.figures import finite, number
from reports.themes import HEAT_LEVELS, ink, text_ink

LAYERS = ("channel", "script", "scheduler", "client")
HEAT_COLUMNS, HEAT_ROWS = 72, 26  # the most cells that a static drawing should hold


def _ecdf_points(stage: StageAnalysis, name: str) -> list[list[float]]:
    raw = stage.ecdf_ttft if name == "ttft" else stage.ecdf_tpot
    return [
        [float(f"{a * 1e3:.4g}"), round(b, 4)]
        for a, b in ((number(p[0]), number(p[1])) for p in raw if len(p) >= 2)
        if a is not None and b is not None and math.isfinite(a) and a > 0
    ]


def ecdf_frame(ctx: Context, name: str) -> tuple[dict[str, Any], tuple[float, float]]:
    """(spec, (lowest, highest) value in ms): the axes that all stages share, so that they can be compared.

    Its one line goes from the lower left to the upper right corner of the plot; `svg.Frame`
    reads the scales from it and puts each stage's curve in its place.
    """
    t, f = ctx.words, ctx.figures
    deadline = finite(ctx.analysis.slo.get(f"{name}_deadline_s"))
    everything = [p[0] for s in ctx.stages for p in _ecdf_points(s, name)]
    scale, ticks = log_scale([*everything, deadline * 1e3 if deadline else None])
    low, high = scale.to_dict()["domain"]
    x = alt.X(
        "v:Q", title=f"{name.upper()} (ms)", scale=scale, axis=alt.Axis(format=",~f", values=ticks, labelOverlap=True)
    )
    y = alt.Y(
        "s:Q", title=t("axis_share_arrivals"), scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=4)
    )
    corners = [{"v": low, "s": 0}, {"v": high, "s": 1}]
    layers = [alt.Chart(data(corners)).mark_line(color=ink(name)).encode(x=x, y=y)]
    if deadline:
        line = alt.Chart(data([{"x": deadline * 1e3, "text": f"SLO {f.duration(deadline)}"}]))
        layers.append(line.mark_rule(color=ink("slo"), strokeDash=[8, 4], strokeWidth=1.6).encode(x=alt.X("x:Q")))
        layers.append(
            line.mark_text(
                color=text_ink("slo"), align="right", baseline="bottom", dx=3, fontSize=11, fontWeight=600
            ).encode(x=alt.X("x:Q"), y=alt.YValue(-5), text=alt.Text("text:N"))
        )
    return compose(layers, 220), (low, high)


def ecdf(ctx: Context, stage: StageAnalysis, name: str) -> Curve | None:
    """The curve of TTFT or TPOT of one stage, None when there is none."""
    t, f = ctx.words, ctx.figures
    points = _ecdf_points(stage, name)
    if len(points) < 2:
        return None
    deadline = finite(ctx.analysis.slo.get(f"{name}_deadline_s"))
    interval = stage.attainment_ttft if name == "ttft" else stage.attainment_tpot
    caption = t(
        "cap_ecdf",
        metric=name.upper(),
        share=f.share(interval.value),
        n=f.count(interval.n),
        slo=f.duration(deadline) if deadline else "–",
    )
    return Curve(f"{name.upper()} · {stage_label(stage)}", caption, points)


def errors(ctx: Context) -> Chart | None:
    """Failed arrivals per stage, stacked by the layer that failed, as share of the planned arrivals."""
    t, f = ctx.words, ctx.figures
    groups = [g for g in ctx.analysis.errors if g.count > 0]
    if not groups:
        return None
    by_stage = {s.stage: s for s in ctx.analysis.stages}
    order = [t(f"layer_{name}") for name in LAYERS]
    totals: dict[tuple[int, str], int] = {}
    for g in groups:
        layer = g.layer if g.layer in LAYERS else "client"
        totals[g.stage, layer] = totals.get((g.stage, layer), 0) + g.count
    labels = {number_: stage_label(s) if ctx.repeated() else f"{s.offered_qps:g}" for number_, s in by_stage.items()}
    axis_order = [labels[s.stage] for s in ctx.stages]
    points = []
    for (stage, layer), count in totals.items():
        if stage in by_stage:
            planned = max(1, by_stage[stage].planned)
            points.append(
                {
                    "x": labels[stage],
                    "y": count / planned,
                    "layer": t(f"layer_{layer}"),
                    "rank": LAYERS.index(layer),
                    "count": count,
                    "planned": planned,
                }
            )
    keys = [Key(name, f"layer_{layer}", area=True) for name, layer in zip(order, LAYERS, strict=True)]
    colours = encodings("layer", keys)["color"]
    top = max((sum(p["y"] for p in points if p["x"] == label) for label in axis_order), default=0) or 0.01
    layers = [
        alt.Chart(data(points))
        .mark_bar(stroke=ink("panel"), strokeWidth=0.8, width={"band": 0.62})
        .encode(
            x=alt.X(
                "x:N",
                title=t("axis_offered"),
                sort=axis_order,
                scale=alt.Scale(domain=axis_order),
                axis=alt.Axis(labelAngle=0, labelOverlap=True),
            ),
            y=alt.Y(
                "y:Q",
                title=t("axis_failed"),
                stack="zero",
                scale=alt.Scale(domain=[0, min(1.0, top * 1.12)], nice=True),
                axis=alt.Axis(format=".1%" if top < 0.05 else ".0%", tickCount=5),
            ),
            color=colours,
            order=alt.Order("rank:Q"),
            tooltip=[
                alt.Tooltip("x:N", title=t("axis_offered")),
                alt.Tooltip("layer:N", title=t("col_layer")),
                alt.Tooltip("count:Q", title=t("col_count"), format=","),
                alt.Tooltip("planned:Q", title=t("col_planned"), format=","),
            ],
        )
    ]
    rows = [
        [labels[s.stage], f.count(s.planned)] + [f.count(totals.get((s.stage, layer), 0)) for layer in LAYERS]
        for s in ctx.stages
    ]
    total, planned = sum(g.count for g in groups), sum(s.planned for s in ctx.analysis.stages)
    biggest = max(groups, key=lambda g: g.count)
    caption = t(
        "cap_errors",
        n=f.count(total),
        planned=f.count(planned),
        code=biggest.code,
        share=f.share(sum(g.count for g in groups if g.code == biggest.code) / total, 0),
    )
    return Chart(
        "errors",
        t("chart_errors_title"),
        caption,
        compose(layers, 240),
        [t("col_offered"), t("col_planned"), *order],
        rows,
        keys=keys,
    )


def _merged(counts: list[list[float]], columns: int, rows: int) -> tuple[list[list[float]], int, int]:
    """Counts with neighbouring cells added up until they fit, and the two factors."""
    by_t = max(1, math.ceil(len(counts) / columns))
    by_e = max(1, math.ceil(len(counts[0]) / rows))
    out = []
    for i in range(0, len(counts), by_t):
        block = counts[i : i + by_t]
        out.append([sum(sum(r[j : j + by_e]) for r in block) for j in range(0, len(counts[0]), by_e)])
    return out, by_t, by_e


def heatmap(ctx: Context) -> Chart | None:
    """All arrivals by time and end-to-end latency; the shade is the count, in five log steps."""
    t, f = ctx.words, ctx.figures
    raw = ctx.analysis.heatmap
    if not raw or not raw.get("counts"):
        return None
    t_edges = [number(v) for v in raw.get("t_s", [])]
    e_edges = [number(v) for v in raw.get("e2e_s", [])]
    counts = [[finite(c) or 0 for c in row] for row in raw["counts"]]
    if len(counts) != len(t_edges) - 1 and counts and len(counts[0]) == len(t_edges) - 1:
        counts = [list(column) for column in zip(*counts, strict=True)]
    if len(counts) != len(t_edges) - 1 or not counts or len(counts[0]) != len(e_edges) - 1:
        return None
    failed = [finite(v) or 0.0 for v in raw.get("failed") or []]
    endless = failed if len(failed) == len(counts) else [0.0] * len(counts)
    if e_edges[-1] is not None and math.isinf(e_edges[-1]):
        endless = [row[-1] + lost for row, lost in zip(counts, endless, strict=True)]
        counts, e_edges = [row[:-1] for row in counts], e_edges[:-1]
    if len(e_edges) < 2:
        return None
    merged, by_t, by_e = _merged(counts, HEAT_COLUMNS, HEAT_ROWS)
    never = [sum(endless[i : i + by_t]) for i in range(0, len(endless), by_t)]
    t_cut = [*t_edges[:-1:by_t], t_edges[-1]]
    e_cut = [*e_edges[:-1:by_e], e_edges[-1]]
    total, lost = sum(map(sum, merged)) + sum(never), sum(never)
    if not total:
        return None
    logarithmic = len(e_cut) > 2 and e_cut[1] > 0 and (e_cut[-1] - e_cut[-2]) > 3 * (e_cut[1] - e_cut[0])
    if logarithmic and e_cut[0] <= 0:
        e_cut[0] = e_cut[1] / 2
    top = max(max(map(max, merged)), max(never, default=0), 1)
    steps = sorted({max(1, math.ceil(top ** (k / HEAT_LEVELS))) for k in range(HEAT_LEVELS)})

    def level(count: float) -> int:
        return max(k for k, step in enumerate(steps) if count >= step)

    names = [f"≥ {f.count(step)}" for step in steps]
    cells = _cells(merged, t_cut, e_cut, level, names)
    strip = [
        {"t": t_cut[i], "t2": t_cut[i + 1], "n": names[level(c)], "count": c} for i, c in enumerate(never) if c >= 1
    ]
    x = alt.X(
        "t:Q",
        title=t("axis_arrival_time"),
        scale=alt.Scale(domain=[t_cut[0], t_cut[-1]], nice=False),
        axis=alt.Axis(tickCount=8, format=",~f"),
    )
    _, ticks = log_scale([e_cut[0], e_cut[-1]], 1.0)
    scale = alt.Scale(
        type="log" if logarithmic else "linear",
        domain=[e_cut[0], e_cut[-1] * (1.25 if strip and logarithmic else 1)],
        nice=False,
    )
    y = alt.Y(
        "e:Q",
        title=t("axis_e2e"),
        scale=scale,
        axis=alt.Axis(format=",~f", values=ticks) if logarithmic else alt.Axis(format=",~f", tickCount=6),
    )
    keys = [
        Key(name, f"heat_{round(k * (HEAT_LEVELS - 1) / max(1, len(names) - 1))}", area=True)
        for k, name in enumerate(names)
    ]
    colours = encodings("n", keys)["color"]
    layers = [
        alt.Chart(data(cells))
        .mark_rect(strokeWidth=0)
        .encode(x=x, x2=alt.X2("t2:Q"), y=y, y2=alt.Y2("e2:Q"), color=colours)
    ]
    target = finite(ctx.analysis.slo.get("e2e_target_s"))
    if target and e_cut[0] < target < e_cut[-1]:
        layers += rule_y(target, t("label_e2e_target", value=f.duration(target)), "slo", [8, 4], "left")
    if strip:
        layers.append(
            alt.Chart(data(strip))
            .mark_rect(strokeWidth=0)
            .encode(x=x, x2=alt.X2("t2:Q"), y=alt.YValue(0), y2=alt.Y2Value(11), color=colours)
        )
    caption = t("cap_heatmap", n=f.count(total)) + (" " + t("cap_heatmap_never", n=f.count(lost)) if lost else "")
    rows = []
    for j in range(len(e_cut) - 1):
        count = sum(row[j] for row in merged)
        if count:
            rows.append(
                [
                    f"{f.duration(e_cut[j])} – {f.duration(e_cut[j + 1])}",
                    f.count(count),
                    f.share(count / total if total else 0),
                ]
            )
    if lost:
        rows.append([t("did_not_finish"), f.count(lost), f.share(lost / total)])
    return Chart(
        "heatmap",
        t("chart_heatmap_title"),
        caption,
        compose(layers, 300),
        [t("axis_e2e"), t("col_count"), t("col_share")],
        rows,
        keys=keys,
    )


def _cells(
    merged: list[list[float]], t_cut: list[Any], e_cut: list[Any], level: Any, names: list[str]
) -> list[dict[str, Any]]:
    """One rectangle per run of neighbouring times with the same shade; empty cells have none."""
    cells: list[dict[str, Any]] = []
    for j in range(len(e_cut) - 1):
        i = 0
        while i < len(merged):
            if merged[i][j] < 1:
                i += 1
                continue
            shade, k = level(merged[i][j]), i
            while k + 1 < len(merged) and merged[k + 1][j] >= 1 and level(merged[k + 1][j]) == shade:
                k += 1
            cells.append({"t": t_cut[i], "t2": t_cut[k + 1], "e": e_cut[j], "e2": e_cut[j + 1], "n": names[shade]})
            i = k + 1
    return cells


def sender(ctx: Context) -> Chart | None:
    """Lateness of our own sender per stage, against the limit of a trusted measurement."""
    t, f = ctx.words, ctx.figures
    points = [
        {"x": s.offered_qps, "y": value * 1e3, "stat": statistic, "text": f.duration(value)}
        for s in ctx.stages
        for statistic, value in (("p50", finite(s.stimulus.send_lag_p50_s)), ("p99", finite(s.stimulus.send_lag_p99_s)))
        if value is not None and value > 0
    ]
    if not points:
        return None
    deadline = finite(ctx.analysis.slo.get("ttft_deadline_s"))
    limit = max(0.005, 0.05 * deadline) if deadline else 0.005
    x = rate_axis(ctx)
    scale, ticks = log_scale([p["y"] for p in points] + [limit * 1e3])
    y = alt.Y("y:Q", title=t("axis_lag"), scale=scale, axis=alt.Axis(format=",~f", values=ticks))
    keys = [Key("p50", "theory", (7, 3), "circle"), Key("p99", "theory", (2, 3), "triangle-up")]
    signs = encodings("stat", keys)
    dash, shape = signs["strokeDash"], signs["shape"]
    base = alt.Chart(data(points))
    colour = ink("theory")
    layers = [
        base.mark_line(color=colour).encode(x=x, y=y, strokeDash=dash)
        if not ctx.repeated()
        else base.mark_line(color=colour).encode(
            x=x, y=alt.Y("median(y):Q", title=t("axis_lag"), scale=scale), strokeDash=dash
        ),
        *rule_y(limit * 1e3, t("label_limit", value=f.duration(limit)), "slo", [8, 4], "left"),
        base.mark_point(size=42, filled=True, color=colour, opacity=1).encode(
            x=x,
            y=y,
            shape=shape,
            tooltip=[alt.Tooltip("x:Q", title=t("axis_offered")), alt.Tooltip("text:N", title=t("value"))],
        ),
    ]
    worst = max(
        (s for s in ctx.stages if finite(s.stimulus.send_lag_p99_s) is not None),
        key=lambda s: s.stimulus.send_lag_p99_s or 0,
    )
    caption = t(
        "cap_sender",
        lag=f.duration(worst.stimulus.send_lag_p99_s),
        qps=f.asked(worst.offered_qps),
        limit=f.duration(limit),
    )
    rows = [
        [
            f.asked(s.offered_qps),
            str(s.repeat + 1),
            f.count(s.stimulus.planned),
            f.count(s.stimulus.sent),
            f.signed_share(s.stimulus.rate_error_ratio, 2),
            f.plain(s.stimulus.gap_cv, 3),
            f.plain(s.stimulus.dispersion, 2),
            f.plain(s.stimulus.ks_p, 3),
            f.duration(s.stimulus.send_lag_p50_s),
            f.duration(s.stimulus.send_lag_p99_s),
            f.duration(s.stimulus.loop_lag_p99_s),
            f.share(s.stimulus.client_cpu_max_ratio, 0),
        ]
        for s in ctx.stages
    ]
    return Chart(
        "sender",
        t("chart_sender_title"),
        caption,
        compose(layers, 220),
        [
            t("col_offered"),
            t("col_repeat"),
            t("col_planned"),
            t("col_sent"),
            t("col_rate_error"),
            t("col_gap_cv"),
            t("col_dispersion"),
            t("col_ks"),
            t("col_lag_p50"),
            t("col_lag_p99"),
            t("col_loop_lag"),
            t("col_cpu"),
        ],
        rows,
        keys=keys,
    )
