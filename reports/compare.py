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

from reports import svg
from reports.compare_words import CATALOGUES, ZH_NOTES
from reports.figures import Figures, finite, number
from reports.themes import FONT, chart_config, css_variables, ink
from reports.words import Words

TEMPLATES = Path(__file__).parent / "templates"
KINDS = {"worse": "fail", "better": "pass", "no clear change": "none", "not compared": "none"}
SYMBOLS = {"fail": "✕", "pass": "✓", "none": "–"}
WIDTH, HEIGHT = 440, 200


class _Texts:
    def __init__(self, lang: str) -> None:
        self._texts = CATALOGUES[lang]
        self._notes = ZH_NOTES if lang == "zh-CN" else ()

    def __call__(self, key: str, **values: object) -> str:
        return self._texts[key].format(**values)

    def note(self, text: str) -> str:
        """A remark of the analysis in this language; as it is when it is not known."""
        for pattern, words in self._notes:
            found = re.fullmatch(pattern, text)
            if found:
                return found.expand(words)
        return text


def render(data: dict[str, Any], *, lang: str = "en") -> str:
    """The page. `data`: `Comparison.to_dict()`, or compare.json as read."""
    t, f = _Texts(lang), Figures(Words(lang))
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
        word=t(data["outcome"].upper()), sentence=_sentence(t, f, data), figures=_figures(t, data),
        sides=[(t(side), _facts(t, f, data[side])) for side in ("base", "new")],
        rows=[_row(t, f, c) for c in changes],
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
        ".verdict.same{background:var(--c-sunk);border-color:var(--c-line-strong)}.verdict.same .word{font-size:24px}"
        ".verdict.same .symbol{background:var(--c-muted)}"
        ".top .wrap{max-width:1128px}main.wrap{max-width:1128px;padding-top:26px;padding-bottom:40px}"
        "tr.fail td,tr.pass td{font-weight:600}"
    )
    return themes + (TEMPLATES / "report.css").read_text(encoding="utf-8").replace("FONT", FONT) + own


def _label(t: _Texts, c: dict[str, Any]) -> str:
    if c["metric"] in ("attainment", "knee"):
        return t("attainment") if c["metric"] == "attainment" else t("knee")
    return f"{c['metric'].upper()} {c['statistic']}"


def _value(f: Figures, c: dict[str, Any], value: Any) -> str:
    if c["unit"] == "s":
        return f.duration(value)
    return f.share(value) if c["unit"] == "1" else f.rate(value)


def _sentence(t: _Texts, f: Figures, data: dict[str, Any]) -> str:
    compared = [c for c in data["changes"] if c["outcome"] != "not compared"]
    listed = [c for c in compared if c["outcome"] == data["outcome"]] if data["outcome"] != "no clear change" else []
    if not listed:
        rates = {c["offered_qps"] for c in compared if c["offered_qps"] is not None}
        return t("sentence_same", all=len(compared), rates=len(rates))

    def size(c: dict[str, Any]) -> tuple[bool, float]:
        effect = number(c["effect"])
        return c["metric"] == "attainment", abs(effect) if effect is not None else 0.0  # the SLO first

    c = max(listed, key=size)
    key = {"1": "change_share", "s": "change_time", "1/s": "change_rate"}[c["unit"]]
    base, new = _value(f, c, c["base"]), _value(f, c, c["new"])
    first = t(key, label=_label(t, c), qps=f.asked(c["offered_qps"]), base=base, new=new)
    return t(f"sentence_{data['outcome']}", n=len(listed), all=len(compared), first=first)


def _facts(t: _Texts, f: Figures, side: dict[str, Any]) -> list[tuple[str, str]]:
    knee = side.get("knee_qps")
    return [
        (t("run"), side["run_id"]),
        (t("started"), str(side.get("started_utc") or t("none"))),
        (t("model"), side.get("model") or t("none")),
        (t("verdict"), side["verdict"]),
        (t("knee"), t("none") if knee is None else f.rate(knee)),
        (t("schedule"), str(side.get("schedule_hash") or t("none"))[:16]),
        (t("version"), str(side.get("tool_version") or t("none"))),
    ]


def _row(t: _Texts, f: Figures, c: dict[str, Any]) -> dict[str, Any]:
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


def _figures(t: _Texts, data: dict[str, Any]) -> list[dict[str, Any]]:
    tolerance = data["tolerance"]
    wanted = [("attainment", "value", t("chart_attainment"), t("axis_share"), tolerance / 10, "joint")]
    for name in ("ttft", "tpot", "e2e"):
        wanted.append((name, "p95", t("chart_latency", metric=name.upper()), t("axis_change"), tolerance, name))
    out = []
    for metric, statistic, title, axis, limit, colour in wanted:
        rows = [c for c in data["changes"] if (c["metric"], c["statistic"]) == (metric, statistic)]
        rows = [c for c in rows if c["effect"] is not None]
        points = [
            {"x": c["offered_qps"], "o": c["outcome"], "y": 100 * c["effect"]}
            | {end: 100 * c[end] for end in ("low", "high")}
            for c in rows
            if all(finite(c[k]) is not None for k in ("effect", "low", "high"))
        ]
        if not points:
            continue
        inner, width, height = svg.draw(_spec(points, axis, t("axis_rate"), 100 * limit, colour))
        out.append({"title": title, "svg": Markup(inner), "width": width, "height": height,
                    "caption": t("caption") + ("" if len(points) == len(rows) else " " + t("endless"))})  # fmt: skip
    return out


def _spec(points: list[dict[str, Any]], axis_y: str, axis_x: str, limit: float, colour: str) -> dict[str, Any]:
    """Points with intervals over rates; a band for the tolerance, a line at zero."""
    rates = sorted({p["x"] for p in points})
    x = {"field": "x", "type": "quantitative", "title": axis_x, "axis": {"values": rates, "format": "~g"},
         "scale": {"zero": False, "nice": False, "padding": 18}}  # fmt: skip
    y = {"field": "y", "type": "quantitative", "title": axis_y}
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
