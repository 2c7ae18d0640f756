"""What all shapes share: start the run of a plan, keep the users constant, end when all is drained.

Input: the name of a plan (see bench/workload/plan.py). Output: ticks for Locust.
Does not: compute arrivals; the conductor, which the locustfile has put at
`environment.bench`, announces the stages.
"""
from __future__ import annotations

from locust import LoadTestShape
from locust.exception import StopTest


class PlanShape(LoadTestShape):
    """A shape that runs one plan to its end."""

    abstract = True
    plan_name = ""

    def __init__(self) -> None:
        super().__init__()
        self._begun = False

    def reset_time(self) -> None:
        """Locust calls this before each run; a second run from the web page starts afresh."""
        super().reset_time()
        self._begun = False

    def tick(self) -> tuple[int, float] | None:
        """(one user per worker, spawn all at once) until the run has its whole folder, then None."""
        environment = self.runner.environment  # type: ignore[union-attr]
        bench = getattr(environment, "bench", None)
        if bench is None or bench.conductor is None:
            name = type(self).__name__
            raise StopTest(f"shape {name} needs a locustfile of this project, such as locustfiles/chat.py")
        if not self._begun:
            self._begun = True
            bench.begin(self.plan_name)
        elif bench.conductor.finished:
            return None
        workers = getattr(self.runner, "worker_count", 1) or 1
        return workers, float(workers)
