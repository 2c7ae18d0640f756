"""Preemptions that are taken back: counted by hand, in the plan and after the step, and told in the journal."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.profiles import PROFILES
from engine.request import RUNNING, SWAPPED, WAITING, Request
from engine.scheduler import Core, EngineConfig
from engine.settings import ClassSpec
from engine.virtual import drive

# 6 usable blocks of 16 tokens: three prompts of two blocks each fill them.
FULL = EngineConfig(policy="slack_aware", num_blocks=7, block_size=16, max_num_seqs=4, max_model_len=512)


def step(core: Core, now: float):
    """One step; (plan, result, end)."""
    plan = core.plan(now)
    assert plan is not None
    end = now + core.duration(plan)
    return plan, core.commit(plan, end), end


def full(config: EngineConfig, output_of_first: int = 2):
    """A, B, C with their prompts computed, every block in use; A ends with `output_of_first` tokens."""
    core, told = Core(config), []
    from engine.journal import Journal

    core.journal = Journal(told.append)
    made = [Request("a", 0.0, 31, 40, output_of_first), Request("b", 0.0, 32, 40, 35), Request("c", 0.0, 32, 40, 35)]
    for request in made:
        core.submit(request, 0.0)
    _, result, now = step(core, 0.0)
    assert result.tokens == made and core.pool.free == 0
    return core, made, told, now


def events(told, name):
    return [e for e in told if e["event"] == name]


def test_a_finish_in_the_same_step_gives_the_victim_its_place_back():
    core, (a, b, c), told, now = full(FULL)
    plan = core.plan(now)
    # B and C want a third block each. None is free: C goes (2 blocks), B takes 1, 1 stays. A ends with this step.
    assert plan.preempted == [c] and c.state == WAITING and core.pool.free == 1 and plan.decode == [a, b]
    now += core.duration(plan)
    result = core.commit(plan, now)
    # 1 + A's 2 blocks are free: C had 2, one of them was overwritten: 16 of its 32 computed tokens are still there.
    assert result.finished == [a] and c.state == RUNNING and c.computed == 16 and c.preemptions == 0
    assert core.running == [b, c] and core.pool.free == 2 and len(core.policy) == 0 and result.preempted == []
    assert core.counters.revoked == 1 and core.counters.preemptions == 0 and core.door.relief == 1.0
    (entry,) = events(told, "preemption_revoked")
    assert entry["numbers"]["lost_tokens"] == 16 and entry["numbers"]["blocks"] == 1 and "16 of its tokens" in entry["text"]
    assert events(told, "preempted")[0]["request_id"] == entry["request_id"] == "c"
    plan, result, _ = step(core, now)
    # 33 tokens to know (32 of the prompt, 1 emitted) - 16: 17 are computed, and the second token comes with them.
    assert plan.prefill == [(c, 17)] and c in result.tokens and c.generated == 2


def test_without_a_departure_the_preemption_stands():
    core, (a, _b, c), told, now = full(FULL, output_of_first=30)
    _, result, now = step(core, now)
    assert c.state == WAITING and c.preemptions == 1 and core.counters.preemptions == 1 and result.preempted == [c]
    assert core.counters.revoked == 0 and not events(told, "preemption_revoked") and core.door.relief == 0.5
    assert a.generated == 2


def test_an_abort_of_the_one_that_asked_brings_the_victim_back():
    core, (a, b, c), told, now = full(FULL, output_of_first=30)
    plan = core.plan(now)
    core.abort("b", now)
    now += core.duration(plan)
    result = core.commit(plan, now)
    # B leaves 3 blocks, 1 was free: C's 2 and one to spare; A needs one for its 33rd token.
    assert result.aborted == [b] and c.state == RUNNING and core.running == [a, c] and core.counters.revoked == 1


def test_the_victim_that_left_meanwhile_stays_away():
    core, (a, b, c), told, now = full(FULL)
    plan = core.plan(now)
    core.abort("c", now)
    core.commit(plan, now + core.duration(plan))
    assert core.running == [b] and "c" not in core.by_id and core.counters.preemptions == 1 and core.counters.revoked == 0
    assert core.pool.free == 3 and core.backlog == 0


@pytest.mark.parametrize("policy", ["fcfs", "edf", "priority"])
def test_policies_that_stand_for_real_engines_do_not_revoke(policy):
    core, (_a, _b, c), told, now = full(FULL.with_(policy=policy))
    step(core, now)
    assert c.state == WAITING and core.counters.preemptions == 1 and not events(told, "preemption_revoked")


def crowd(**changes):
    """A decodes; X is in the middle of a long prompt; V and W are behind it; 1 of 12 blocks is free.

    Chunks of 64: A 8 tokens = 1 block, X 64 of 160 = 4 blocks, V 30 = 2, W 64 of 80 = 4.
    """
    config = FULL.with_(num_blocks=13, max_num_batched_tokens=256, long_prefill_token_threshold=64, **changes)
    core = Core(config)
    made = [Request(n, 0.0, p, 20, 15) for n, p in (("a", 8), ("x", 160), ("v", 30), ("w", 80))]
    for request in made:
        core.submit(request, 0.0)
    _, _, now = step(core, 0.0)
    assert core.pool.free == 1 and core.running == made
    return core, made, now


def test_an_earlier_victim_stays_when_a_later_one_freed_enough():
    core, (a, x, v, w), now = crowd()
    plan = core.plan(now)
    # X wants 4 blocks. V does the least harm: 1 + 2 = 3, too few. W: 3 + 4 = 7. X takes 4, 3 stay: V's 2 fit again.
    assert plan.preempted == [w] and v.state == RUNNING and v.preemptions == 0 and core.counters.revoked == 1
    assert v.computed == 30 and v in plan.decode and core.running == [a, x, v]  # nothing lost, not even this step
    core.commit(plan, now + core.duration(plan))
    assert v.generated == 2 and core.counters.preemptions == 1


def test_a_copy_to_the_host_that_has_not_begun_is_not_paid():
    core, (_a, _x, v, w), now = crowd(preemption_mode="swap", swap_space_gb=10.0)
    plan = core.plan(now)
    profile = core.config.profile
    only_w = profile.transfer_fixed_s + 64 * profile.kv_bytes_per_token / (profile.pcie_gb_s * 1e9)
    assert w.state == SWAPPED and core.swapped == [w] and v.state == RUNNING and v.swap_blocks == 0
    assert plan.swap_s == pytest.approx(only_w) and core.swap_free == core.config.swap_blocks - 4
    core.commit(plan, now + core.duration(plan))
    assert core.counters.swaps == core.counters.preemptions == 1


def test_who_asked_and_went_is_not_brought_back_in_the_plan():
    """X alone cannot be helped: V's and W's blocks together are too few for it."""
    core, (a, x, v, w), now = crowd()
    core.pool.take(a, 1)  # A holds the last free block
    x.view.max_tokens = 1871  # recompute 160 - 1870 x 4 / 68 of memory for long = 50: more than V (30), less than W (80)
    plan = core.plan(now)
    gone = {r.request_id for r in plan.preempted}
    assert "x" in gone and v.state == RUNNING and a in core.running and plan.decode


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("style", ["vllm", "sglang", "trt_max_util"])
def test_under_pressure_nothing_is_lost_and_some_are_revoked(mode, style):
    rng = np.random.default_rng(3)
    n = 400
    times = np.cumsum(rng.exponential(1 / 9, n)).tolist()
    prompts, outputs = rng.integers(100, 2000, n).tolist(), rng.integers(5, 400, n).tolist()
    profile = dataclasses.replace(PROFILES["h100-8b"], swap_async=style == "trt_max_util")
    config = EngineConfig(profile=profile, style=style, policy="slack_aware", num_blocks=1000, preemption_mode=mode,
                          swap_space_gb=10, default_class=ClassSpec(0.8, 0.1), noise_cv=0.03)
    told: list[dict] = []

    def make(i):
        return Request(str(i), times[i], prompts[i], outputs[i] + 50, outputs[i], index=i)

    out = drive(config, times, make, seed=1, journal=told.append)
    (counters,) = out.counters
    assert counters.finished == n and list(out.output_tokens) == outputs
    assert counters.preemptions == sum(out.preemptions) > 0
    taken, back = (len(events(told, name)) for name in ("preempted", "preemption_revoked"))
    assert taken == counters.preemptions + back and back == counters.revoked
    if style != "sglang":
        assert back > 0
    # the same without jumps: nothing about it depends on how steps are grouped
    again = drive(config, times, make, seed=1, jump=False)
    assert again.preemptions == out.preemptions and [c.revoked for c in again.counters] == [back]
