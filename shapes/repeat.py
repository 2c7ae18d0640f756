"""Shape `repeat`: the same rate several times, for the check that runs repeat."""

from __future__ import annotations

from shapes.walk import PlanShape


class Repeat(PlanShape):
    """Walks the plan `repeat`: the same rate several times, for the check that runs repeat."""

    abstract = False
    plan_name = "repeat"
