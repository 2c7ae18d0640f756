"""Shape `ramp`: the rate grows steadily within each stage."""

from __future__ import annotations

from shapes.walk import PlanShape


class Ramp(PlanShape):
    """Walks the plan `ramp`: the rate grows steadily within each stage."""

    abstract = False
    plan_name = "ramp"
