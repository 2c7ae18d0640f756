"""Shape `single`: one stage at the target rate of the config (or --offered-qps)."""

from __future__ import annotations

from shapes.walk import PlanShape


class Single(PlanShape):
    """Walks the plan `single`: one stage at the target rate of the config (or --offered-qps)."""

    abstract = False
    plan_name = "single"
