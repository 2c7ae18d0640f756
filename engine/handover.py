"""Other rules for a scheduler that goes on working: queue, door and limits change, what is inside stays.

Input: a core and the settings to go on with. Output: the same core under the new rules.
Does not: move requests between replicas, or change the machine (profile, blocks, style): that takes a restart.

1. No request is lost, none computed again; the waiting ones are ordered anew, preempted ones first.
2. A new limit that is already exceeded takes no effect on what runs: it holds for what comes.
3. What the door has learnt (mean output, relief of oversubscription, quotas in use) goes on.
Source: the rollout of docs/production.md (a replica changes from one policy to the other and back).
"""
from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import TYPE_CHECKING

from engine.settings import EngineConfig

if TYPE_CHECKING:
    from engine.scheduler import Core

# Fields of EngineConfig that may change while requests are inside. Not the deadlines: they are what policies are
# compared by.
RULES = frozenset({
    "policy", "max_num_batched_tokens", "max_num_seqs", "batch_size_cap", "enable_chunked_prefill",
    "long_prefill_token_threshold", "preemption_mode", "swap_space_gb", "hopeless", "admission", "revoke",
    "prediction_sigma", "tenants",
})


def fingerprint(config: EngineConfig) -> str:
    """Stands for all settings: two engines with the same one decide the same."""
    return hashlib.sha256(repr(config).encode()).hexdigest()[:16]


def fixed_changes(old: EngineConfig, new: EngineConfig) -> list[str]:
    """Settings that differ and cannot change while the engine runs."""
    return [f.name for f in fields(EngineConfig)
            if f.name not in RULES and getattr(old, f.name) != getattr(new, f.name)]


def check(old: EngineConfig, new: EngineConfig) -> None:
    """Raises ValueError when a fixed setting differs."""
    found = fixed_changes(old, new)
    if found:
        raise ValueError(f"{', '.join(found)} cannot change while the engine runs; change scheduler and admission "
                         "settings only, or start the engine with the other config")


def adopt(core: Core, config: EngineConfig, now_s: float) -> None:
    """Put the settings in force between two steps."""
    core.settle()
    old_config, old_door, old_policy = core.config, core.door, core.policy
    waiting = list(old_policy)
    core.set_rules(config)
    core.door.learn_from(old_door)
    core.swap_free += config.swap_blocks - old_config.swap_blocks
    core.started = 0
    for request in core.by_id.values():
        core.door.enter(request)
    for request in [*core.running, *core.swapped]:
        core.started += request.promised
    preempted = [view for view in waiting if view.preemptions]
    for view in sorted((v for v in waiting if not v.preemptions), key=lambda v: v.arrival_s):
        core.policy.push(view, now_s)
    for view in reversed(preempted):
        core.policy.push_back(view, now_s)
