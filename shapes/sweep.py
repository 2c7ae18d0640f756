"""Shape `sweep`: the offered rates of the config (or --qps-stages), each once or --stage-repeats times."""

from __future__ import annotations

from shapes.walk import PlanShape


class Sweep(PlanShape):
    """Walks the plan `sweep`: the offered rates of the config (or --qps-stages), each once or --stage-repeats times."""

    abstract = False
    plan_name = "sweep"
