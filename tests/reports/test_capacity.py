"""One capacity, one wording: tile, sentence, summary.md, summary.json and junit.xml agree for every kind of knee."""

from __future__ import annotations

import re

import pytest
from junitparser import JUnitXml

from analysis.knee import Crossing, add_note, capacity
from bench.records.analysis import Analysis, Gate
from bench.records.sentences import joined, said
from reports.capacity import limits
from reports.charts import Context
from reports.charts_capacity import rates
from reports.figures import Figures
from reports.junit import junit
from reports.summary import markdown, summary
from reports.view import tiles
from reports.words import Words
from tests.reports import examples

# kind, the crossing that the analysis found, the knee and its interval in print, the safe rate in print. Down, an
# upper bound up: 19.86 -> 19.8, [14.87, 22.81] -> [14.8, 22.9]; .7 * 14.87 = 10.409, .8 * 14.87 = 11.896
KINDS = [
    ("crossing", Crossing("crossing", 19.86, 14.87, 22.81, "m", 15.0, (15.0, 20.0)), "19.8", "[14.8, 22.9]",
     "10.4 – 11.8"),
    # every rate up to 20 held, the arrivals prove 18.97: .7 * 18.97 = 13.279, .8 * 18.97 = 15.176
    ("thin", Crossing("at_least", 20.0, 18.97, None, "m", 20.0), "≥ 18.9", "", "13.2 – 15.1"),
    ("at_least", Crossing("at_least", 20.0, 20.0, None, "m", 20.0), "≥ 20.0", "", "14.0 – 16.0"),
    ("below", Crossing("below", None, None, 5.02, "m", None), "< 5.1", "", ""),
    ("none", Crossing("none", None, None, None, "m", None), "", "", ""),
]  # fmt: skip


def made(found: Crossing) -> Analysis:
    """The sweep of the examples with another knee, and a gate on the knee as `analysis/gates.py` measures it."""
    analysis = examples.sweep()
    analysis.capacity = capacity([], 0.99, found=found)
    measured = found.low if found.kind == "at_least" else found.value
    status = "not_measured" if measured is None else "pass"
    analysis.gates = [Gate("KNEE", "knee_qps", "value", ">=", 1.0, measured, "1/s", "run", status, "fail")]
    return analysis


def context(analysis: Analysis, lang: str = "en") -> Context:
    words = Words(lang)
    return Context(analysis, words, Figures(words))


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
@pytest.mark.parametrize(("kind", "found", "knee", "interval", "safe"), KINDS, ids=[k[0] for k in KINDS])
def test_every_output_says_the_knee_alike(kind, found, knee, interval, safe, lang):
    analysis = made(found)
    c, ctx = analysis.capacity, context(analysis, lang)
    sentence = ctx.words.said(c.code, c.params, c.sentence)
    figures = {*re.findall(r"\d+\.\d+", f"{knee} {interval} {safe}")}
    assert figures <= {*re.findall(r"\d+\.\d+", sentence)}, "the sentence has other figures"

    safe_tile, knee_tile = tiles(ctx)[:2]
    assert knee_tile["value"] == (knee or ctx.words("not_found"))
    assert interval in knee_tile["detail"]
    assert safe_tile["value"] == (safe or ctx.words("not_found"))

    line = next((x for x in markdown(analysis, lang=lang).splitlines() if x.startswith(ctx.words("tile_safe"))), "")
    if safe:
        both = f"{knee} {interval}".strip()
        unit = ctx.words("unit_qps")
        assert line == f"{ctx.words('tile_safe')}: **{safe} {unit}** · {ctx.words('tile_knee')}: {both} {unit}"
    elif knee:
        assert f"{ctx.words('tile_knee')}: {knee} " in markdown(analysis, lang=lang)

    document = summary(analysis)["capacity"]
    bound = document["knee_high_qps" if kind == "below" else "knee_qps"]
    assert ctx.figures.capacity(bound, up=kind == "below") == (knee.lstrip("≥< ") or ctx.words("not_measured"))

    suite = next(iter(JUnitXml.fromstring(junit(analysis).encode())))
    said = {p.name: p.value for p in suite.properties()}
    assert said.get("knee_qps", "") == f"{knee} {interval}".strip()
    assert said.get("safe_rate_qps", "") == safe
    message = next((r.message for case in suite for r in case.result), "")
    assert ("measured not measured" in message) == (found.low is None)


def test_a_gate_on_the_knee_prints_the_figure_of_the_tile():
    found = next(k for k in KINDS if k[0] == "thin")[1]
    analysis = made(found)
    analysis.gates[0].status, analysis.gates[0].limit = "fail", 30.0
    case = next(iter(next(iter(JUnitXml.fromstring(junit(analysis).encode())))))
    assert "measured ≥ 18.9\u202frequests/s" in case.result[0].message


def test_nothing_is_said_under_invalid():
    analysis = examples.invalid()
    analysis.capacity = capacity([], 0.99, found=KINDS[0][1])
    names = {p.name for p in next(iter(JUnitXml.fromstring(junit(analysis).encode()))).properties()}
    assert "knee_qps" not in names and "safe_rate_qps" not in names
    assert "19.8" not in markdown(analysis) and limits(context(analysis)) == ""


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
def test_flattening_and_lambda_max_have_names_of_their_own(lang):
    analysis = examples.sweep()
    c = analysis.capacity
    c.flattening_qps, c.lambda_max_qps = 27.49, 28.38
    analysis.model = {**(analysis.model or {}), "lambda_max_low_qps": 27.91, "lambda_max_high_qps": 28.81}
    text = limits(context(analysis, lang))
    assert "27.4" in text and "λ_max" in text and "28.3 " in text and "[27.9, 28.9]" in text
    chart = rates(context(analysis, lang))
    drawn = {row.get("y") for rows in chart.spec["datasets"].values() for row in rows if "text" in row}
    assert {27.49, 28.38} <= drawn
    c.flattening_qps = c.lambda_max_qps = None
    analysis.model = None
    assert limits(context(analysis, lang)) == ""


def test_summary_json_holds_little_model_client_and_artifacts():
    analysis = examples.sweep()
    analysis.run["files"] = {"requests.csv": {"bytes": 12, "sha256": "ab" * 32}, "run.json": {"sha256": "cd" * 32}}
    analysis.run["target"] = {"calibration": {"ceiling_qps": 412.0, "ceiling_kind": "between", "adds": {"ttft_p50_s": 0.0004}}}
    document = summary(analysis)
    assert document["lambda_max"] == {"value_qps": 23.9, "low_qps": 23.4, "high_qps": 24.4}
    steady = [s for s in analysis.stages if s.stationarity == "STABLE"]
    assert document["little"]["stationary_stages"] == len(steady)
    assert document["little"]["gap_max_ratio"] == max(abs(s.little.gap_ratio_gauge) for s in steady)
    assert document["client"]["ceiling_qps"] == 412.0 and document["client"]["adds"] == {"ttft_p50_s": 0.0004}
    assert [(a["name"], a["bytes"]) for a in document["artifacts"]] == [("requests.csv", 12), ("run.json", None)]
    assert document["artifacts"][0]["sha256"] == "ab" * 32
    assert document["model"]["sentence"] == analysis.model["sentence"]
    assert summary(examples.invalid())["lambda_max"]["value_qps"] is None


@pytest.mark.parametrize("lang", ["en", "zh-CN"])
def test_the_flattening_point_is_said_once(lang):
    """The capacity sentence of the analysis names it; the line below it then does not."""
    analysis = examples.sweep()
    c = analysis.capacity
    c.flattening_qps, c.lambda_max_qps = 27.49, 28.38
    add_note(c, said("capacity.flat", flat_qps="27.4", rates=joined("comma", [30.0, 35.0])))
    add_note(c, said("capacity.none"))  # one more around it
    assert "27.4" in c.sentence
    text = limits(context(analysis, lang))
    assert "27.4" not in text and "28.3 " in text
