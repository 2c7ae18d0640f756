"""Shape `knee_search`: looks for the knee on the live run, stage by stage, and holds the watermark at the end.

Input: section `search` of the config; the run folder after each stage. Output: the next stage, or the end.
Does not: compute an interval or choose a rate; `analysis/search.py` does, from what `analysis/analyse.py`
makes of the stages: the same code that judges the run afterwards.

1. The next stage is chosen while nothing is in flight: every level begins with an empty service.
2. Time and requests of a stage are reckoned at their most before it is begun, so the budget is never passed.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from shapes.walk import PlanShape

log = logging.getLogger("bench")

START_S = 3.0  # of a stage beyond arrivals and drain: its schedule, the lead, and the analysis before it
SPAN = 64.0  # lowest and highest rate by default: so many times from the first


class KneeSearch(PlanShape):
    """Walks an adaptive search for the knee; see section `search` of the config."""

    abstract = False
    plan_name = "knee_search"

    def __init__(self) -> None:
        super().__init__()
        self._probes: list[Any] = []
        self._begun_s = 0.0
        self._requests = 0
        self._config: Any = None

    def _begin(self) -> None:
        # Heavy imports now, while nothing waits for this process.
        import analysis.analyse
        import analysis.search  # noqa: F401

        bench = self.runner.environment.bench  # type: ignore[union-attr]
        self._probes, self._begun_s, self._requests = [], time.monotonic(), 0
        bench.begin(self.plan_name, self.next_stage)
        self._config = bench.load().config

    def next_stage(self, plan: Any, run_dir: Path) -> Any:
        """One more stage after those of `plan`, or None at the end of the search."""
        from analysis.analyse import search_probes
        from analysis.search import Spent, next_step
        from bench.workload.plan import search_stage
        from bench.workload.schedule import build_schedule

        config = self._config
        self._probes += search_probes(run_dir, after=len(self._probes) - 1)
        if len(self._probes) < len(plan.stages):
            log.warning("search: the last stage left no record; the search ends here")
            return None
        self._requests += len(build_schedule(plan, plan.stages[-1]).intended_s)
        spent = Spent(time.monotonic() - self._begun_s, self._requests)
        step = next_step(self._probes, config.slo.attainment_target, limits_of(config, plan), spent)
        rate = "" if step.qps is None else f" {step.qps:g} requests/s for {step.duration_s:g} s"
        log.info("search: %s%s: %s", step.kind, rate, step.reason)
        if step.kind == "stop":
            return None
        return search_stage(config, plan, step.qps, step.duration_s, hold=step.kind == "hold")


def limits_of(config: Any, plan: Any) -> Any:
    """The search's limits: section `search`, tightened by section `limits`; `plan` holds the first stage."""
    from analysis.search import Limits

    search, first = config.search, plan.stages[0]
    start = first.offered_qps
    times = [s for s in (search.max_duration_sec, config.limits.max_duration_sec) if s is not None]
    counts = [n for n in (search.max_requests, config.limits.max_requests) if n is not None]
    return Limits(
        start_qps=start,
        lowest_qps=search.lowest_qps or start / SPAN,
        highest_qps=search.highest_qps or start * SPAN,
        stage_s=first.duration_s,
        max_time_s=min(times),
        max_requests=min(counts, default=float("inf")),
        width_ratio=search.width_ratio,
        width_qps=search.width_qps or 0.0,
        hold_s=search.hold_sec,
        overhead_s=config.sweep.drain_limit_sec + START_S,
    )
