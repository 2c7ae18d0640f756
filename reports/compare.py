"""`render(data)`: the comparison of a run with its baseline as one static HTML page.

Input: the content of compare.json. Output: HTML text without scripts; it needs no network.
Does not: compare (`analysis/compare_runs.py` does).
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bench.records.sentences import worded
from reports import svg
from reports.compare_words import CATALOGUES, ZH_NOTES
from reports.figures import Figures, finite, number
from reports.themes import FONT, PLAIN, chart_config, css_variables, ink
from reports.words import Words

TEMPLATES = Path(__file__).parent / "templates"
KINDS = {"worse": "fail", "better": "pass", "no clear change": "none", "not compared": "none"}
SYMBOLS = {"fail": "✕", "pass": "✓", "none": "–"}
WIDTH, HEIGHT = 440, 200


class Texts:
    """Messages of the comparison in one language."""

    def __init__(self, lang: str) -> None:
        self._texts = CATALOGUES[lang]
        self._notes = ZH_NOTES if lang == "zh-CN" else ()

    def __call__(self, key: str, **values: object) -> str:
        return worded(self._texts[key], values)

    def note(self, text: str) -> str:
        """A remark of the analysis in this language; as it is when it is not known."""
        for pattern, words in self._notes:
            found = re.fullmatch(pattern, text)
            if found:
                return found.expand(words)
        return text


def render(data: dict[str, Any], *, lang: str = "en") -> str:
    """The page. `data`: `Comparison.to_dict()`, or compare.json as read."""
    t, f = Texts(lang), Figures(Words(lang))
    changes = data["changes"]
    css = _css()
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    kind = KINDS[data["outcome"]]
    digest = base64.b64encode(hashlib.sha256(css.encode("utf-8")).digest()).decode()
    tolerance = data["tolerance"]
    return env.get_template("compare.html.j2").render(
        lang=lang, t=t, data=data, css=Markup(css), kind=kind, symbols=SYMBOLS,
        csp=f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'",
        banner={"fail": "fail", "pass": "pass", "none": "same"}[kind],
        word=t(data["outcome"].upper()), sentence=change_sentence(t, f, data), figures=_figures(t, data),
        sides=[(t(side), facts(t, f, data[side])) for side in ("base", "new")],
        rows=[change_row(t, f, c) for c in changes], lists=remarks(t, f, data),
        method=t("method_text", level=f.share(data["level"], 0), each=f.share(data["level_each"], 3),
                 tolerance=f.share(tolerance, 0), share=f"{tolerance * 10:g}"),
    )  # fmt: skip


def _css() -> str:
    light, dark = css_variables(dark=False), css_variables(dark=True)
    themes = (
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"@media print{{:root:root{{color-scheme:light;{light}}}}}"
    )
    own = (
        ".verdict.same .word{font-size:24px}"
        ".top .wrap{max-width:1128px}main.wrap{max-width:1128px;padding-top:26px;padding-bottom:40px}"
        "tr.fail td,tr.pass td{font-weight:600}"
    )
    return themes + (TEMPLATES / "report.css").read_text(encoding="utf-8").replace("FONT", FONT) + own


def _label(t: Texts, c: dict[str, Any]) -> str:
    if c["metric"] in ("attainment", "knee"):
        return t("attainment") if c["metric"] == "attainment" else t("knee")
    return f"{c['metric'].upper()} {c['statistic']}"


def _value(f: Figures, c: dict[str, Any], value: Any) -> str:
    if c["unit"] == "s":
        return f.duration(value)
    return f.share(value) if c["unit"] == "1" else f.capacity(value)


def change_sentence(t: Texts, f: Figures, data: dict[str, Any]) -> str:
    """The comparison in one sentence: how many numbers changed, and the first of them."""
    counts = data["counts"]
    listed = [c for c in data["changes"] if c["outcome"] == data["outcome"]]
    missing = t("rates_missing", n=counts["rates_not_compared"]) if counts["rates_not_compared"] else ""
    told = {"all": counts["numbers"], "rates": counts["rates"], "missing": missing}
    if not listed or data["outcome"] == "no clear change":
        return t("sentence_same", **told)

    def size(c: dict[str, Any]) -> tuple[bool, float]:
        effect = number(c["effect"])
        return c["metric"] == "attainment", abs(effect) if effect is not None else 0.0  # the SLO first

    c = max(listed, key=size)
    key = {"1": "change_share", "s": "change_time", "1/s": "change_rate"}[c["unit"]]
    base, new = _value(f, c, c["base"]), _value(f, c, c["new"])
    first = t(key, label=_label(t, c), qps=f.asked(c["offered_qps"]), base=base, new=new)
    better = t("also_better", n=counts["better"]) if data["outcome"] == "worse" and counts["better"] else ""
    return t(f"sentence_{data['outcome']}", n=counts[data["outcome"]], first=first, better=better, **told)


def remarks(t: Texts, f: Figures, data: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The lists under the sentence, by title: what was forced, not compared and why, left out, and to be known."""

    def missing(item: dict[str, Any]) -> str:
        rates = ", ".join(f.asked(q) for q in item["rates"])
        numbers = ", ".join(t("attainment") if name == "attainment" else name for name in item["numbers"])
        key = "missing_numbers" if numbers else "missing_rates"
        return t(key, numbers=numbers, rates=rates, reason=t.note(item["reason"]))

    lists = [
        (t("forced"), [t.note(text) for text in data["differences"]]),
        (t("not_compared"), [missing(item) for item in data["not_compared"]]),
        (t("left_out"), [t.note(text) for text in data["left_out"]]),
        (t("notes"), [t.note(text) for text in data["notes"]]),
    ]
    return [(title, items) for title, items in lists if items]


def facts(t: Texts, f: Figures, side: dict[str, Any]) -> list[tuple[str, str]]:
    """Who one of the runs was."""
    knee = side.get("knee_qps")
    return [
        (t("run"), side["run_id"]),
        (t("started"), str(side.get("started_utc") or t("none"))),
        (t("model"), side.get("model") or t("none")),
        (t("verdict"), side["verdict"]),
        (t("knee"), t("none") if knee is None else f.capacity(knee)),
        (t("schedule"), str(side.get("schedule_hash") or t("none"))[:16]),
        (t("version"), str(side.get("tool_version") or t("none"))),
    ]


def change_row(t: Texts, f: Figures, c: dict[str, Any]) -> dict[str, Any]:
    """One number in both runs, as a row of texts."""
    def change(value: Any) -> str:
        if value is None:
            return t("none")
        if c["unit"] == "1":
            return f"{float(value) * 100:+.2f}".replace("-", "−")
        return "+∞" if value == "inf" else f.signed_share(value)

    floor = c["noise_floor"]
    kind = KINDS[c["outcome"]]
    return {
        "kind": kind,
        "symbol": SYMBOLS[kind],
        "outcome": t(c["outcome"]),
        "remark": t.note(c["note"]),
        "cells": [
            t("none") if c["offered_qps"] is None else f.asked(c["offered_qps"]),
            _label(t, c),
            _value(f, c, c["base"]),
            _value(f, c, c["new"]),
            change(c["effect"]),
            t("none") if c["low"] is None else f"{change(c['low'])} … {change(c['high'])}",
            t("none") if floor is None else f"{floor * 100:.2f}" if c["unit"] == "1" else f.share(floor, 1),
        ],
    }


def _figures(t: Texts, data: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = [("attainment", "value", "joint")] + [(name, "p95", name) for name in ("ttft", "tpot", "e2e")]
    out = []
    for what in wanted:
        found = difference_spec(t, data, *what)
        if found is None:
            continue
        title, _, spec, whole = found
        inner, width, height = svg.draw(spec)
        out.append({"title": title, "svg": Markup(inner), "width": width, "height": height,
                    "caption": t("caption") + ("" if whole else " " + t("endless"))})  # fmt: skip
    return out


def difference_spec(
    t: Texts, data: dict[str, Any], metric: str, statistic: str, colour: str
) -> tuple[str, list[dict[str, Any]], dict[str, Any], bool] | None:
    """(title, points, spec, whether every rate is drawn) of the changes of one number; None where there are none."""
    share = metric == "attainment"
    title = t("chart_attainment") if share else t("chart_latency", metric=metric.upper())
    limit = data["tolerance"] / 10 if share else data["tolerance"]
    rows = [c for c in data["changes"] if (c["metric"], c["statistic"]) == (metric, statistic)]
    rows = [c for c in rows if c["effect"] is not None]
    points = [
        {"x": c["offered_qps"], "o": c["outcome"], "y": 100 * c["effect"]}
        | {end: 100 * c[end] for end in ("low", "high")}
        for c in rows
        if all(finite(c[k]) is not None for k in ("effect", "low", "high"))
    ]
    if not points:
        return None
    axis = t("axis_share") if share else t("axis_change")
    return title, points, _spec(points, axis, t("axis_rate"), 100 * limit, colour), len(points) == len(rows)


def _spec(points: list[dict[str, Any]], axis_y: str, axis_x: str, limit: float, colour: str) -> dict[str, Any]:
    """Points with intervals over rates; a band for the tolerance, a line at zero."""
    rates = sorted({p["x"] for p in points})
    x = {"field": "x", "type": "quantitative", "title": axis_x,
         "axis": {"values": rates, "format": PLAIN, "labelOverlap": True},
         "scale": {"zero": False, "nice": False, "padding": 18}}  # fmt: skip
    y = {"field": "y", "type": "quantitative", "title": axis_y, "axis": {"format": PLAIN, "tickCount": 5}}
    mark = {"size": 60, "filled": True, "opacity": 1}
    clear = {"test": "datum.o === 'worse' || datum.o === 'better'", "value": "diamond"}
    shape = {"condition": clear, "value": "circle"}
    fill = {"condition": {"test": "datum.o === 'worse'", "value": ink("slo")}, "value": ink(colour)}
    return {
        "width": WIDTH, "height": HEIGHT, "config": chart_config(), "data": {"values": points},
        "layer": [
            {"data": {"values": [{"a": -limit, "b": limit}]}, "mark": {"type": "rect", "color": ink("wedge")},
             "encoding": {"y": {"field": "a", "type": "quantitative"}, "y2": {"field": "b"}}},
            {"data": {"values": [{"z": 0}]}, "mark": {"type": "rule", "color": ink("axis"), "strokeWidth": 1},
             "encoding": {"y": {"field": "z", "type": "quantitative"}}},
            {"mark": {"type": "rule", "color": ink(colour), "strokeWidth": 2},
             "encoding": {"x": x, "y": {"field": "low", "type": "quantitative"}, "y2": {"field": "high"}}},
            {"mark": {"type": "point", **mark},
             "encoding": {"x": x, "y": y, "shape": shape, "fill": fill, "stroke": fill}},
        ],
    }  # fmt: skip
