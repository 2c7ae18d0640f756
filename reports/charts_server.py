"""The service's own numbers beside ours: TTFT, requests inside, KV memory and preemptions.

Input: a `Context` whose analysis has `server` (`analysis/server_series.py`). Output: `Chart` objects or None.
Does not: compute a mean or a difference of totals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import altair as alt

from bench.records.analysis import StageAnalysis
from reports.charts import (
    HALF,
    Chart,
    Context,
    Key,
    columns,
    compose,
    data,
    encodings,
    log_scale,
    marked_line,
    rate_axis,
    rate_list,
    spread,
)
from reports.charts_little import WEDGE, stage_bands
from reports.figures import finite
from reports.themes import ink


def charts(ctx: Context) -> list[Chart]:
    """What the service said, as far as it said it; empty when it was not scraped."""
    return [c for c in (ttft(ctx), inside(ctx), memory(ctx)) if c is not None]


def _of(ctx: Context, stage: StageAnalysis) -> dict[str, Any]:
    return next(
        (
            s
            for s in ctx.analysis.server.get("stages") or []
            if (s.get("stage"), s.get("repeat")) == (stage.stage, stage.repeat)
        ),
        {},
    )


def _table(
    ctx: Context, cells: dict[str, Callable[[StageAnalysis, dict[str, Any]], str]]
) -> tuple[list[str], list[list[str]]]:
    """(columns, a row per stage): rate, repeat, scrapes, and `cells` by their heads, from our numbers and its own."""
    t, f = ctx.words, ctx.figures
    rows = []
    for s in ctx.stages:
        of = _of(ctx, s)
        first = [f.asked(s.offered_qps), str(s.repeat + 1), f.count(of.get("samples"))]
        rows.append(first + [cell(s, of) for cell in cells.values()])
    return [t("col_offered"), t("col_repeat"), t("col_scrapes"), *cells], rows


def ttft(ctx: Context) -> Chart | None:
    """Mean TTFT per stage: the service's own and ours, over the same first tokens."""
    t, f = ctx.words, ctx.figures
    names = {"server_ttft_mean_s": t("server_own"), "client_ttft_mean_s": t("server_ours")}
    points = []
    for qps, group in ctx.by_rate():
        both = [s for s in group if all(finite(_of(ctx, s).get(k)) for k in names)]
        for key, name in names.items():
            value = spread(both, lambda s, k=key: _of(ctx, s)[k])
            if value:
                points.append({"x": qps, "y": value * 1e3, "who": name, "text": f.duration(value)})
    if not points:
        return None
    scale, ticks = log_scale([p["y"] for p in points])
    y = alt.Y("y:Q", title="TTFT (ms)", scale=scale, axis=alt.Axis(format=",~f", values=ticks))
    keys = [
        Key(names["client_ttft_mean_s"], "ttft", (), "circle"),
        Key(names["server_ttft_mean_s"], "layer_script", (7, 3), "square"),
    ]
    signs, x, base = encodings("who", keys), rate_axis(ctx), alt.Chart(data(points))
    tips = [
        alt.Tooltip("x:Q", title=t("axis_offered")),
        alt.Tooltip("who:N", title=t("col_source")),
        alt.Tooltip("text:N", title="TTFT"),
    ]
    layers = marked_line(base, x, y, signs, tips)
    gaps = [
        (of["client_ttft_mean_s"] - of["server_ttft_mean_s"], s.offered_qps, of)
        for s in ctx.trusted()
        if (of := _of(ctx, s)) and finite(of.get("server_ttft_mean_s")) and finite(of.get("client_ttft_mean_s"))
    ]
    gap, qps, of = max(gaps, key=lambda g: abs(g[0]))
    key = (
        "cap_server_ttft_apart" if abs(gap) > 0.1 * of["client_ttft_mean_s"] and abs(gap) > 0.005 else "cap_server_ttft"
    )
    if gap < 0 and key.endswith("apart"):
        key = "cap_server_ttft_below"
    caption = t(
        key,
        gap=f.duration(abs(gap)),
        qps=f.asked(qps),
        ours=f.duration(of["client_ttft_mean_s"]),
        server=f.duration(of["server_ttft_mean_s"]),
    )
    table = _table(
        ctx,
        {
            f"TTFT {names['server_ttft_mean_s']}": lambda _, of: f.duration(of.get("server_ttft_mean_s")),
            f"TTFT {names['client_ttft_mean_s']}": lambda _, of: f.duration(of.get("client_ttft_mean_s")),
            f"n {names['server_ttft_mean_s']}": lambda _, of: f.count(of.get("server_ttft_n")),
            f"n {names['client_ttft_mean_s']}": lambda _, of: f.count(of.get("client_ttft_n")),
            t("col_queue"): lambda _, of: f.duration(of.get("server_queue_mean_s")),
        },
    )
    return Chart(
        "server-ttft",
        t("chart_server_ttft_title"),
        caption,
        compose(layers, 260),
        *table,
        width=HALF,
        keys=keys,
    )


def _time_axis(ctx: Context, times: list[float]) -> alt.X:
    ends = [p[0] for p in ctx.analysis.in_flight_series[-1:]] + times
    return alt.X(
        "t:Q",
        title=ctx.words("axis_time"),
        scale=alt.Scale(domain=[min(0, *times), max(ends)], nice=False, clamp=True),
        axis=alt.Axis(tickCount=8, format=",~f"),
    )


def _series(ctx: Context, *names: str) -> list[tuple[float, ...]]:
    """Rows (t, value, ...) of the samples in which all of `names` are known."""
    series = ctx.analysis.server.get("series") or {}
    known = []
    for row in zip(*(series.get(n) or [] for n in ("t_s", *names)), strict=False):
        values = [finite(v) for v in row]
        if None not in values:
            known.append(tuple(v for v in values if v is not None))
    return known


def inside(ctx: Context) -> Chart | None:
    """Running and waiting over time, as the service counts them, with our own count of requests in flight."""
    t, f = ctx.words, ctx.figures
    rows = _series(ctx, "running", "waiting")
    if len(rows) < 2:
        return None
    ours = [
        (a, b) for a, b in ((finite(p[0]), finite(p[1])) for p in ctx.analysis.in_flight_series) if None not in (a, b)
    ]
    x = _time_axis(ctx, [r[0] for r in rows])
    y = alt.Y(
        "y:Q", title=t("axis_requests_inside"), scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=5, format=",~f")
    )
    layers, bands, *_ = stage_bands(ctx, x)
    stacked = alt.Chart(columns(("t", "w", "y"), [(a, r, r + w) for a, r, w in rows]))
    running = alt.Chart(columns(("t", "y"), [(a, r) for a, r, _ in rows]))
    layers.append(stacked.mark_area(color=ink("waste"), opacity=0.9).encode(x=x, y=y, y2=alt.Y2("w:Q")))
    layers.append(running.mark_line(color=ink("layer_script"), strokeDash=[7, 3], strokeWidth=1.4).encode(x=x, y=y))
    layers.append(stacked.mark_line(color=ink("slo"), strokeWidth=1.4).encode(x=x, y=y))
    if ours:
        layers.append(
            alt.Chart(columns(("t", "y"), ours)).mark_line(color=ink("ttft"), strokeWidth=1.1).encode(x=x, y=y)
        )
    keys = [
        Key(t("server_running"), "layer_script", (7, 3)),
        Key(t("server_sum"), "slo"),
        Key(t("server_waiting"), "waste", area=True),
        *([Key(t("server_client_count"), "ttft")] if ours else []),
    ]
    waiting = max(rows, key=lambda r: r[2])
    parts = [
        t("cap_server_waiting", n=f.count(waiting[2]), t=f.duration(waiting[0]))
        if waiting[2] > 0
        else t("cap_server_no_waiting")
    ]
    gaps = {s.offered_qps: abs(g) for s in ctx.trusted() if (g := finite(s.little.gap_ratio_server)) is not None}
    apart = [qps for qps, g in gaps.items() if g > WEDGE]
    if gaps:
        parts.append(
            t("cap_server_apart", list=rate_list(apart))
            if apart
            else t("cap_server_agrees", gap=f.share(max(gaps.values()), 1))
        )
    if 0 < bands <= 20:
        parts.append(t("cap_time_bands"))
    table = _table(
        ctx,
        {
            t("server_running"): lambda _, of: f.plain(of.get("running_mean"), 1),
            t("server_waiting"): lambda _, of: f.plain(of.get("waiting_mean"), 1),
            f"L {t('little_server')}": lambda s, _: f.plain(s.little.in_flight_mean_server, 1),
            f"L {t('little_integral')}": lambda s, _: f.plain(s.little.in_flight_mean_integral, 1),
            t("col_gap_instants"): lambda s, _: f.signed_share(s.little.gap_ratio_server),
        },
    )
    return Chart(
        "server-inside",
        t("chart_server_inside_title"),
        " ".join(parts),
        compose(layers, 260),
        *table,
        width=HALF,
        keys=keys,
    )


def memory(ctx: Context) -> Chart | None:
    """KV memory in use over time, and when requests were preempted."""
    t, f = ctx.words, ctx.figures
    rows = _series(ctx, "kv_usage")
    if len(rows) < 2:
        return None
    evicted = [r for r in _series(ctx, "preemptions") if r[1] > 0]
    x = _time_axis(ctx, [r[0] for r in rows])
    y = alt.Y("y:Q", title=t("axis_kv"), scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5))
    layers, bands, *_ = stage_bands(ctx, x)
    if evicted:
        marks = alt.Chart(columns(("t", "n"), evicted))
        layers.append(
            marks.mark_point(shape="triangle-down", size=30, filled=True, fill=ink("slo"), opacity=1).encode(
                x=x,
                y=alt.YValue(7),
                tooltip=[alt.Tooltip("t:Q", title=t("axis_time")), alt.Tooltip("n:Q", title=t("server_preemptions"))],
            )
        )
    layers.append(alt.Chart(columns(("t", "y"), rows)).mark_line(color=ink("tpot"), strokeWidth=1.4).encode(x=x, y=y))
    keys = [Key(t("axis_kv"), "tpot")]
    if evicted:
        keys.append(Key(t("server_preemptions"), "slo", (), "triangle-down", line=False))
    top = max(rows, key=lambda r: r[1])
    counted = len(_series(ctx, "preemptions")) > 0
    parts = [t("cap_kv", top=f.share(top[1], 0), t=f.duration(top[0]))]
    if evicted:
        parts.append(t("cap_preemptions", n=f.count(sum(r[1] for r in evicted)), t=f.duration(evicted[0][0])))
    elif counted:
        parts.append(t("cap_no_preemptions"))
    if 0 < bands <= 20:
        parts.append(t("cap_time_bands"))
    table = _table(
        ctx,
        {
            t("col_kv_mean"): lambda _, of: f.share(of.get("kv_mean_ratio"), 1),
            t("col_kv_max"): lambda _, of: f.share(of.get("kv_max_ratio"), 1),
            t("server_preemptions"): lambda _, of: f.count(of.get("preemptions")),
        },
    )
    return Chart(
        "server-memory",
        t("chart_server_memory_title"),
        " ".join(parts),
        compose(layers, 220),
        *table,
        width=HALF,
        keys=keys,
    )
