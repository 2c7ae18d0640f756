"""Shape `spike`: a burst between two calm stages."""

from __future__ import annotations

from shapes.walk import PlanShape


class Spike(PlanShape):
    """Walks the plan `spike`: a burst between two calm stages."""

    abstract = False
    plan_name = "spike"
