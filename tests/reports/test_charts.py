"""Every spec is valid Vega-Lite, draws no infinity, and says in its table what it draws."""

from __future__ import annotations

import json
import math
import re

import altair as alt
import pytest

from reports import charts_capacity, charts_detail, charts_little, charts_model, svg
from reports.charts import Context, live_spec, log_scale, middle, rate_list, static_spec
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
    ]
    if ctx.analysis.stages:
        out += [charts_capacity.latency(ctx, n) for n in ("ttft", "tpot", "e2e")]
        out += [charts_capacity.attainment(ctx, flag) for flag in (False, True)]
        out += [charts_capacity.rates(ctx), charts_capacity.token_speed(ctx)]
    return [c for c in out if c is not None]


@pytest.mark.parametrize("name", ["sweep", "invalid", "empty", "one_stage", "simulated", "many", "nothing"])
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
    assert live["layer"] == static["layer"]


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
    spec["width"] = 500
    spec["config"] = {**spec["config"], "font": "sans-serif"}
    frame = svg.Frame(spec, domain)
    points = charts_detail.ecdf(ctx, ctx.stages[3], "ttft").points
    # the same points drawn by vl-convert itself, in the same axes
    own = json.loads(json.dumps(spec))
    own["datasets"][own["layer"][0]["data"]["name"]] = [{"v": v, "s": s} for v, s in points]
    inner, _, _ = svg.draw(own)
    drawn = max((m.group(1) for m in re.finditer(r' d="(M[^"]*)"', inner)), key=len)
    expected = [tuple(map(float, pair)) for pair in re.findall(r"([-\d.]+),([-\d.]+)", drawn)]
    placed = [frame.place(v, s) for v, s in points]
    assert len(expected) == len(placed)
    # Both pictures are 500 px wide, but a line up to the corner leaves its plot a pixel less:
    # the same curve up to that scale. Positions are cut to 0.1 px three times.
    for axis in (0, 1):
        ours, theirs = [p[axis] for p in placed], [p[axis] for p in expected]
        ratio = (ours[-1] - ours[0]) / (theirs[-1] - theirs[0])
        assert ratio == pytest.approx(1.0, abs=0.02)
        for a, b in zip(ours, theirs, strict=True):
            assert a == pytest.approx(ours[0] + (b - theirs[0]) * ratio, abs=0.4)
    assert 20 < placed[0][0] - expected[0][0] < 100  # the plot's place in the picture
    assert 10 < placed[0][1] - expected[0][1] < 60
    assert "M" not in frame.steps(points)[1:] and frame.steps(points).count("H") == len(points) - 1
