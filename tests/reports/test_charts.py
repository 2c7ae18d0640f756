"""Every spec is valid Vega-Lite, draws no infinity, and says in its table what it draws."""

from __future__ import annotations

import json
import math
import re

import altair as alt
import pytest

from reports import (
    baseline,
    charts_capacity,
    charts_detail,
    charts_little,
    charts_model,
    charts_requests,
    charts_server,
    svg,
)
from reports.charts import (
    Context,
    cut_band,
    cut_span,
    drawn_spec,
    live_spec,
    log_scale,
    middle,
    packed,
    phone_spec,
    rate_list,
    static_spec,
)
from reports.figures import Figures
from reports.words import Words
from tests.reports import examples


def context(name: str, lang: str = "en") -> Context:
    words = Words(lang)
    return Context(examples.ALL[name](), words, Figures(words))


def all_charts(ctx: Context) -> list:
    out = [
        charts_little.law(ctx),
        charts_little.over_time(ctx),
        charts_detail.errors(ctx),
        charts_detail.heatmap(ctx),
        charts_detail.sender(ctx),
        *charts_model.charts(ctx),
        charts_model.residuals(ctx),
        *charts_server.charts(ctx),
        *(charts_requests.scatter(ctx, name) for name in charts_requests.SIDES),
    ]
    found = baseline.section(ctx, examples.comparison())
    out += [*found.overlays, *found.differences]
    if ctx.analysis.stages:
        out += [charts_capacity.latency(ctx, n) for n in ("ttft", "tpot", "e2e")]
        out += [charts_capacity.attainment(ctx, flag) for flag in (False, True)]
        out += [charts_capacity.rates(ctx), charts_capacity.token_speed(ctx)]
    return [c for c in out if c is not None]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("one_stage", "simulated", "many")]


@pytest.mark.parametrize("name", ["sweep", "invalid", "empty", "nothing", *SLOW])
def test_specs_are_valid_vega_lite_without_infinities(name):
    for chart in all_charts(context(name)):
        spec = static_spec(chart)
        alt.Chart.from_dict({k: v for k, v in spec.items() if k != "usermeta"}, validate=True)
        json.dumps(spec, allow_nan=False)
        assert "Infinity" not in json.dumps(spec)


def test_specs_fit_the_renderer_version():
    schema = all_charts(context("one_stage"))[0].spec["$schema"]
    assert f"/v{svg.VEGA_LITE.split('.')[0]}." in schema


@pytest.mark.parametrize("name", ["sweep", "invalid", "empty", "one_stage", "simulated", "many"])
def test_every_chart_has_caption_and_a_full_table(name):
    for chart in all_charts(context(name)):
        assert chart.caption and chart.title
        assert chart.rows, chart.chart_id
        for row in chart.rows:
            assert len(row) == len(chart.columns), chart.chart_id


def test_colours_are_named_by_meaning():
    for chart in all_charts(context("sweep")):
        text = json.dumps({k: v for k, v in chart.spec.items() if k not in ("$schema", "datasets")})
        assert "#" not in text.replace("var(--c-", "").replace(",#", ""), chart.chart_id


def test_caption_names_the_rates_between_which_p95_crosses():
    # examples.stage: TTFT p95 is 569 ms at 20 and 6.06 s at 25; the deadline is 800 ms
    caption = charts_capacity.latency(context("sweep"), "ttft").caption.replace("\u202f", " ")
    assert caption.startswith("TTFT p95 crosses 800 ms between 20 and 25 requests/s.")
    assert "Hollow" in caption


def test_infinite_percentiles_become_marks_on_the_edge_not_points():
    ctx = context("sweep")
    spec = charts_capacity.latency(ctx, "ttft").spec
    values = [v for rows in spec["datasets"].values() for v in rows if isinstance(v, dict)]
    endless = [v for v in values if "row" in v]
    # p95 at 35, 40 and p99 at 30, 35, 40: 1 - finished exceeds 5 % and 1 %
    assert sorted((v["stat"], v["x"]) for v in endless) == [
        ("p95", 35),
        ("p95", 40),
        ("p99", 30),
        ("p99", 35),
        ("p99", 40),
    ]
    assert all(math.isfinite(v["y"]) for v in values if "y" in v)


def test_invalid_draws_no_knee_and_no_watermark():
    for chart in all_charts(context("invalid")):
        text = json.dumps(chart.spec["layer"]) + json.dumps([v for v in chart.spec["datasets"].values() if len(v) < 5])
        assert "20.9" not in text and "13.7" not in text and "knee" not in text, chart.chart_id
    assert "INVALID" in charts_capacity.latency(context("invalid"), "ttft").caption


def test_an_invalid_stage_is_left_out_of_the_curve_and_named():
    ctx = context("sweep")
    ctx.analysis.stages[0].verdict = "INVALID"
    chart = charts_capacity.latency(ctx, "ttft")
    assert "Left out as INVALID: 5 requests/s." in chart.caption
    assert not [v for rows in chart.spec["datasets"].values() for v in rows if v.get("x") == 5]
    assert len(chart.rows) == 8  # the table keeps it


def test_heatmap_keeps_every_count():
    ctx = context("sweep")
    raw = ctx.analysis.heatmap
    total = sum(map(sum, raw["counts"]))
    chart = charts_detail.heatmap(ctx)
    assert sum(int(r[1].replace(",", "")) for r in chart.rows) == total
    assert f"{total:,}" in chart.caption


def test_heatmap_with_failures_beside_the_counts():
    ctx = context("one_stage")
    ctx.analysis.heatmap = {"t_s": [0, 1, 2], "e2e_s": [0.1, 1.0, 10.0], "counts": [[3, 0], [1, 2]], "failed": [0, 4]}
    chart = charts_detail.heatmap(ctx)
    assert [r[1] for r in chart.rows] == ["4", "2", "4"]  # 3 + 1, 0 + 2, then the failed


@pytest.mark.parametrize(
    "raw",
    [{}, {"counts": []}, {"t_s": [0], "e2e_s": [], "counts": []}, {"t_s": [0, 1], "e2e_s": [1, 2], "counts": [[1, 2]]}],
)
def test_heatmap_without_usable_data(raw):
    ctx = context("one_stage")
    ctx.analysis.heatmap = raw
    assert charts_detail.heatmap(ctx) is None


def test_log_scale_has_few_round_ticks():
    for low, high in ((1, 10), (30, 40000), (0.5, 0.6), (5, 20)):
        scale, ticks = log_scale([low, high])
        assert 2 <= len(ticks) <= 12
        domain = scale.to_dict()["domain"]
        assert domain[0] < low and domain[1] > high
        assert all(domain[0] <= v <= domain[1] for v in ticks)
    assert log_scale([])[1]


def test_middle_and_rate_list():
    assert middle([3.0, None, 1.0]) == 1.0  # the lower one of two
    assert middle([math.inf, 1.0, 2.0]) == 2.0
    assert middle([]) is None
    assert rate_list([5, 10.5]) == "5, 10.5"
    assert rate_list(range(1, 9)) == "1, 2 … 8"


def test_live_and_static_specs_share_everything_but_width_and_font():
    chart = all_charts(context("one_stage"))[0]
    live, static = live_spec(chart), static_spec(chart)
    assert live["width"] == "container" and static["width"] == chart.width
    tips = [layer["encoding"].pop("tooltip", None) for layer in live["layer"]]
    assert live["layer"] == static["layer"] and any(tips)


def test_long_data_is_packed_for_the_page_and_nothing_is_lost():
    rows = [{"x": float(i), "y": i / 7, "who": "a"} for i in range(40)]
    short = packed(rows)
    assert [dict(zip(short["columns"], row, strict=True)) for row in short["rows"]] == rows
    assert len(json.dumps(short)) < 0.7 * len(json.dumps(rows))
    assert packed(rows[:5]) == rows[:5]
    mixed = [*rows, {"x": 1.0}]
    assert packed(mixed) is mixed


def test_static_drawing_has_no_style_and_escapes_text():
    ctx = context("sweep")
    ctx.words._messages = {**ctx.words._messages, "axis_offered": "<b>x</b> & y"}
    inner, width, height = svg.draw(static_spec(charts_capacity.rates(ctx)))
    assert "style=" not in inner and "<style" not in inner and "<script" not in inner and "<b>" not in inner
    assert "&lt;b>" in inner or "&lt;b&gt;" in inner
    assert width > 300 and height > 200


def test_frame_places_curves_where_the_renderer_would():
    ctx = context("sweep")
    spec, domain = charts_detail.ecdf_frame(ctx, "ttft")
    spec = drawn_spec(spec, 500)
    frame = svg.Frame(svg.draw(spec), domain)
    points = charts_detail.ecdf(ctx, ctx.stages[3], "ttft").points
    # the same points drawn by vl-convert itself, in the same axes
    own = json.loads(json.dumps(spec))
    own["datasets"][own["layer"][0]["data"]["name"]] = [{"v": v, "s": s} for v, s in points]
    inner, _, _ = svg.draw(own)
    drawn = max((m.group(1) for m in re.finditer(r' d="(M[^"]*)"', inner)), key=len)
    expected = [tuple(map(float, pair)) for pair in re.findall(r"([-\d.]+),([-\d.]+)", drawn)]
    placed = [frame.place(v, s) for v, s in points]
    assert len(expected) == len(placed)
    # A line up to the corner may leave its plot a pixel less: the same curve up to that scale. Positions are cut to 0.1 px three times.
    for axis in (0, 1):
        ours, theirs = [p[axis] for p in placed], [p[axis] for p in expected]
        ratio = (ours[-1] - ours[0]) / (theirs[-1] - theirs[0])
        assert ratio == pytest.approx(1.0, abs=0.02)
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(ours[0] + (b - theirs[0]) * ratio, abs=0.4)
    assert 20 < placed[0][0] - expected[0][0] < 100  # the plot's place in the picture
    assert 10 < placed[0][1] - expected[0][1] < 60
    assert "M" not in frame.steps(points)[1:] and frame.steps(points).count("H") == len(points) - 1


def plot_width(inner: str) -> float:
    """Length of the longest horizontal line: the domain of the x axis, or a grid line where that has none."""
    lines = re.findall(r'<line[^>]*? x2="(-?[\d.]+)" y2="0"', inner)
    return max(abs(float(v)) for v in lines)


def ends(ctx: Context, **capacity: object) -> Context:
    for key, value in capacity.items():
        setattr(ctx.analysis.capacity, key, value)
    return ctx


FAR = {
    "high end far to the right": {"knee_high_qps": 4000.0},
    "high end infinite": {"knee_high_qps": math.inf},
    "knee below the first stage": {"knee_qps": 0.4, "knee_low_qps": -3.0, "knee_high_qps": 0.9},
    "all beyond": {
        "knee_qps": 900.0,
        "knee_low_qps": 800.0,
        "knee_high_qps": 1e6,
        "watermark_low_qps": 560.0,
        "watermark_high_qps": math.inf,
    },
    "watermark below zero": {"watermark_low_qps": -50.0, "watermark_high_qps": 2.0},
}


@pytest.mark.parametrize("case", FAR)
def test_plots_keep_their_width_whatever_the_interval(case):
    ctx = ends(context("sweep"), **FAR[case])
    ctx.analysis.model["knee_predicted_high_qps"] = FAR[case].get("knee_high_qps", 50.0)
    ctx.analysis.model["knee_predicted_low_qps"] = -9.0
    charts = [
        charts_capacity.latency(ctx, "ttft"),
        charts_capacity.attainment(ctx, False),
        charts_capacity.rates(ctx),
        charts_model.charts(ctx)[0],
    ]
    for chart in charts:
        for spec in (static_spec(chart), phone_spec(chart)):
            inner, width, _ = svg.draw(spec)
            # a mark beyond the domain would widen the drawing; the y labels take 75 px at most
            assert spec["width"] < width <= spec["width"] + 75, (case, chart.chart_id, width)
            assert plot_width(inner) == spec["width"], (case, chart.chart_id)


def test_a_latency_line_is_broken_where_its_percentile_is_withheld():
    ctx = context("sweep")
    assert "does not pass" not in charts_capacity.latency(ctx, "ttft").caption
    gap = sorted({s.offered_qps for s in ctx.trusted()})[2]
    for s in ctx.stages:
        if s.offered_qps == gap:
            s.latency["ttft_s"].withheld = {"p95": "60 values; 72 are needed"}
    chart = charts_capacity.latency(ctx, "ttft")
    assert f"withheld at {gap:g} requests/s" in chart.caption
    rows = [v for rows in chart.spec["datasets"].values() for v in rows if "piece" in v]
    sides = {stat: {v["x"] < gap: v["piece"] for v in rows if v["stat"] == stat} for stat in ("p50", "p95")}
    assert sides["p95"][True] != sides["p95"][False] and sides["p50"][True] == sides["p50"][False]
    lines = [v for v in chart.spec["layer"] if isinstance(v["mark"], dict) and v["mark"]["type"] == "line"]
    assert lines[0]["encoding"]["detail"]["field"] == "piece"


def test_goodput_above_completed_is_explained_in_the_caption():
    ctx = context("sweep")
    for s in ctx.stages:
        s.goodput_qps = min(s.goodput_qps, s.completed_qps)
    assert "ended in the window" not in charts_capacity.rates(ctx).caption
    ctx.trusted()[0].goodput_qps = ctx.trusted()[0].completed_qps + 0.4
    assert "ended in the window" in charts_capacity.rates(ctx).caption


def test_a_single_stage_keeps_its_width_and_names_what_is_withheld():
    ctx = context("one_stage")
    p = ctx.analysis.stages[0].latency["ttft_s"]
    p.withheld = {"p95": "12 values; 72 are needed", "p99": "12 values; 368 are needed"}
    chart = charts_capacity.latency(ctx, "ttft")
    assert "withheld" in chart.caption and "No TTFT" not in chart.caption
    assert [k.label for k in chart.keys] == ["p50"]
    inner, width, _ = svg.draw(static_spec(chart))
    assert plot_width(inner) > 0.6 * width


def test_cut_span():
    assert cut_span(17.3, 50.0, 26.0) == (17.3, 26.0)
    assert cut_span(-math.inf, math.inf, 26.0) == (0.0, 26.0)
    assert cut_span(30.0, 50.0, 26.0) is None and cut_span(-4.0, -1.0, 26.0) is None
    assert cut_span(None, 5.0, 26.0) is None and cut_span(9.0, 9.0, 26.0) is None


def test_cut_band_ends_where_the_edge_crosses_the_axis():
    # high goes from 10 to 1000 over x 0..2, so on a log axis it is 100 at x = 1; low stays 5
    band = cut_band([{"x": 0, "low": 5, "high": 10}, {"x": 2, "low": 5, "high": 1000}], 1, 100)
    assert [p["x"] for p in band] == pytest.approx([0, 1, 2])
    assert [p["high"] for p in band] == pytest.approx([10, 100, 100])
    assert [p["low"] for p in band] == pytest.approx([5, 5, 5])
    endless = cut_band([{"x": 0, "low": 0.001, "high": math.inf}, {"x": 1, "low": 2, "high": math.inf}], 1, 100)
    assert all(p["high"] == 100 and 1 <= p["low"] <= 2 for p in endless)


def test_the_y_axis_follows_the_curves_and_not_the_bands():
    ctx = context("sweep")
    for s in ctx.analysis.stages:
        p = s.latency["ttft_s"]
        p.p95_low, p.p95_high = 1e-4, math.inf  # as an interval on two effective arrivals
    spec = charts_capacity.latency(ctx, "ttft").spec
    low, high = next(
        layer["encoding"]["y"]["scale"]["domain"]
        for layer in spec["layer"]
        if isinstance(layer.get("mark"), dict) and layer["mark"]["type"] == "line"
    )
    drawn = [v["y"] for rows in spec["datasets"].values() for v in rows if "y" in v and "stat" in v]
    # room of 1.6 on both sides, and 16 % of the axis on top for the marks of what did not finish
    top = max(drawn + [800]) * 1.6
    assert low > min(drawn + [800]) / 1.7 and high < top * (top / low) ** 0.2
    bands = [v for rows in spec["datasets"].values() for v in rows if "low" in v]
    assert bands and all(low <= v["low"] <= v["high"] <= high for v in bands)


def test_a_stage_that_never_ran_is_in_no_chart():
    ctx = context("interrupted")
    last = ctx.stages[-1]
    last.marks = ["not_run"]
    last.planned = last.attainment_joint.n = 0
    assert last not in ctx.stages and last in ctx.planned_stages
    for chart in all_charts(ctx):
        values = [v for rows in chart.spec["datasets"].values() for v in rows if isinstance(v, dict)]
        assert not [v for v in values if v.get("x") == last.offered_qps and "stat" in v], chart.chart_id
