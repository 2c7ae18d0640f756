"""Taking running requests out of memory, and taking that back while it has cost nothing.

Input: a core, its plan, the place of the victim. Output: queues, pool and plan, changed.
Does not: choose the victim (engine/policies.py, control/preemption.py), or see when memory is short (engine/styles.py).

A victim's blocks are free from the plan on, but its tokens stay in them until somebody writes there: during the step
only those blocks are lost that others took. So a preemption can be revoked

in the plan     before the step starts: a later victim freed enough for all, so an earlier one need not go. Nothing is
                lost, a copy to the host that was ordered is not made.
after the step  at commit: a finish or an abort left room for what the victim held and for the next step of all others.
                The blocks that others wrote into are computed again, the rest is as it was; a copy that was made is
                thrown away.

1. Revoking is for the policy that weighs harm (`slack_aware`; EngineConfig.revoke): vLLM and the others do not.
2. A revoked preemption is none: no counter, no exemption, no loss of oversubscription.
3. Who asked for the memory and had to go itself is not brought back in the plan: the step would do nothing.
"""
from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from control.preemption import VictimRule, cheaper_mode
from engine.request import RUNNING, SWAPPED, WAITING, Request
from engine.settings import EngineConfig
from engine.step import StepPlan, Victim

if TYPE_CHECKING:
    from engine.scheduler import Core


def unschedule(plan: StepPlan, request: Request) -> int:
    """Take a request out of a plan; the tokens that this gives back."""
    for i, other in enumerate(plan.decode):
        if other is request:
            del plan.decode[i]
            return 1
    for i, (other, count) in enumerate(plan.prefill):
        if other is request:
            del plan.prefill[i]
            return count
    return 0


def machine(config: EngineConfig) -> VictimRule:
    """The costs of preemption on the configured hardware."""
    profile = config.profile
    return VictimRule(1.0 / profile.prefill_tps, profile.attention_s, profile.kv_bytes_per_token,
                      profile.pcie_gb_s * 1e9, profile.transfer_fixed_s, True)


def preempt(core: Core, index: int, plan: StepPlan, now_s: float) -> int:
    """Take the running request at `index` out of memory: to the host if the mode and the room allow, else drop.

    Returns the tokens that it had in this step.
    """
    request = core.running.pop(index)
    config = core.config
    given_back = unschedule(plan, request)
    blocks = request.blocks
    mode = config.preemption_mode
    if mode == "auto":
        mode = cheaper_mode(request.computed, 0, machine(config))
    swaps = mode == "swap" and 0 < blocks <= core.swap_free
    if core.journal is not None:
        core.journal.preempted(core, request, index, mode, swaps, now_s)
    victim = Victim(request, request.computed, blocks, request.shared, request.ready_s)
    if swaps:
        victim.swapped = True
        request.state = SWAPPED
        request.swap_blocks = blocks
        core.swap_free -= blocks
        victim.copy_s = copy(core, request, plan, now_s)
        core.swapped.insert(0, request)
    else:
        core.started -= request.promised
        core.owe(request, request.num_tokens)
        request.state = WAITING
        request.computed = 0
    if blocks:
        core.pool.release(request)
    request.preemptions += 1
    if request.state == WAITING:
        core.policy.push_back(request.refresh(), now_s)
    plan.taken_out += 1
    plan.preempted.append(request)
    if core.revokes:
        plan.victims.append(victim)
    else:
        count(core, swaps)
    return given_back


def count(core: Core, swapped: bool) -> None:
    """A preemption that stands."""
    core.counters.preemptions += 1
    core.counters.swaps += swapped
    if core.policy.name != "mlfq":  # mlfq preempts by choice, the others because memory ran out
        core.door.preempted()


def copy(core: Core, request: Request, plan: StepPlan, now_s: float) -> float:
    """Pay for one copy between device and host: by the step (seconds returned), or by the request alone."""
    profile = core.config.profile
    seconds = profile.transfer_fixed_s + request.computed * profile.kv_bytes_per_token / (profile.pcie_gb_s * 1e9)
    seconds *= core.config.time_scale
    if profile.swap_async:
        request.ready_s = now_s + 2 * seconds  # out now, in when needed
        return 0.0
    plan.swap_s += seconds
    return seconds


def give_way(core: Core, plan: StepPlan, now_s: float) -> None:
    """mlfq: running requests that used their quantum sink, and make room for better levels that wait."""
    assert core.mlfq is not None
    sunk = [r for r in core.running if r.generated and core.mlfq.sink(r.refresh())]
    for request in sorted(sunk, key=lambda r: -r.view.level):  # type: ignore[union-attr]
        head = core.policy.peek(now_s)
        if head is None or plan.stop == "empty" or len(plan.preempted) >= len(core.policy):
            return
        if head.level < request.view.level:  # type: ignore[union-attr]
            preempt(core, core.running.index(request), plan, now_s)


# -- taking it back ----------------------------------------------------------------------------------------------------


def revoke_planned(core: Core, plan: StepPlan, now_s: float) -> list[Request]:
    """Bring back the victims of this plan that need not go; the last that was chosen, whose loss harms most, first."""
    back = []
    for victim in reversed(plan.victims):
        if victim.request is not plan.asker and _private(victim) <= core.pool.plain and _room(core, victim):
            plan.swap_s -= victim.copy_s
            _restore(core, plan, victim, _private(victim), now_s, "not needed any more before the step began")
            back.append(victim.request)
    return back


def settle(core: Core, plan: StepPlan) -> None:
    """The preemptions of a plan that ends without a step stand."""
    for victim in plan.victims:
        count(core, victim.swapped)
    plan.victims = []


def intact(core: Core, plan: StepPlan) -> None:
    """Note how many blocks of each victim nobody wrote into; before the step's own blocks are given back.

    Blocks that were free already go first, then those of the victims, the first victim's first (as an LRU does).
    """
    left = core.pool.plain
    for victim in reversed(plan.victims):
        victim.intact = min(_private(victim), left)
        left -= victim.intact


def revoke_after(core: Core, plan: StepPlan, now_s: float) -> None:
    """At commit, after the departures: bring back the victims for which there is room; the other preemptions stand."""
    reserve = _next_need(core)
    for victim in reversed(plan.victims):
        request, private = victim.request, _private(victim)
        gone = request.state not in (WAITING, SWAPPED)  # aborted during the step
        if not gone and private + reserve + 1 <= core.pool.plain and _room(core, victim):
            _restore(core, plan, victim, victim.intact, now_s, "a departure in its step left room")
            reserve += 1 + victim.blocks - request.blocks
    settle(core, plan)


def _private(victim: Victim) -> int:
    return victim.blocks - victim.shared


def _room(core: Core, victim: Victim) -> bool:
    """A slot, and the shared part of its prompt still in the cache."""
    return (len(core.running) < core.cap
            and core.pool.match(victim.request, victim.shared) == victim.shared)


def _next_need(core: Core) -> int:
    """Blocks that the running requests need for their next step."""
    budget, size = core.config.max_num_batched_tokens, core.config.block_size
    total = 0
    for request in core.running:
        short = min(request.num_tokens, request.computed + budget) - request.room
        total += -(-short // size) if short > 0 else 0
    return total


def _restore(core: Core, plan: StepPlan, victim: Victim, kept: int, now_s: float, why: str) -> None:
    """Put a victim back among the running ones, in its old place, with `kept` of its own blocks as they were."""
    request, size = victim.request, core.config.block_size
    if request.state == SWAPPED:
        core.swapped.remove(request)
        core.swap_free += request.swap_blocks
        request.swap_blocks = 0
        request.ready_s = victim.ready_s
    else:
        assert request.view is not None
        core.policy.withdraw(request.view)
        core.started += request.promised
    if victim.shared:
        core.pool.share(request, victim.shared)
    request.state = RUNNING
    request.computed = min(victim.computed, (victim.shared + kept) * size)
    core.pool.take(request, -(-request.computed // size) - victim.shared)
    request.preemptions -= 1
    left = request.num_tokens - request.computed
    core.owe(request, 0 if left == 1 and request.generated else left)
    core.running.insert(bisect_left(core.running, request.order, key=lambda r: r.order), request)
    core.counters.revoked += 1
    plan.victims.remove(victim)
    plan.preempted.remove(request)
    if core.journal is not None:
        core.journal.preemption_revoked(core, request, victim.computed - request.computed, why, now_s)
