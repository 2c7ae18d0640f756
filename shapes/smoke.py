"""Shape `smoke`: 2 requests a second for 30 s: does anything work at all."""

from __future__ import annotations

from shapes.walk import PlanShape


class Smoke(PlanShape):
    """Walks the plan `smoke`: 2 requests a second for 30 s: does anything work at all."""

    abstract = False
    plan_name = "smoke"
