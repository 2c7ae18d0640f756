"""One stage of one variant, reduced to the counts that a comparison of policies needs.

Input: a simulated stage and the deadlines. Output: `Sample`.
Does not: average over seeds or draw; `analysis/compare.py` and `reports/overlay.py` do.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.workload.plan import Plan
from engine import virtual
from engine.settings import EngineConfig
from engine.simulate import StageResult, simulate_stages


@dataclass(frozen=True, slots=True)
class Sample:
    """Counts over the window's arrivals of one stage with one seed."""

    variant: str
    offered_qps: float
    seed: int
    arrivals: int
    met: int  # finished with both deadlines of their class kept
    refused: int
    worst_ttft_s: float  # of requests that got a first token
    preemptions: int
    fairness: float  # Jain's index of output tokens per tenant weight; 1 = even, None-like 1 with one tenant


def samples(variant: str, plan: Plan, config: Any, engine: EngineConfig) -> Iterator[Sample]:
    """One sample per stage of the plan."""
    for result in simulate_stages(plan, config, engine=engine):
        yield sample(variant, result, engine, plan.run_seed)


def sample(variant: str, result: StageResult, engine: EngineConfig, seed: int) -> Sample:
    """The counts of one stage; every arrival of the window counts, whatever became of it."""
    out, schedule, plan = result.outcomes, result.schedule, result.plan
    window = schedule.intended_s >= result.stage.warmup_s
    ttft_s = np.array(out.first_s) - schedule.intended_s
    tokens = np.array(out.output_tokens)
    gap_s = (np.array(out.last_s) - np.array(out.first_s)) / np.maximum(tokens - 1, 1)
    specs = [engine.spec(group.name) for group in plan.classes] or [engine.default_class]
    first_limit = np.array([s.ttft_deadline_s for s in specs])[schedule.request_class]
    gap_limit = np.array([s.tpot_deadline_s for s in specs])[schedule.request_class]
    ok = np.array(out.kind) == virtual.OK
    with np.errstate(invalid="ignore"):
        met = ok & (ttft_s <= first_limit) & (gap_s <= gap_limit)
    seen = ttft_s[window & ~np.isnan(ttft_s)]
    return Sample(
        variant, result.stage.offered_qps, seed, int(window.sum()), int((met & window).sum()),
        int(((np.array(out.kind) == virtual.REFUSED) & window).sum()), float(seen.max()) if len(seen) else 0.0,
        sum(c.preemptions for c in out.counters), _jain(plan, schedule.tenant, tokens, engine),
    )


def _jain(plan: Plan, tenant: np.ndarray, tokens: np.ndarray, engine: EngineConfig) -> float:
    """(sum x)^2 / (n sum x^2) over tenants, x = output tokens / (weight x share of the arrivals)."""
    if len(plan.tenants) < 2:
        return 1.0
    served = np.bincount(tenant, weights=tokens, minlength=len(plan.tenants))
    weights = np.array([engine.tenants[g.name].weight if g.name in engine.tenants else 1.0 for g in plan.tenants])
    x = served / weights
    return float(x.sum() ** 2 / (len(x) * (x * x).sum())) if x.any() else 1.0
