"""Little's law: in-flight against lambda*W per stage, and in-flight over the run.

Input: a `Context`. Output: `Chart` objects or None where nothing was measured.
Does not: compute L, lambda or W.
"""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from bench.records.analysis import Little, StageAnalysis
from reports.charts import (
    HALF,
    PHONE,
    PHONE_HEIGHT,
    Chart,
    Context,
    Curve,
    Key,
    compose,
    data,
    encodings,
    log_scale,
    rate_list,
    stage_label,
)
from reports.figures import finite
from reports.labels import point_names
from reports.themes import ink

STAGE_POINTS = 40  # of the small in-flight curve in an opened stage
WEDGE = 0.20  # the tolerance named in docs/verdicts.md: more than 20 % apart is said aloud


def law(ctx: Context) -> Chart | None:
    """L against lambda*W on log axes with the 45-degree line and the 20 % wedge."""
    t, f = ctx.words, ctx.figures
    sources = {"gauge": t("little_gauge"), "server": t("little_server"), "integral": t("little_integral")}
    points: list[dict[str, Any]] = []
    for s in ctx.stages:
        product = finite(s.little.lambda_w)
        if not product or product <= 0:
            continue
        measured = {"gauge": s.little.in_flight_mean_gauge, "server": s.little.in_flight_mean_server}
        if finite(measured["gauge"]) is None and finite(measured["server"]) is None:
            measured = {"integral": s.little.in_flight_mean_integral}
        for source, value in measured.items():
            level = finite(value)
            if level and level > 0:
                points.append(
                    {
                        "x": product,
                        "y": level,
                        "source": sources[source],
                        "outside": abs(level / product - 1) > WEDGE,
                        "label": f.asked(s.offered_qps),
                        "gap": f.signed_share(level / product - 1),
                    }
                )
    if not points:
        return None
    low = min(min(p["x"], p["y"]) for p in points) / 1.6
    high = max(max(p["x"], p["y"]) for p in points) * 1.6
    line = [
        {"x": low, "y": low, "low": low * (1 - WEDGE), "high": low * (1 + WEDGE)},
        {"x": high, "y": high, "low": high * (1 - WEDGE), "high": high * (1 + WEDGE)},
    ]
    _, ticks = log_scale([low, high], 1.0)
    scale = alt.Scale(type="log", domain=[float(f"{low:.4g}"), float(f"{high:.4g}")], nice=False, clamp=True)
    x = alt.X("x:Q", title=t("axis_lambda_w"), scale=scale, axis=alt.Axis(format=",~f", values=ticks, grid=True))
    y = alt.Y("y:Q", title=t("axis_l"), scale=scale, axis=alt.Axis(format=",~f", values=ticks))
    used = [v for v in sources.values() if any(p["source"] == v for p in points)]
    marks = {
        sources["gauge"]: ("circle", "ttft"),
        sources["server"]: ("square", "layer_script"),
        sources["integral"]: ("diamond", "theory"),
    }
    keys = [Key(u, marks[u][1], (), marks[u][0], line=False) for u in used]
    signs = encodings("source", keys)
    keys += [Key("L = λ·W", "theory", (2, 4)), Key("± 20 %", "wedge", area=True)]
    base, guide = alt.Chart(data(points)), alt.Chart(data(line))
    layers = [
        guide.mark_area(color=ink("wedge")).encode(x=x, y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q")),
        guide.mark_line(color=ink("theory"), strokeDash=[2, 4], strokeWidth=1.6).encode(x=x, y=y),
        base.mark_point(size=64, filled=True, opacity=0.95).encode(
            x=x,
            y=y,
            color=signs["color"],
            shape=signs["shape"],
            tooltip=[
                alt.Tooltip("label:N", title=t("axis_offered")),
                alt.Tooltip("source:N", title=t("col_source")),
                alt.Tooltip("x:Q", title="λ·W", format=".4~g"),
                alt.Tooltip("y:Q", title="L", format=".4~g"),
                alt.Tooltip("gap:N", title=t("col_gap")),
            ],
        ),
    ]
    labelled = [p for p in points if p["source"] == used[0]]
    first = {p["label"]: i for i, p in reversed(list(enumerate(labelled)))}  # of repeats one is named
    span = math.log(high / low)
    placed = [
        (math.log(p["x"] / low) / span * PHONE, (1 - math.log(p["y"] / low) / span) * PHONE_HEIGHT,
         p["label"] if first[p["label"]] == i else "")
        for i, p in enumerate(labelled)
    ]
    layers += point_names(labelled, placed, x, y, "label")
    rows = [
        [
            f.asked(s.offered_qps),
            str(s.repeat + 1),
            f.rate(s.little.arrival_qps),
            f.duration(s.little.residence_mean_s),
            f.plain(s.little.lambda_w, 1),
            f.plain(s.little.in_flight_mean_gauge, 1),
            f.plain(s.little.in_flight_mean_server, 1),
            f.plain(s.little.in_flight_mean_integral, 1),
            f.signed_share(gap(s.little)),
            f.signed_share(bias, 2),
            f.share(limit, 2),
            f.plain(s.little.edge_start_s, 1),
            f.plain(s.little.edge_end_s, 1),
            f.signed_share(edges(s)),
            f.signed_share(overload(s)),
            t.known(f"steady_{s.stationarity}", s.stationarity),
        ]
        for s in ctx.stages
        for bias, limit in [tight(s) or (None, None)]
    ]
    return Chart(
        "little",
        t("chart_little_title"),
        _caption(ctx),
        compose(layers, 320),
        [
            t("col_offered"),
            t("col_repeat"),
            "λ (1/s)",
            "W",
            "λ·W",
            f"L {t('little_gauge')}",
            f"L {t('little_server')}",
            f"L {t('little_integral')}",
            t("col_gap"),
            t("col_bias"),
            t("col_bias_limit"),
            t("col_edge_start"),
            t("col_edge_end"),
            t("col_edges"),
            t("col_blind"),
            t("col_steady"),
        ],
        rows,
        keys=keys,
        width=HALF,
        phone=True,
    )


def gap(little: Little) -> float | None:
    """The relative gap to lambda*W: by the sender's gauge, else by the service's own count."""
    for value in (little.gap_ratio_gauge, little.gap_ratio_server):
        if finite(value) is not None:
            return finite(value)
    return None


def tight(stage: StageAnalysis) -> tuple[float, float] | None:
    """(gauge less rows at the same instants, its limit), as shares of lambda*W; None where the gauge told nothing.

    Source: the parameters of the analysis' own note (`little.gauge`).
    """
    params = stage.little.params or {}
    while isinstance(params.get("rest"), dict):  # of a gauge that stood still
        params = params["rest"].get("params") or {}
    bias, limit, product = (finite(v) for v in (params.get("bias"), params.get("limit"), stage.little.lambda_w))
    if bias is None or limit is None or not product or product <= 0:
        return None
    return bias / product, limit / product


def tightest(ctx: Context) -> tuple[float, float] | None:
    """(widest gap, its limit) of the tight check over the stationary stages."""
    found = [pair for s in ctx.stages if s.stationarity == "STABLE" and (pair := tight(s)) is not None]
    worst = max(found, key=lambda pair: abs(pair[0]) / pair[1] if pair[1] else 0.0, default=None)
    return None if worst is None else (abs(worst[0]), worst[1])


def edges(stage: StageAnalysis) -> float | None:
    """(Rs - Re)/(lambda W T): what the window's edges explain of L/(lambda W) - 1."""
    found = stage.little
    start, end, product = (finite(v) for v in (found.edge_start_s, found.edge_end_s, found.lambda_w))
    if start is None or end is None or not product or not stage.window_s:
        return None
    return (start - end) / (product * stage.window_s)


def overload(stage: StageAnalysis) -> float | None:
    """-(1 - X/lambda): what L/(lambda W) - 1 is in steady overload."""
    rate = finite(stage.little.arrival_qps)
    return stage.completed_qps / rate - 1 if rate else None


def _caption(ctx: Context) -> str:
    t, f = ctx.words, ctx.figures
    gaps = [(abs(g), s) for s in ctx.stages if (g := gap(s.little)) is not None]
    if not gaps:
        return t("cap_little_integral")
    steady = [pair for pair in gaps if pair[1].stationarity == "STABLE"]
    outside = sorted({s.offered_qps for g, s in gaps if g > WEDGE})
    parts = []
    if steady:
        worst, stage = max(steady, key=lambda pair: pair[0])
        parts.append(t("cap_little_steady", gap=f.share(worst, 1), qps=f.asked(stage.offered_qps)))
    if outside:
        parts.append(t("cap_little_outside", list=rate_list(outside)))
    elif not steady:
        parts.append(t("cap_little_inside"))
    if worst_tight := tightest(ctx):
        parts.append(t("cap_little_tight", bias=f.share(worst_tight[0], 2), limit=f.share(worst_tight[1], 1)))
    parts.append(t("cap_little_blind"))
    return " ".join(parts)


def stage_bands(ctx: Context, x: alt.X) -> tuple[list[alt.Chart], int, bool, bool]:
    """(layers behind a curve over time, how many stages they mark, whether any has a warm-up, and a drain)."""
    bands, warm, drain = [], [], []
    for i, s in enumerate(sorted(ctx.stages, key=lambda s: s.stage)):
        start, w_start, w_end = finite(s.start_s), finite(s.window_start_s), finite(s.window_end_s)
        if start is None or w_start is None or w_end is None:
            continue
        name = ctx.figures.asked(s.offered_qps)
        bands.append({"t": start, "t2": w_end, "mid": (start + w_end) / 2, "text": name, "shade": "ab"[i % 2]})
        if w_start > start:
            warm.append({"t": start, "t2": w_start})
        if drained := finite(s.drain_s):  # a window ends with the last arrival of its stage
            drain.append({"t": w_end, "t2": w_end + drained})
    layers: list[alt.Chart] = []
    if len(bands) > 40:  # a picket fence
        return layers, len(bands), bool(warm), bool(drain)
    for shade in "ab":
        mine = [b for b in bands if b["shade"] == shade]
        if mine:
            layers.append(alt.Chart(data(mine)).mark_rect(color=ink(f"stage_{shade}")).encode(x=x, x2=alt.X2("t2:Q")))
    if warm:
        layers.append(alt.Chart(data(warm)).mark_rect(color=ink("warmup")).encode(x=x, x2=alt.X2("t2:Q")))
    if drain:
        layers.append(alt.Chart(data(drain)).mark_rect(color=ink("drain")).encode(x=x, x2=alt.X2("t2:Q")))
    if bands and len(bands) <= 20:
        layers.append(
            alt.Chart(data(bands))
            .mark_text(baseline="bottom", fontSize=11, color=ink("muted"))
            .encode(x=alt.X("mid:Q"), y=alt.YValue(-5), text=alt.Text("text:N"))
        )
    return layers, len(bands), bool(warm), bool(drain)


def _stage_points(ctx: Context, s: StageAnalysis) -> list[list[float]]:
    """[seconds from the stage's start, in flight] from its start to the end of its drain."""
    start, end = finite(s.start_s), finite(s.window_end_s)
    if start is None or end is None:
        return []
    end += finite(s.drain_s) or 0.0
    series = ((finite(p[0]), finite(p[1])) for p in ctx.analysis.in_flight_series if len(p) >= 2)
    found = [[a - start, b] for a, b in series if a is not None and b is not None and start <= a <= end]
    thin = -(-len(found) // STAGE_POINTS) if found else 1
    parts = [found[i : i + thin] for i in range(0, len(found), thin)]
    return [max(part, key=lambda p: p[1]) for part in parts]  # of neighbours the highest, so that no peak is lost


def stage_frame(ctx: Context) -> tuple[dict[str, Any], tuple[float, float], float]:
    """(spec, span of seconds, highest in flight): the axes that the stages' in-flight curves share."""
    points = [p for s in ctx.stages for p in _stage_points(ctx, s)]
    long, high = (max((p[i] for p in points), default=0.0) or 1.0 for i in (0, 1))
    x = alt.X("t:Q", title=ctx.words("axis_stage_time"), scale=alt.Scale(domain=[0, long], nice=False),
              axis=alt.Axis(tickCount=5, format=",~f"))  # fmt: skip
    y = alt.Y("n:Q", title=ctx.words("axis_in_flight"), scale=alt.Scale(domain=[0, high], nice=False),
              axis=alt.Axis(tickCount=4, format=",~f"))  # fmt: skip
    corners = alt.Chart(data([{"t": 0.0, "n": 0.0}, {"t": long, "n": high}]))
    return compose([corners.mark_line(color=ink("joint")).encode(x=x, y=y)], 220), (0.0, long), high


def stage_curve(ctx: Context, s: StageAnalysis) -> Curve | None:
    """In flight over one stage; None without two samples."""
    points = _stage_points(ctx, s)
    if len(points) < 2:
        return None
    caption = ctx.words("cap_in_flight_stage", n=ctx.figures.count(max(p[1] for p in points)))
    return Curve(f"{ctx.words('axis_in_flight')} · {stage_label(s)}", caption, points)


def over_time(ctx: Context) -> Chart | None:
    """In-flight over the run with stage bands, warm-up and the steps of lambda*W."""
    t, f = ctx.words, ctx.figures
    series = [(finite(p[0]), finite(p[1])) for p in ctx.analysis.in_flight_series if len(p) >= 2]
    points = [{"t": a, "n": b} for a, b in series if a is not None and b is not None]
    if len(points) < 2:
        return None
    x = alt.X(
        "t:Q",
        title=t("axis_time"),
        scale=alt.Scale(domain=[min(0, points[0]["t"]), points[-1]["t"]], nice=False, clamp=True),
        axis=alt.Axis(tickCount=8, format=",~f"),
    )
    ordered = sorted(ctx.stages, key=lambda s: s.stage)
    layers, bands, warm, drain = stage_bands(ctx, x)
    steps = [
        {"t": s.window_start_s, "t2": s.window_end_s, "n": s.little.lambda_w}
        for s in ordered
        if None not in (finite(s.window_start_s), finite(s.window_end_s), finite(s.little.lambda_w))
    ]
    y = alt.Y("n:Q", title=t("axis_in_flight"), scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5, format=",~f"))
    layers.append(alt.Chart(data(points)).mark_line(color=ink("ttft"), strokeWidth=1.4).encode(x=x, y=y))
    if steps:
        layers.append(
            alt.Chart(data(steps))
            .mark_rule(color=ink("slo"), strokeWidth=2.2, strokeDash=[8, 4])
            .encode(x=x, x2=alt.X2("t2:Q"), y=y)
        )
    keys = [Key(t("axis_in_flight"), "ttft")]
    if steps:
        keys.append(Key(t("key_steps"), "slo", (8, 4)))
    if 0 < bands <= 40:
        keys += [Key(t("key_window"), "stage_b", area=True)] + (
            [Key(t("key_warmup"), "warmup", area=True)] if warm else []
        )
        keys += [Key(t("key_drain"), "drain", area=True)] if drain else []
    highest = max(points, key=lambda p: p["n"])
    parts = [t("cap_time", n=f.count(highest["n"]), t=f.duration(highest["t"]))]
    growing = sorted({s.offered_qps for s in ctx.stages if s.stationarity == "UNSTABLE"})
    if growing:
        parts.append(t("cap_time_growing", list=rate_list(growing)))
    if 0 < bands <= 20:
        parts.append(t("cap_time_bands"))
    if drain and 0 < bands <= 40:
        parts.append(t("cap_time_drain"))
    rows = [
        [
            f"{s.stage:02d}",
            f.asked(s.offered_qps),
            f.duration(getattr(s, "window_start_s", None)),
            f.duration(getattr(s, "window_end_s", None)),
            f.plain(s.little.in_flight_mean_integral, 1),
            f.plain(s.in_flight_growth_qps, 2),
            f.duration(s.drain_s),
            s.stationarity,
        ]
        for s in ordered
    ]
    return Chart(
        "in-flight",
        t("chart_time_title"),
        " ".join(parts),
        compose(layers, 320),
        [
            t("col_stage"),
            t("col_offered"),
            t("col_window_start"),
            t("col_window_end"),
            "L",
            t("col_growth"),
            t("col_drain"),
            t("col_steady"),
        ],
        rows,
        keys=keys,
        width=HALF,
        phone=True,
    )
