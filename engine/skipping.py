"""Stretches of pure decode: many equal steps at once, as exact as one by one.

Input: a core, its planned step, the moments at which something may change. Output: the stretch's end; plan and pool.
Does not: choose what runs (engine/styles.py says how far a step may repeat) or know how long steps take (stepping).
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from engine.step import StepPlan

if TYPE_CHECKING:
    from engine.scheduler import Core


def stretch(core: Core, plan: StepPlan, now_s: float, next_arrival_s: float, next_event_s: float) -> float:
    """Extend a planned step to all that follow until something can change; the end of the last, in seconds.

    Exact: the same finish times, blocks and noise as step by step. The stretch ends before the step in which
    `next_event_s` (an abort) lies, and with the step of `next_arrival_s` where an arrival could change a decision.
    """
    end = now_s + core.duration(plan)
    steps = core.style.jump(plan, now_s)
    if steps <= 1:
        return end
    horizon, times = next_event_s, core.times
    blocked = plan.stop == "blocked" and core.fifo
    full = plan.stop == "full" and core.mlfq is None
    if not (full or blocked) or core.limited:
        horizon = min(horizon, next_arrival_s)
    if core.sheds or plan.stop == "blocked" or core.mlfq is not None:
        horizon = min(horizon, core.policy.stable_until(now_s))
    if core.swapped:
        horizon = min(horizon, core.wake_s(now_s))
    steps = min(steps, times.longest())
    n = len(plan.decode)
    base = times.base_s(plan.tokens, n, plan.kv_tokens)
    growth = times.kv_s * n
    if horizon < math.inf:
        steps = times.steps_until(horizon - now_s, steps, base, growth)
        if horizon == next_event_s or core.limited:
            steps -= 1  # an abort or the door must see the state of then: that step is done by itself
    if steps <= 1:
        return end
    size, pool = core.config.block_size, core.pool
    if plan.grouped:
        group = core.group
        pool.take_unnamed(group.blocks(steps) - group.blocks(1))  # type: ignore[union-attr]
    else:
        for request in plan.decode:
            short = request.computed + steps - request.room
            if short > 0:
                pool.take(request, (short + size - 1) // size)
    plan.steps = steps
    plan.duration_s = times.stretch_s(steps, base, growth)
    core.plan_end_s = now_s + plan.duration_s
    return core.plan_end_s
