"""Single requests: input tokens x TTFT and output tokens x E2E.

Input: a `Context` whose analysis has `points` (`analysis/sample.py`). Output: `Chart` objects or None.
Does not: choose the sample or bin it.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from reports.charts import HALF, Chart, Context, Key, columns, compose, log_scale, rule_y
from reports.figures import finite
from reports.themes import ink

# outcome -> (colour, symbol); "" is the colour of the metric
SIGNS = {
    "met": ("", "circle"),
    "missed": ("slo", "triangle-up"),
    "rejected": ("layer_script", "square"),
    "timeout": ("theory", "diamond"),
    "error": ("joint", "cross"),
    "truncated": ("theory", "triangle-down"),
    "unsent": ("theory", "square"),
}
SIDES = {
    # chart -> (tokens, latency, metric, deadline, bins)
    "input-ttft": ("input_tokens", "ttft_s", "ttft", "ttft_deadline_s", "input_ttft"),
    "output-e2e": ("output_tokens", "e2e_s", "e2e", "e2e_target_s", "output_e2e"),
}
ROW = 11  # px between the rows of those that did not finish


def scatter(ctx: Context, name: str) -> Chart | None:
    """One dot per sampled arrival; what never got there stands on the upper edge."""
    t, f = ctx.words, ctx.figures
    tokens_key, latency_key, metric, deadline_key, bins_key = SIDES[name]
    points = ctx.analysis.points
    bins = (points.get("bins") or {}).get(bins_key) or []
    if not points.get("outcome") or not bins:
        return None
    rates = {s.stage: s.offered_qps for s in ctx.analysis.stages}
    finished: dict[str, list[tuple[float, float, float]]] = {}
    endless: dict[str, list[tuple[float, float]]] = {}
    for outcome, tokens, value, stage in zip(
        points["outcome"], points[tokens_key], points[latency_key], points["stage"], strict=True
    ):
        x, y, qps = finite(tokens), finite(value), rates.get(stage, 0.0)
        if x is None or outcome not in SIGNS:
            continue
        if y is not None and y > 0 and outcome in ("met", "missed"):
            finished.setdefault(outcome, []).append((x, y, qps))
        else:
            endless.setdefault(outcome, []).append((x, qps))
    drawn = [o for o in SIGNS if finished.get(o) or endless.get(o)]
    if not drawn:
        return None
    deadline = finite(ctx.analysis.slo.get(deadline_key))
    values = [y for rows in finished.values() for _, y, _ in rows]
    scale, ticks = log_scale([*values, deadline], head=0.06 * len(endless))
    right = max(x for rows in [*finished.values(), *endless.values()] for x, *_ in rows)
    x_axis = alt.X(
        "x:Q",
        title=t(f"axis_{tokens_key}"),
        scale=alt.Scale(domain=[0, right * 1.03 or 1], nice=False, clamp=True),
        axis=alt.Axis(tickCount=6, format=",~f"),
    )
    y_axis = alt.Y("y:Q", title=f"{metric.upper()} (s)", scale=scale, axis=alt.Axis(format=",~f", values=ticks))
    keys = [Key(outcome_name(ctx, o), SIGNS[o][0] or metric, (), SIGNS[o][1], line=False) for o in drawn]
    tips = [
        alt.Tooltip("x:Q", title=t(f"axis_{tokens_key}"), format=","),
        alt.Tooltip("y:Q", title=f"{metric.upper()} (s)", format=".3~g"),
        alt.Tooltip("q:Q", title=t("axis_offered"), format="~g"),
    ]
    layers: list[alt.Chart] = []
    for outcome in drawn:
        colour, shape = SIGNS[outcome][0] or metric, SIGNS[outcome][1]
        look = {
            "shape": shape,
            "filled": True,
            "fill": ink(colour),
            "size": 11 if outcome == "met" else 22,
            "opacity": 1,
        }
        if finished.get(outcome):
            base = alt.Chart(columns("xyq", finished[outcome]))
            layers.append(base.mark_point(**look).encode(x=x_axis, y=y_axis, tooltip=tips))
        if endless.get(outcome):
            edge = alt.YValue(6 + ROW * [o for o in drawn if endless.get(o)].index(outcome))
            base = alt.Chart(columns("xq", endless[outcome]))
            layers.append(base.mark_point(**look).encode(x=x_axis, y=edge, tooltip=[tips[0], tips[2]]))
    if deadline:
        key = "label_slo" if metric == "ttft" else "label_e2e_target"
        layers += rule_y(deadline, t(key, value=f.duration(deadline)), "slo", [8, 4], "right", halo=True)
    return Chart(
        name,
        t(f"chart_{bins_key}_title"),
        _caption(ctx, bins, metric),
        compose(layers, 300),
        [t(f"axis_{tokens_key}"), "n", f"{metric.upper()} p50", "p95", t("col_missed"), t("col_share")],
        [
            [
                f"{f.count(b['low'])} – {f.count(b['high'])}",
                f.count(b["n"]),
                f.duration(b["p50_s"]),
                f.duration(b["p95_s"]),
                f.count(b["missed"]),
                f.share(b["missed"] / b["n"]),
            ]
            for b in bins
        ],
        width=HALF,
        keys=keys,
    )


def outcome_name(ctx: Context, outcome: str) -> str:
    """The printed name of an outcome."""
    return ctx.words.known(f"outcome_{outcome}", ctx.words.known(f"status_{outcome}", outcome))


def _caption(ctx: Context, bins: list[dict[str, Any]], metric: str) -> str:
    t, f, points = ctx.words, ctx.figures, ctx.analysis.points
    first, last = bins[0], bins[-1]
    values = {"metric": metric.upper(), "first": f.duration(first["p50_s"]), "last": f.duration(last["p50_s"])}
    tokens = {"low": f.count(first["high"]), "high": f.count(last["low"])}
    parts = [t("cap_scatter", **values, **tokens) if len(bins) > 1 else t("cap_scatter_one", **values)]
    shown = sum(pair[0] for pair in points["outcomes"].values())
    missed = [sum(pair[i] for o, pair in points["outcomes"].items() if o != "met") for i in (0, 1)]
    if shown < points["arrivals"]:
        key = "cap_scatter_sample_all" if missed[0] == missed[1] else "cap_scatter_sample"
        parts.append(
            t(key, shown=f.count(shown), all=f.count(points["arrivals"]), kept=f.count(missed[0]),
              missed=f.count(missed[1]))
        )  # fmt: skip
    return " ".join(parts)
