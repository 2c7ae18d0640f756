"""The report's section on a baseline: what became worse or better, both runs' curves, or why there is no comparison.

Input: a `Context` and the content of compare.json, or {"refused": {...}}. Output: dicts of ready texts and `Chart`s.
Does not: compare (`analysis/compare_runs.py` does). The page of `bench compare` is `compare.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import altair as alt

from reports.charts import HALF, Chart, Context, Key, compose, data, encodings, log_scale, marked_line, middle, rule_y
from reports.compare import KINDS, SYMBOLS, Texts, change_row, change_sentence, difference_spec, facts, remarks
from reports.figures import finite, number


@dataclass
class Section:
    """The section, and the line about it under the verdict."""

    kind: str  # pass | fail | none | invalid
    symbol: str
    word: str
    sentence: str
    refused: list[str]
    lists: list[tuple[str, list[str]]]
    columns: list[str]
    rows: list[dict[str, Any]]
    sides: list[tuple[str, list[tuple[str, str]]]]
    method: str
    overlays: list[Chart]
    differences: list[Chart]


def section(ctx: Context, comparison: dict[str, Any]) -> Section:
    """What the page shows of a comparison."""
    t, f = Texts(ctx.words.lang), ctx.figures
    if "refused" in comparison:
        return _refusal(t, comparison["refused"])
    kind, changes = KINDS[comparison["outcome"]], comparison["changes"]
    return Section(
        kind=kind,
        symbol=SYMBOLS[kind],
        word=t(comparison["outcome"].upper()),
        sentence=change_sentence(t, f, comparison),
        refused=[],
        lists=remarks(t, f, comparison),
        columns=[t(k) for k in ("rate", "number", "base", "new", "change", "interval", "floor", "outcome", "remark")],
        rows=[change_row(t, f, c) for c in changes],
        sides=[(t(side), facts(t, f, comparison[side])) for side in ("base", "new")],
        method=t(
            "method_text",
            level=f.share(comparison["level"], 0),
            each=f.share(comparison["level_each"], 3),
            tolerance=f.share(comparison["tolerance"], 0),
            share=f"{comparison['tolerance'] * 10:g}",
        ),
        overlays=[c for c in (_overlay(ctx, t, comparison, name) for name in OVERLAYS) if c is not None],
        differences=[
            c
            for c in (_difference(ctx, t, comparison, *what) for what in DIFFERENCES)
            if c is not None
        ],
    )  # fmt: skip


def _refusal(t: Texts, refused: dict[str, Any]) -> Section:
    code = refused.get("code") or "unreadable"
    text = t(f"refused_{code}", base=refused.get("base", ""))
    return Section(
        "invalid", "!", t("REFUSED"), text, [str(d) for d in refused.get("details") or []], [], [], [], [], "", [], []
    )


# name -> (value, low, high) of a curve's row
OVERLAYS = {
    "attainment": ("attainment", "attainment_low", "attainment_high"),
    "ttft": ("ttft_p95_s", "ttft_p95_low_s", "ttft_p95_high_s"),
}
DIFFERENCES = (
    ("attainment", "value", "joint"),
    ("ttft", "p95", "ttft"),
    ("tpot", "p95", "tpot"),
    ("e2e", "p95", "e2e"),
)


def _curve(side: dict[str, Any], names: tuple[str, str, str]) -> list[dict[str, Any]]:
    """The middle repeat of each rate: {x, y, low, high}; y may be infinite."""
    groups: dict[float, list[dict[str, Any]]] = {}
    for row in side.get("curve") or []:
        if number(row.get(names[0])) is not None:
            groups.setdefault(row["offered_qps"], []).append(row)
    return [
        {"x": qps, **{k: middle(r.get(n) for r in rows) for k, n in zip(("y", "low", "high"), names, strict=True)}}
        for qps, rows in sorted(groups.items())
    ]


def _overlay(ctx: Context, t: Texts, comparison: dict[str, Any], name: str) -> Chart | None:
    f, share = ctx.figures, name == "attainment"
    curves = {side: _curve(comparison[side], OVERLAYS[name]) for side in ("base", "new")}
    if not all(curves.values()):
        return None
    colour, labels = ("joint" if share else "ttft"), {side: t(side) for side in curves}
    keys = [Key(labels["new"], colour, (), "circle"), Key(labels["base"], "theory", (7, 3), "square")]
    factor = 1.0 if share else 1e3
    drawn, edge = [], []
    for side, curve in curves.items():
        for p in curve:
            y, low, high = finite(p["y"]), finite(p["low"]), finite(p["high"])
            if y is None:
                edge.append({"x": p["x"], "who": labels[side], "row": ["new", "base"].index(side)})
            elif share or y > 0:
                drawn.append(
                    {"x": p["x"], "y": y * factor, "who": labels[side], "text": f.share(y) if share else f.duration(y)}
                    | {"low": (y if low is None else low) * factor, "high": (y if high is None else high) * factor}
                )
    top = max(p["x"] for curve in curves.values() for p in curve) * 1.04
    x = alt.X(
        "x:Q",
        title=ctx.words("axis_offered"),
        scale=alt.Scale(domain=[0, top], nice=False, clamp=True),
        axis=alt.Axis(tickCount=8, format=",~f"),
    )
    layers: list[alt.Chart] = []
    slo = ctx.analysis.slo
    if share:
        scale = alt.Scale(domain=[0, 1])
        y_axis = alt.Y("y:Q", title=t("axis_attainment"), scale=scale, axis=alt.Axis(format=".0%", tickCount=5))
        target = finite(slo.get("attainment_target"))
        if target is not None:
            label = ctx.words("label_target", value=f.share(target, 1))
            layers += rule_y(target, label, "slo", [8, 4], "left", below=True)
    else:
        deadline = finite(slo.get("ttft_deadline_s"))
        scale, ticks = log_scale([*(p["y"] for p in drawn), deadline * 1e3 if deadline else None], room=1.6,
                                 head=0.16 if edge else 0.0)  # fmt: skip
        y_axis = alt.Y("y:Q", title="TTFT p95 (ms)", scale=scale, axis=alt.Axis(format=",~f", values=ticks))
        low, high = scale.to_dict()["domain"]
        drawn = [{**p, "low": max(low, min(high, p["low"])), "high": max(low, min(high, p["high"]))} for p in drawn]
        if deadline:
            layers += rule_y(deadline * 1e3, ctx.words("label_slo", value=f.duration(deadline)), "slo", [8, 4], "left")
    signs, base = encodings("who", keys), alt.Chart(data(drawn))
    tips = [
        alt.Tooltip("x:Q", title=ctx.words("axis_offered")),
        alt.Tooltip("who:N", title=t("run")),
        alt.Tooltip("text:N", title=ctx.words("value")),
    ]
    layers += [
        base.mark_rule(strokeWidth=5, opacity=0.25).encode(
            x=x, y=alt.Y("low:Q", scale=scale), y2=alt.Y2("high:Q"), color=signs["color"]
        ),
        *marked_line(base, x, y_axis, signs, tips),
    ]
    for row in (0, 1):
        mine = [e for e in edge if e["row"] == row]
        if mine:
            layers.append(
                alt.Chart(data(mine))
                .mark_point(size=46, filled=True, opacity=1)
                .encode(x=x, y=alt.YValue(9 + 13 * row), color=signs["color"], shape=signs["shape"], tooltip=tips[:2])
            )
    title = t("attainment") if share else "TTFT p95"
    caption = t("caption_overlay") + (" " + t("caption_edge") if edge else "")
    known = {qps: {} for qps in sorted({p["x"] for curve in curves.values() for p in curve})}
    for side, curve in curves.items():
        for p in curve:
            known[p["x"]][side] = p
    show = f.share if share else f.duration

    def cell(p: dict[str, Any] | None) -> str:
        return t("none") if p is None else f"{show(p['y'])} {f.interval(p['low'], p['high'], show)}".strip()

    return Chart(
        f"compare-{name}",
        t("chart_overlay", metric=title),
        caption,
        compose(layers, 260),
        [t("rate"), t("base"), t("new")],
        [[f.asked(qps), cell(sides.get("base")), cell(sides.get("new"))] for qps, sides in known.items()],
        width=HALF,
        keys=keys,
    )


def _difference(
    ctx: Context, t: Texts, comparison: dict[str, Any], metric: str, statistic: str, colour: str
) -> Chart | None:
    f = ctx.figures
    found = difference_spec(t, comparison, metric, statistic, colour)
    if found is None:
        return None
    title, points, spec, whole = found
    spec = {k: v for k, v in spec.items() if k not in ("width", "height", "data")}
    spec |= {"$schema": alt.SCHEMA_URL, "height": 220, "datasets": {"points": points}, "data": {"name": "points"}}
    spec["autosize"] = {"type": "fit", "contains": "padding"}
    rows = [
        [*row["cells"], row["outcome"]]
        for row in (
            change_row(t, f, c)
            for c in comparison["changes"]
            if (c["metric"], c["statistic"]) == (metric, statistic)
        )
    ]
    return Chart(
        f"difference-{metric}",
        title,
        t("caption") + ("" if whole else " " + t("endless")),
        spec,
        [t(k) for k in ("rate", "number", "base", "new", "change", "interval", "floor", "outcome")],
        rows,
        label=t("attainment") if metric == "attainment" else metric.upper(),
        keys=[
            Key(t("no clear change"), colour, (), "circle", line=False),
            Key(t("better"), colour, (), "diamond", line=False),
            Key(t("worse"), "slo", (), "diamond", line=False),
            Key(t("key_tolerance"), "wedge", area=True),
        ],
    )


def line(found: Section) -> dict[str, str]:
    """The line under the verdict."""
    return {"kind": found.kind, "symbol": found.symbol, "word": found.word, "sentence": found.sentence}
