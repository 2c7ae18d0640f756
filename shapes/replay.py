"""Shape `replay`: the arrivals and lengths of a recorded trace."""

from __future__ import annotations

from shapes.walk import PlanShape


class Replay(PlanShape):
    """Walks the plan `replay`: the arrivals and lengths of a recorded trace."""

    abstract = False
    plan_name = "replay"
