"""What a plan will send, and what its stages can and cannot decide.

Input: a plan.
Output: per stage and in all: arrivals, tokens, seconds; misses that the attainment target allows.
Does not: predict latencies.

Attainment is decided by the Wilson interval (Wilson 1927; docs/analysis.md): for h hits of n at level 95 %,
    low = (p + z^2/2n - z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),  p = h/n, z = 1.959964.
With no miss at all low = n/(n + z^2), so a target t needs n >= z^2 t/(1 - t): 381 arrivals for 0.99.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bench.config.limits import Expectation
from bench.workload.plan import Plan, Stage
from bench.workload.schedule import Schedule, build_schedule

Z_95 = 1.959963984540054
# Below so many values the two-sided 95 % interval of a percentile has no upper end: 1 - p^n >= 0.975.
PERCENTILE_SAMPLES = {"p50": 6, "p90": 36, "p95": 72, "p99": 368}


@dataclass(frozen=True, slots=True)
class StageExpectation:
    """One stage: what the law expects and what its seed plans."""

    index: int
    repeat: int
    name: str
    offered_qps: float
    duration_s: float
    window_s: float
    expected_arrivals: float  # integral of the rate
    arrivals: int  # of this seed, warm-up included
    window_arrivals: int
    input_tokens: int
    output_tokens: int
    misses_allowed: int | None  # in the window; None = too few arrivals to reach the target at all
    at_target: bool
    schedule_hash: str
    repeated_prompts: int = 0  # arrivals whose prompt (of a file) an earlier arrival of the run had

    def missing_percentiles(self) -> list[str]:
        """Percentiles that the window is too small for."""
        return [name for name, need in PERCENTILE_SAMPLES.items() if self.window_arrivals < need]


def wilson_low(hits: int, n: int) -> float:
    """Lower end of the two-sided 95 % Wilson interval of hits/n; 0 for n = 0."""
    if n == 0:
        return 0.0
    p, z2 = hits / n, Z_95 * Z_95
    return (p + z2 / (2 * n) - Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)


def arrivals_to_decide(target: float) -> int:
    """Fewest arrivals that can show `target` when not one of them misses."""
    n = math.ceil(Z_95 * Z_95 * target / (1 - target))
    while wilson_low(n, n) < target:
        n += 1
    return n


def misses_allowed(n: int, target: float) -> int | None:
    """Most misses of n arrivals with which the Wilson lower bound still reaches `target`; None when even 0 do not."""
    if wilson_low(n, n) < target:
        return None
    low, high = 0, n  # low always passes, high never does (target > 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if wilson_low(n - middle, n) >= target else (low, middle)
    return low


def expect_stage(
    plan: Plan, stage: Stage, attainment_target: float = 0.99, sent: np.ndarray | None = None
) -> StageExpectation:
    """What one stage sends, by computing its schedule; `sent`: prompts of earlier stages (bool by place), added to."""
    schedule = build_schedule(plan, stage)
    window = int((schedule.intended_s >= stage.warmup_s).sum())
    return StageExpectation(
        index=stage.index,
        repeat=stage.repeat,
        name=stage.name,
        offered_qps=stage.offered_qps,
        duration_s=stage.duration_s,
        window_s=stage.window_s,
        expected_arrivals=stage.expected_arrivals,
        arrivals=len(schedule),
        window_arrivals=window,
        input_tokens=int(schedule.input_tokens.sum()),
        output_tokens=int(schedule.max_tokens.sum()),
        misses_allowed=misses_allowed(window, attainment_target),
        at_target=stage.ramp_to_qps is None and not stage.profile and stage.offered_qps == plan.target_qps,
        schedule_hash=schedule.hash,
        repeated_prompts=_repeated(plan, schedule, sent),
    )


def _repeated(plan: Plan, schedule: Schedule, sent: np.ndarray | None) -> int:
    if plan.lines is None or schedule.place is None:
        return 0
    prompts = np.unique(plan.lines.same[schedule.place])
    new = len(prompts) if sent is None else int(np.count_nonzero(~sent[prompts]))
    if sent is not None:
        sent[prompts] = True
    return len(schedule) - new


def expect_stages(plan: Plan, attainment_target: float = 0.99) -> list[StageExpectation]:
    """What every stage sends, in order."""
    sent = np.zeros(len(plan.lines) if plan.lines is not None else 0, dtype=bool)
    return [expect_stage(plan, stage, attainment_target, sent) for stage in plan.stages]


def repeat_sentence(plan: Plan, stages: list[StageExpectation]) -> str:
    """How many arrivals send a prompt of the user's file that went before in the run; empty when none does."""
    repeated = sum(stage.repeated_prompts for stage in stages)
    if plan.lines is None or not repeated:
        return ""
    arrivals, count, different = sum(stage.arrivals for stage in stages), len(plan.lines), plan.lines.different
    lines = f"{count:,} lines" + (f" ({different:,} different)" if different < count else "")
    return (
        f"prompts repeat: {arrivals:,} arrivals, {lines}: {repeated:,} arrivals ({repeated / arrivals:.0%}) send a "
        "prompt that went before, which a prefix cache can answer faster"
    )


def total(plan: Plan, stages: list[StageExpectation]) -> Expectation:
    """The sums over all stages."""
    return Expectation(
        requests=sum(stage.arrivals for stage in stages),
        input_tokens=sum(stage.input_tokens for stage in stages),
        output_tokens=sum(stage.output_tokens for stage in stages),
        arrivals_s=math.fsum(stage.duration_s for stage in plan.stages),
        longest_s=math.fsum(stage.duration_s + stage.drain_limit_s for stage in plan.stages),
    )


def expect_plan(plan: Plan) -> Expectation:
    """What the whole plan sends, to be held against `limits`."""
    return total(plan, expect_stages(plan))
