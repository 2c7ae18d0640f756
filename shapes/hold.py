"""Shape `hold`: one rate, such as the watermark of `bench plan`, for as long as asked."""

from __future__ import annotations

from shapes.walk import PlanShape


class Hold(PlanShape):
    """Walks the plan `hold`: one rate for as long as asked; its verdict proves the watermark or breaks it."""

    abstract = False
    plan_name = "hold"
