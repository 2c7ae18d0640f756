"""How long the scheduler thinks about one request while many wait: CPU time, measured.

Input: engine settings, how many wait. Output: microseconds per request.
Does not: judge. CPU time of this thread, so other processes do not count; the garbage collector does.
"""
from __future__ import annotations

import time

import numpy as np

from engine.request import Request
from engine.scheduler import Core
from engine.settings import EngineConfig


def decision_us(config: EngineConfig, *, waiting: int = 1000, requests: int = 2000, seed: int = 1) -> np.ndarray:
    """(n,) microseconds per request: the door's decision, and its part of the step that gave it a slot.

    The queue is held at `waiting`: the door's refusals are off while requests enter, and on for a probe of each.
    """
    rng = np.random.default_rng(seed)
    core = Core(config.with_(replicas=1), seed)
    rejects = core.door.rejects
    core.door.rejects = False
    prompts, outputs = rng.integers(100, 2001, requests + 4 * waiting), rng.integers(2, 20, requests + 4 * waiting)
    clock, now, made = time.thread_time_ns, 0.0, 0
    door_us: dict[str, float] = {}
    found: list[float] = []

    def enter() -> None:
        nonlocal made
        i, made = made, made + 1
        prompt, output = int(prompts[i % len(prompts)]), int(outputs[i % len(outputs)])
        request = Request(str(i), now, prompt, output, output, tenant=f"t{i % 7}", ttft_deadline_s=3600.0)
        spent = 0
        if rejects:  # what the door takes with its budgets on; the refusal itself changes nothing
            begun = clock()
            core.door.budgets(request, core._load(now))
            spent = clock() - begun
        begun = clock()
        core.submit(request, now)
        door_us[request.request_id] = (clock() - begun + spent) / 1e3

    for _ in range(waiting + config.active_cap):
        enter()
    while len(found) < requests:
        begun = clock()
        plan = core.plan(now)
        spent = clock() - begun
        core.dropped.clear()
        if plan is None:
            break
        for request in plan.admitted:
            found.append(door_us.pop(request.request_id, 0.0) + spent / 1e3 / len(plan.admitted))
        now += core.duration(plan)
        core.commit(plan, now)
        while len(core.policy) < waiting:
            enter()
    return np.array(found[waiting // 2:] if len(found) > waiting else found)
