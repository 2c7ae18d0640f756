"""Other rules while requests are inside: nobody is lost, nothing computed twice, the new order holds from then on."""
from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.request import RUNNING, Request
from engine.scheduler import Core, EngineConfig
from engine.settings import POLICIES, STYLES, AdmissionSpec, ClassSpec, TenantSpec

BASE = EngineConfig(num_blocks=301, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=1024,
                    default_class=ClassSpec(0.3, 0.05), tenants={"a": TenantSpec(1.0, 50.0), "b": TenantSpec(3.0)})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("grouped", [False, True])
def test_any_policy_hands_over_to_any_other(style, grouped):
    """Round after round of other policies, every few steps, some of them while a step is in flight."""
    rng = np.random.default_rng(7)
    specs = (None, AdmissionSpec(reject=False), AdmissionSpec(0.9, 2.0, promise="p95_output"))
    turns = itertools.cycle(itertools.permutations(POLICIES, 2))
    core = Core(BASE.with_(style=style), 1, grouped=grouped)
    made = [Request(str(i), 0.002 * i, int(p), int(o) + 5, int(o), tenant="ab"[i % 2], index=i)
            for i, (p, o) in enumerate(zip(rng.integers(10, 400, 150), rng.integers(1, 120, 150), strict=True))]
    tokens: dict[str, int] = {}
    now, waiting, steps, refused = 0.0, list(made), 0, 0
    while waiting or core.by_id:
        while waiting and waiting[0].arrival_s <= now:
            request = waiting.pop(0)
            refused += type(core.submit(request, now)).__name__ == "Reject"
        plan = core.plan(now)
        steps += 1
        assert steps < 20_000, "no progress"
        refused += len(core.dropped)
        core.dropped.clear()
        if plan is None:
            now = min([core.wake_s(now)] + ([waiting[0].arrival_s] if waiting else []))
            assert now < float("inf"), "stands still"
            continue
        if steps % 5 == 0:
            policy = next(turns)[steps % 2]
            core.adopt(core.config.with_(policy=policy, admission=specs[steps % 3], max_num_seqs=(4, 8, 16)[steps % 3],
                                         preemption_mode=("swap", "recompute")[steps % 2], swap_space_gb=steps % 4), now)
        now += core.duration(plan)
        result = core.commit(plan, now)
        for request in result.tokens:
            tokens[request.request_id] = tokens.get(request.request_id, 0) + 1
        core.settle()
        held = sum(-(-r.computed // 16) for r in core.by_id.values() if r.state == RUNNING)
        assert held + core.pool.free == core.pool.total
        assert core.started == sum(r.promised for r in [*core.running, *core.swapped])
        assert len(core.policy) + len(core.running) + len(core.swapped) == len(core.by_id)
    c = core.counters
    assert c.finished + c.rejected == 150 and c.rejected == refused
    assert core.backlog == core.started == core.door.committed == 0 and core.pool.free == core.pool.total
    done = [r for r in made if r.finish_reason]
    assert len(done) == c.finished > 60 and all(tokens[r.request_id] == r.output_tokens for r in done)


def test_the_new_order_holds_from_the_next_step_on():
    """One slot: FCFS has queued long, then short; sjf by the predicted length takes the short one first."""
    core = Core(BASE.with_(max_num_seqs=1, tenants={}))
    for name, output in (("now", 3), ("long", 90), ("short", 2)):
        core.submit(Request(name, 0.0, 10, 100, output, predicted_tokens=output), 0.0)
    now, order = 0.0, []
    plan = core.plan(now)
    core.adopt(core.config.with_(policy="sjf"), now)
    assert core.config.policy == "fcfs"  # a step is in flight
    while plan is not None:
        order += [r.request_id for r in plan.admitted]
        now += core.duration(plan)
        core.commit(plan, now)
        plan = core.plan(now)
    assert order == ["now", "short", "long"] and core.config.policy == "sjf"


def test_what_the_door_learnt_goes_on():
    core = Core(BASE.with_(admission=AdmissionSpec(promise="ewma")))
    core.door.relief, core.door.mean_output = 0.25, 42.0
    before = core.door.buckets["a"]
    core.adopt(core.config.with_(admission=AdmissionSpec(0.5, 1.3)), 1.0)
    # 300 blocks x 0.5 x (1 + 0.3 x 0.25) = 161
    assert core.door.limit == 161 and core.door.mean_output == 42.0 and core.door.buckets["a"] is before


def test_the_machine_does_not_change():
    core = Core(BASE)
    with pytest.raises(ValueError, match="num_blocks, prefix_caching cannot change while the engine runs"):
        core.adopt(BASE.with_(num_blocks=99, prefix_caching=True), 0.0)
