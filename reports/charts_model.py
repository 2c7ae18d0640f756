"""The queueing models against the measurement: one chart per metric, and the residuals.

Input: a `Context` whose analysis has a `model` (its shape: docs/queueing.md).
Output: `Chart` objects and rows of text. Does not: fit or predict.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from reports.charts import (
    Chart,
    Context,
    Key,
    compose,
    cut_span,
    data,
    encodings,
    log_scale,
    rate_axis,
    rate_band,
    rate_line,
)
from reports.figures import finite
from reports.themes import ink

METRICS = {"e2e_mean_s": "E2E mean", "e2e_p95_s": "E2E p95", "ttft_p95_s": "TTFT p95", "attainment": ""}
MODELS = ("predicted", "predicted_birth_death", "naive_mgk", "naive_pk")
SIGNS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "predicted": ("joint", (8, 3), "triangle-up"),
    "predicted_birth_death": ("theory", (2, 4), "diamond"),
    "naive_mgk": ("layer_script", (6, 2, 1, 2), "square"),
    "naive_pk": ("layer_script", (2, 3), "cross"),
}
RESIDUAL_BOUND = 1.0
JUDGED = ("predictive", "not_predictive")


def metric_label(ctx: Context, metric: str) -> str:
    """The printed name of a predicted metric."""
    return ctx.words("metric_e2e_mean") if metric == "e2e_mean_s" else METRICS[metric]


def predictions(ctx: Context, metric: str) -> list[dict[str, Any]]:
    """The model's rows of one metric that have a rate, by rising rate."""
    rows = [
        p
        for p in (ctx.analysis.model or {}).get("predictions") or []
        if isinstance(p, dict) and p.get("metric") == metric
    ]
    return sorted((p for p in rows if finite(p.get("offered_qps")) is not None), key=lambda p: p["offered_qps"])


def charts(ctx: Context) -> list[Chart]:
    """One chart per metric that has anything to show; empty without a model."""
    return [c for c in (_against(ctx, metric) for metric in METRICS) if c is not None]


def _against(ctx: Context, metric: str) -> Chart | None:
    t, f = ctx.words, ctx.figures
    rows = predictions(ctx, metric)
    used = [m for m in MODELS if any(finite(p.get(m)) is not None for p in rows)]
    if not used:
        return None
    share = metric == "attainment"
    name = t("metric_attainment_joint") if share else metric_label(ctx, metric)
    colour = "joint" if share else metric.partition("_")[0]
    measured = t("model_measured")
    keys = [Key(measured, colour, (), "circle", line=False)] + [Key(t(f"model_{m}"), *SIGNS[m]) for m in used]
    factor = 1.0
    show = f.share if share else f.duration
    points, lines = [], []
    for p in rows:
        fitted = p.get("status") == "calibration"
        value = finite(p.get("measured"))
        if value is not None and (share or value > 0):
            points.append(
                {"x": p["offered_qps"], "y": value * factor, "kind": measured, "text": show(value), "fitted": fitted}
            )
        for m in used:
            guess = finite(p.get(m))
            if guess is not None and (share or guess > 0):
                lines.append({"x": p["offered_qps"], "y": guess * factor, "kind": t(f"model_{m}"), "text": show(guess)})
    if share:
        y = alt.Y(
            "y:Q", title=t("axis_attainment"), scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", tickCount=5)
        )
    else:
        scale, ticks = log_scale([p["y"] for p in points + lines])
        y = alt.Y("y:Q", title=f"{name} (s)", scale=scale, axis=alt.Axis(format=",~f", values=ticks))
    signs, x = encodings("kind", keys), rate_axis(ctx)
    tips = [
        alt.Tooltip("x:Q", title=t("axis_offered")),
        alt.Tooltip("kind:N", title=t("col_kind")),
        alt.Tooltip("text:N", title=t("value")),
    ]
    layers = _knee_marks(ctx)
    drawn = alt.Chart(data(lines))
    layers.append(
        drawn.mark_line(strokeWidth=1.6).encode(x=x, y=y, color=signs["color"], strokeDash=signs["strokeDash"])
    )
    layers.append(
        drawn.mark_point(size=24, filled=True, opacity=1).encode(
            x=x, y=y, color=signs["color"], shape=signs["shape"], tooltip=tips
        )
    )
    if points:
        layers.append(
            alt.Chart(data(points))
            .mark_point(size=74, filled=True, opacity=1, stroke=ink(colour), strokeWidth=2)
            .encode(
                x=x,
                y=y,
                shape=signs["shape"],
                tooltip=tips,
                fill=alt.FillValue(ink(colour), condition={"test": "datum.fitted", "value": ink("panel")}),
            )
        )
    table = [
        [
            f.asked(p["offered_qps"]),
            show(p.get("measured")),
            *(show(p.get(m)) for m in used),
            _residual(ctx, p),
            t.known(f"model_status_{p.get('status')}", str(p.get("status"))),
        ]
        for p in rows
    ]
    return Chart(
        f"model-{metric.replace('_', '-')}",
        t("chart_model_title"),
        t("cap_model", metric=name),
        compose(layers, 300),
        [t("col_offered"), measured, *(t(f"model_{m}") for m in used), t("axis_residual"), t("col_status")],
        table,
        label=name if not share else t("col_attainment"),
        keys=keys,
    )


def _residual(ctx: Context, p: dict[str, Any]) -> str:
    if finite(p.get("residual_share")) is not None:
        return f"{p['residual_share'] * 100:+.1f}".replace("-", "−")
    return ctx.figures.signed_share(p.get("residual_ratio"))


def _knee_marks(ctx: Context) -> list[alt.Chart]:
    """The predicted knee with its interval; nothing under an INVALID verdict."""
    model = ctx.analysis.model or {}
    value = finite(model.get("knee_predicted_qps"))
    if value is None or not ctx.shows_capacity or model.get("knee_kind") != "crossing":
        return []
    span = cut_span(model.get("knee_predicted_low_qps"), model.get("knee_predicted_high_qps"), ctx.top_qps)
    text = f"{ctx.words('label_knee_predicted')} {ctx.figures.rate(value)}"
    return ([rate_band(span)] if span is not None else []) + rate_line(
        ctx, value, text, "theory", strokeDash=[2, 4], strokeWidth=1.6
    )


def residuals(ctx: Context) -> Chart | None:
    """Relative residual of the replay prediction over rate, one series per time metric."""
    t, f = ctx.words, ctx.figures
    signs_of = {
        "e2e_mean_s": ("e2e", (), "circle"),
        "e2e_p95_s": ("e2e", (7, 3), "square"),
        "ttft_p95_s": ("ttft", (2, 3), "triangle-up"),
    }
    rows = [p for metric in signs_of for p in predictions(ctx, metric) if finite(p.get("residual_ratio")) is not None]
    if not rows:
        return None
    keys = [Key(metric_label(ctx, m), *signs_of[m]) for m in signs_of if any(p["metric"] == m for p in rows)]
    points = [
        {
            "x": p["offered_qps"],
            "y": max(-RESIDUAL_BOUND, min(RESIDUAL_BOUND, p["residual_ratio"])),
            "kind": metric_label(ctx, p["metric"]),
            "judged": p.get("status") in JUDGED,
            "text": f.signed_share(p["residual_ratio"]),
        }
        for p in rows
    ]
    bound = max(0.3, min(RESIDUAL_BOUND, max(abs(p["y"]) for p in points) * 1.15))
    x = rate_axis(ctx)
    y = alt.Y(
        "y:Q",
        title=t("axis_residual"),
        scale=alt.Scale(domain=[-bound, bound]),
        axis=alt.Axis(format="+.0%", tickCount=5),
    )
    signs, base = encodings("kind", keys), alt.Chart(data(points))
    hues = alt.Scale(domain=[k.label for k in keys], range=[ink(k.colour) for k in keys])
    layers = [
        alt.Chart(data([{"y": -0.1, "y2": 0.1}]))
        .mark_rect(color=ink("wedge"))
        .encode(y=alt.Y("y:Q"), y2=alt.Y2("y2:Q")),
        alt.Chart(data([{"y": 0}])).mark_rule(color=ink("theory"), strokeDash=[2, 4]).encode(y=alt.Y("y:Q")),
        *(
            []
            if ctx.repeated()
            else [
                base.mark_line(strokeWidth=1.4).encode(x=x, y=y, color=signs["color"], strokeDash=signs["strokeDash"])
            ]
        ),
        base.mark_point(size=48, filled=True, opacity=1, strokeWidth=1.6).encode(
            x=x,
            y=y,
            stroke=alt.Stroke("kind:N", legend=None, scale=hues),
            shape=signs["shape"],
            fill=alt.Fill(
                "kind:N", legend=None, scale=hues, condition={"test": "!datum.judged", "value": ink("panel")}
            ),
            tooltip=[
                alt.Tooltip("x:Q", title=t("axis_offered")),
                alt.Tooltip("kind:N", title=t("col_kind")),
                alt.Tooltip("text:N", title=t("axis_residual")),
            ],
        ),
    ]
    judged = [p for p in points if p["judged"]]
    caption = (
        t("cap_residual", n=sum(1 for p in judged if abs(p["y"]) <= 0.1), all=len(judged))
        if judged
        else t("cap_residual_none")
    )
    table = [
        [
            f.asked(p["offered_qps"]),
            metric_label(ctx, p["metric"]),
            f.signed_share(p["residual_ratio"]),
            t.known(f"model_status_{p.get('status')}", str(p.get("status"))),
        ]
        for p in rows
    ]
    return Chart(
        "residual",
        t("chart_residual_title"),
        caption,
        compose(layers, 200),
        [t("col_offered"), t("col_kind"), t("axis_residual"), t("col_status")],
        table,
        keys=keys,
    )


def parameters(ctx: Context) -> list[list[str]]:
    """What the model was fitted to and what follows from it, as (name, value) rows."""
    t, f, model = ctx.words, ctx.figures, ctx.analysis.model or {}
    rows: list[list[str]] = []
    fit = model.get("fit") if isinstance(model.get("fit"), dict) else {}
    for name, label in (
        ("alpha_s", "α"),
        ("beta_s", "β"),
        ("gamma_s", "γ"),
        ("kappa_s", "κ"),
        ("kv_s", "κᵥ"),
        ("prefill_s", "δ"),
    ):
        if finite(fit.get(name)) is not None:
            error = finite((fit.get("se") or {}).get(name)) or finite(
                (fit.get("se") or {}).get(name.removesuffix("_s"))
            )
            rows.append(
                [
                    t("par_step", name=label),
                    f"{fit[name] * 1e3:.4g} ms" + (f" ± {1.96 * error * 1e3:.2g} ms" if error else ""),
                ]
            )
    if finite(fit.get("r2")) is not None:
        rows.append(["R²", f"{fit['r2']:.4f}"])
    if ctx.shows_capacity:
        for name, low, high in (
            ("lambda_max_qps", "lambda_max_low_qps", "lambda_max_high_qps"),
            ("knee_predicted_qps", "knee_predicted_low_qps", "knee_predicted_high_qps"),
            ("p95_crossing_predicted_qps", "", ""),
        ):
            if finite(model.get(name)) is not None:
                span = f.interval(model.get(low), model.get(high), f.rate)
                rows.append([t(f"par_{name}"), f"{f.rate(model[name], unit=True)} {span}".strip()])
    lengths = model.get("lengths") if isinstance(model.get("lengths"), dict) else {}
    for name in ("input_mean_tokens", "output_mean_tokens"):
        if finite(lengths.get(name)) is not None:
            rows.append([t(f"par_{name}"), f.count(lengths[name])])
    if finite(lengths.get("output_scv")) is not None:
        rows.append([t("par_output_scv"), f.significant(lengths["output_scv"])])
    used = model.get("calibration_stages") or []
    if used:
        rows.append([t("par_calibration"), ", ".join(f"{int(s):02d}" for s in used if finite(s) is not None)])
    return rows


def load_table(ctx: Context) -> dict[str, Any] | None:
    """Load and fixed point per stage: ρ = λ / λ_max, E[n] of the batch-coupled law, naive ρ beside it."""
    t, f = ctx.words, ctx.figures
    rows = []
    for s in (ctx.analysis.model or {}).get("stage_models") or []:
        if not isinstance(s, dict):
            continue
        exists = s.get("mean_field_exists")
        rows.append(
            [
                f.asked(s.get("offered_qps")),
                f.plain(s.get("load_ratio"), 3),
                "–" if exists is False else f.plain(s.get("mean_field_batch_size"), 2),
                "–" if exists is None else t("yes") if exists else t("no"),
                f.plain(s.get("naive_pk_rho"), 2),
                f.plain(s.get("naive_mgk_rho"), 3),
                f.duration(s.get("service_mean_s")),
                f.significant(s.get("service_m2_s2")),
                f.significant(s.get("service_scv")),
            ]
        )
    if not rows:
        return None
    return {
        "columns": [t("col_offered"), "ρ = λ/λ_max", "E[n]", t("col_steady_exists"), "ρ M/G/1", "ρ M/G/K",
                    t("col_service_mean"), t("col_service_m2"), t("col_service_scv")],  # fmt: skip
        "rows": rows,
    }


def sentence(ctx: Context) -> str:
    """What the model says of itself, in this language."""
    model = ctx.analysis.model or {}
    return ctx.words.said(str(model.get("code") or ""), model.get("params"), str(model.get("sentence") or ""))


def notes(ctx: Context) -> list[str]:
    """The model's own remarks."""
    model = ctx.analysis.model or {}
    texts, codes = model.get("notes") or [], model.get("notes_said") or []
    codes = codes if len(codes) == len(texts) else [{}] * len(texts)
    found = [ctx.words.said(c.get("code", ""), c.get("params"), str(n)) for n, c in zip(texts, codes, strict=True)]
    return found[:8]
