"""What the page says of repeats, of Little's law, of the client and of its own place."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from analysis.model_report import _service
from analysis.repeatability import repeatability
from bench.records.analysis import Repeatability
from reports import charts_model, tables, view
from reports.charts import Context
from reports.charts_little import law, over_time, overload, tight
from reports.figures import Figures
from reports.html import render
from reports.words import Words
from reports.write import write_all
from tests.reports import examples
from tests.reports.conftest import text_of


def context(analysis, lang: str = "en") -> Context:
    words = Words(lang)
    return Context(analysis, words, Figures(words))


def repeated_run(verdicts: tuple[str, ...], stationarity: str = "STABLE"):
    """One rate, run once per verdict."""
    analysis = examples.sweep((10,), repeats=len(verdicts))
    for stage, verdict in zip(analysis.stages, verdicts, strict=True):
        stage.verdict, stage.stationarity = verdict, stationarity
    analysis.repeatability = repeatability(analysis.stages, {s.stage: s.stage for s in analysis.stages})
    return analysis


@pytest.mark.parametrize("stationarity", ["STABLE", "UNSTABLE"])
@pytest.mark.parametrize("verdicts", [("MET",) * 3, ("MET", "INVALID", "INVALID"), ("MET", "MET", "INVALID")])
def test_repeats_carry_their_note_in_both_languages(verdicts, stationarity):
    analysis = repeated_run(verdicts, stationarity)
    for lang in ("en", "zh-CN"):
        rows = tables.repeats(context(analysis, lang))["rows"]
        for row, r in zip(rows, analysis.repeatability, strict=True):
            assert row[-1] and (row[-1] == r.note) == (lang == "en"), row
            assert lang == "en" or not re.search("[a-z]{4}", row[-1].replace("INVALID", "")), row[-1]
    if stationarity == "UNSTABLE" and "INVALID" not in verdicts:
        assert {row[-2] for row in tables.repeats(context(analysis))["rows"]} == {"unstable"}


def test_tile_of_repeats_says_how_many_were_valid():
    def detail(analysis):
        return next(x for x in view.tiles(context(analysis)) if x["label"] == "Repeat spread")["detail"]

    analysis = repeated_run(("MET", "INVALID", "INVALID"))
    analysis.repeatability = [Repeatability(10.0, "e2e_p95_s", [1.0], None, 0.15, False, None, "x")]
    if hasattr(analysis.repeatability[0], "repeats"):
        analysis.repeatability[0].repeats, analysis.repeatability[0].valid = 3, 1
    assert detail(analysis).startswith("1 of 3 repeats valid")
    analysis.repeatability = []
    assert detail(analysis).startswith("1 of 3 repeats valid")
    assert detail(examples.sweep()) == "each rate was run once"


def test_little_shows_the_tight_check_and_why_the_wedge_is_blind():
    analysis = examples.sweep()
    for s in analysis.stages:  # as analysis/little.py writes it: 1 % of L above the rows, limit 2 % of L
        s.little.params = {"bias": 0.01 * s.little.lambda_w, "limit": 0.02 * s.little.lambda_w}
        s.little.code = "little.gauge"
    ctx = context(analysis)
    assert tight(ctx.stages[0]) == pytest.approx((0.01, 0.02))
    tile = next(x for x in view.tiles(ctx) if x["label"].startswith("Little"))
    assert "1.00" in tile["detail"] and "limit 2.0" in tile["detail"] and "blind" in tile["detail"]
    chart = law(ctx)
    assert "1.25 X" in chart.caption and "limit is 2.0" in chart.caption
    assert all(len(row) == len(chart.columns) for row in chart.rows)
    # 25 per second come, 20 end: -(1 - 20/25) = -20 %, just inside the wedge
    stage = ctx.stages[0]
    stage.little.arrival_qps, stage.completed_qps = 25.0, 20.0
    assert overload(stage) == pytest.approx(-0.2)
    stage.little.params = {"gap_s": 1.0, "rest": {"code": "little.gauge", "params": stage.little.params}}
    assert tight(stage) == pytest.approx((0.01, 0.02))
    stage.little.params = {}
    assert tight(stage) is None


def test_drain_is_marked_over_time():
    ctx = context(examples.sweep())
    spans = [rows for rows in over_time(ctx).spec["datasets"].values() if rows and rows[0].keys() == {"t", "t2"}]
    ends = {(s.window_end_s, s.window_end_s + s.drain_s) for s in ctx.stages}
    assert any({(r["t"], r["t2"]) for r in rows} == ends for rows in spans)
    assert "drain" in [k.label for k in over_time(ctx).keys]


def test_client_calibration_is_told_or_said_to_be_missing(pages):
    assert "Not calibrated" in text_of(pages("sweep", live=False)) and "bench calibrate-client" in pages("sweep", live=False)
    analysis = examples.sweep()
    analysis.run["target"] = {"calibration": {
        "file": "client-calibration.json", "ceiling_qps": 412.38, "ceiling_kind": "between", "first_miss_qps": 450,
        "made_utc": "2026-11-29T10:00:00Z", "workers": 2, "read": "stream", "adds": {"ttft_p50_s": 0.00042}}}  # fmt: skip
    facts = dict(tables.calibration(context(analysis)))
    assert facts["Highest rate that it can send"] == "412.3 requests/s; 450 was too fast"
    assert facts["Adds to TTFT p50"].replace("\u202f", " ") == "0.42 ms"
    analysis.run["target"]["calibration"] |= {"ceiling_kind": "below", "ceiling_qps": None, "adds": None}
    assert dict(tables.calibration(context(analysis)))["Highest rate that it can send"] == "below the lowest rate tried"


def test_stage_names_every_outcome_and_shows_its_in_flight_curve(pages):
    facts = dict(tables.stage_row(context(examples.sweep()), examples.sweep().stages[0])["facts"])
    assert all(word in facts["Arrivals"] for word in ("ok", "rejected", "timeout", "error", "truncated", "unsent"))
    assert pages("sweep", live=False).count('href="#frame-joint"') == 8


def test_page_names_its_folder_its_outputs_and_its_translation(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "other name"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    write_all(folder, examples.nothing(), env={})
    write_all(folder, examples.nothing(), lang="zh-CN", beside=True, env={})
    page = (folder / "report.zh-CN.html").read_text(encoding="utf-8")
    assert "bench analyse &#39;runs/other name&#39;" in page and str(tmp_path) not in page
    assert '<a href="report.html" hreflang="en">' in page
    links = set(re.findall(r'<a href="([^"#]+)"', page))
    assert links and all((folder / name).exists() for name in links), links
    write_all(folder, examples.nothing(), env={})
    assert 'href="report.zh-CN.html"' in (folder / "report.html").read_text(encoding="utf-8")
    assert not re.findall(r'<a href="[^#]', render(examples.nothing(), live=False))


def test_service_moments_stand_in_the_load_table():
    # 1 s and 3 s ended: E[S] = 2, E[S²] = (1 + 9)/2 = 5, C² = 5/4 − 1; what did not end is in none of them
    found = _service(SimpleNamespace(e2e_s=np.array([1.0, 3.0, math.inf])))
    assert found == {"service_mean_s": 2.0, "service_m2_s2": 5.0, "service_scv": 0.25}
    analysis = examples.sweep()
    analysis.model["stage_models"][0].update(found)
    table = charts_model.load_table(context(analysis))
    row = dict(zip(table["columns"], table["rows"][0], strict=True))
    assert (row["E[S]"].replace("\u202f", " "), row["E[S²] (s²)"], row["C²"]) == ("2,000 ms", "5", "0.25")
    assert table["rows"][1][-1] == "not measured"
