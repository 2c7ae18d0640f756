"""The capacity figures as every output prints them: one wording for page, summary and JUnit.

Input: a `Context`. Output: short texts.
Does not: find a knee or judge.

1. A figure is rounded as in the sentence of the analysis: down, an upper bound up. What is printed never claims more
   than was shown: where every rate held, the knee is "at least" what the arrivals prove (the lower bound).
2. Knee, flattening, lambda_max and the crossing of P95 are four limits with four names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reports.charts import Context
from reports.figures import finite


class KneeFigure(NamedTuple):
    """The knee in print; an empty `value` where there is none to give."""

    value: str  # `19.8`, `≥ 19.0`, `< 5.0`
    interval: str  # `[14.8, 22.9]` of a crossing, else empty

    @property
    def text(self) -> str:
        """Value and interval."""
        return f"{self.value} {self.interval}".strip()


def knee_bound(ctx: Context) -> float | None:
    """Where every rate held: what the arrivals prove, 1/s; the rate itself only where there is no lower bound."""
    c = ctx.analysis.capacity
    known = (finite(c.knee_low_qps), finite(c.knee_qps), finite(c.last_met_qps))
    return next((v for v in known if v is not None), None)


def knee(ctx: Context) -> KneeFigure:
    """The knee for tile, summary and JUnit; empty under INVALID and where none was found."""
    f, c = ctx.figures, ctx.analysis.capacity
    none = KneeFigure("", "")
    if not ctx.shows_capacity:
        return none
    if c.knee_kind == "crossing" and finite(c.knee_qps) is not None:
        return KneeFigure(f.capacity(c.knee_qps), f.capacity_span(finite(c.knee_low_qps), finite(c.knee_high_qps)))
    if c.knee_kind == "at_least" and (bound := knee_bound(ctx)) is not None:
        return KneeFigure(f"≥ {f.capacity(bound)}", "")
    if c.knee_kind == "below":
        high = finite(c.knee_high_qps)
        bound = high if high is not None else min((s.offered_qps for s in ctx.stages), default=None)
        return none if bound is None else KneeFigure(f"< {f.capacity(bound, up=True)}", "")
    return none


def safe_rate(ctx: Context) -> str:
    """`13.8 – 15.8`, or empty where none can be given."""
    f, c = ctx.figures, ctx.analysis.capacity
    low, high = finite(c.watermark_low_qps), finite(c.watermark_high_qps)
    if not ctx.shows_capacity or low is None or high is None:
        return ""
    return f"{f.capacity(low)} – {f.capacity(high)}"


def lambda_max(ctx: Context) -> tuple[float | None, float | None, float | None]:
    """(value, low, high) of the model's hard limit, 1/s; None each where it is not known or may not be given."""
    model = ctx.analysis.model or {}
    value = finite(ctx.analysis.capacity.lambda_max_qps)
    value = finite(model.get("lambda_max_qps")) if value is None else value
    if value is None or not ctx.shows_capacity:
        return None, None, None
    return value, finite(model.get("lambda_max_low_qps")), finite(model.get("lambda_max_high_qps"))


def flattening_qps(ctx: Context) -> float | None:
    """Where throughput stops following the load, 1/s; None without a growing stage or where it may not be given."""
    return finite(ctx.analysis.capacity.flattening_qps) if ctx.shows_capacity else None


def limits(ctx: Context) -> str:
    """One sentence each on the flattening point, where that of the analysis does not name it, and on lambda_max."""
    t, f = ctx.words, ctx.figures
    parts = []
    flat = flattening_qps(ctx)
    if flat is not None and not _says(ctx.analysis.capacity.code, ctx.analysis.capacity.params, "capacity.flat"):
        parts.append(t("limit_flattening", qps=f.capacity(flat)))
    top, low, high = lambda_max(ctx)
    if top is not None:
        figure = f"{f.capacity(top)} {t('unit_qps')} {f.capacity_span(low, high)}".strip()
        parts.append(t("limit_lambda_max", value=figure))
    if parts:
        parts.append(t("limit_not_knee"))
    return " ".join(parts)


def _says(code: str, params: dict[str, Any], wanted: str) -> bool:
    """Whether a sentence is the wanted one or holds it."""
    parts = (value for value in params.values() if isinstance(value, dict))
    return code == wanted or any(_says(str(part.get("code")), part.get("params") or {}, wanted) for part in parts)
