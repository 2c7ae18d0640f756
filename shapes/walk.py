"""What all shapes share: start the run of a plan, keep the users constant, end when all is drained.

Input: the name of a plan (see bench/workload/plan.py). Output: ticks for Locust.
Does not: compute arrivals; the conductor, which the locustfile has put at
`environment.bench`, announces the stages.
"""

from __future__ import annotations

from typing import Any

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
        """Locust calls this before each run, and once more when the users start: only the first begins afresh."""
        super().reset_time()
        if self._conductor is None or self._conductor.finished:
            self._begun = False

    @property
    def _conductor(self) -> Any:
        bench = getattr(self.runner.environment, "bench", None) if self.runner is not None else None
        return bench.conductor if bench is not None else None

    def _begin(self) -> None:
        self.runner.environment.bench.begin(self.plan_name)  # type: ignore[union-attr]

    def tick(self) -> tuple[int, float] | None:
        """(one user per worker, spawn all at once) until the run has its whole folder, then None."""
        if self._conductor is None:
            name = type(self).__name__
            raise StopTest(f"shape {name} needs a locustfile of this project, such as locustfiles/chat.py")
        if not self._begun:
            self._begun = True
            try:
                self._begin()
            except StopTest:  # refused and said in the log; from a tick it would be a traceback of Locust's greenlet
                return None
        elif self._conductor.finished:
            return None
        workers = getattr(self.runner, "worker_count", 1) or 1
        return workers, float(workers)
