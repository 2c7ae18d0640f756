"""The settings of one engine replica, in the units the scheduler computes with.

Input: a `bench.config` Config, or keyword arguments in tests.
Output: `EngineConfig`, frozen. Seconds, tokens, blocks.
Does not: read files (except a calibrated profile by path) or check the whole config; `bench.config` does.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from engine.profiles import PROFILES, Profile, load_profile

STYLES = ("vllm", "sglang", "trt_no_evict", "trt_max_util")
POLICIES = ("fcfs", "priority", "sjf", "edf", "slack_aware", "mlfq", "fair")
PREEMPTION_MODES = ("recompute", "swap", "auto")
ROUTERS = ("round_robin", "random", "least_loaded", "prefix")
HOPELESS = ("demote", "shed", "keep")


@dataclass(frozen=True, slots=True)
class ClassSpec:
    """Deadlines and priority of one request class; a lower priority goes first, as in vLLM."""

    ttft_deadline_s: float = math.inf
    tpot_deadline_s: float = math.inf
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """Weight under contention, quota (None = no quota) and priority of one tenant; control/admission.py uses them."""

    weight: float = 1.0
    quota_qps: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionSpec:
    """The budgets of engine/admission.py; `None` switches the single check off."""

    kv_reserve_ratio: float = 0.85
    oversubscribe_factor: float = 1.3
    reject: bool = True  # False: over budget means wait, not 429/503
    promise: str = "max_tokens"  # or "p95_output", "ewma": what an answer is expected to hold
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One replica. Defaults are the semantics of vLLM 0.33 with small, test-friendly limits."""

    profile: Profile = field(default_factory=lambda: PROFILES["h100-8b"])
    style: str = "vllm"
    policy: str = "fcfs"
    max_num_batched_tokens: int = 4096
    max_num_seqs: int = 32
    batch_size_cap: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    preemption_mode: str = "recompute"
    swap_space_gb: float = 0.0
    block_size: int = 16
    num_blocks: int | None = None  # None: the profile's kv_tokens / block_size
    max_model_len: int = 8192
    watermark: float = 0.0
    reserve_full_prompt: bool = True
    prefix_caching: bool = False
    hopeless: str = "demote"  # slack_aware: what happens to a request that can no longer make its deadline
    admission: AdmissionSpec | None = None
    noise_cv: float = 0.0
    overhead_s: float | None = None  # None: the profile's
    time_scale: float = 1.0
    seed: int = 1
    replicas: int = 1
    router: str = "round_robin"
    stream_interval: int = 1
    default_class: ClassSpec = ClassSpec()
    classes: dict[str, ClassSpec] = field(default_factory=dict)
    tenants: dict[str, TenantSpec] = field(default_factory=dict)
    revoke: bool | None = None  # take preemptions back while they cost nothing; None: with slack_aware
    prediction_sigma: float = 0.5  # spread of ln(predicted / true output) for policy sjf

    def __post_init__(self) -> None:
        problems = _problems(self)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def active_cap(self) -> int:
        """Sequences that may run at once."""
        cap = self.batch_size_cap
        return self.max_num_seqs if cap is None else min(cap, self.max_num_seqs)

    @property
    def total_blocks(self) -> int:
        """KV blocks of the pool, the null block included."""
        if self.num_blocks is not None:
            return self.num_blocks
        return max(2, self.profile.kv_tokens // self.block_size)

    @property
    def usable_blocks(self) -> int:
        """Blocks that sequences can hold: vLLM keeps one null block for itself."""
        return self.total_blocks - 1

    @property
    def swap_blocks(self) -> int:
        """Blocks of the host pool: GB / (block_size x bytes per token)."""
        return int(self.swap_space_gb * 1e9 // (self.block_size * max(1, self.profile.kv_bytes_per_token)))

    @property
    def revokes(self) -> bool:
        """Whether preemptions are taken back while they cost nothing; mlfq preempts by choice, not for memory."""
        wanted = self.policy == "slack_aware" if self.revoke is None else self.revoke
        return wanted and self.policy != "mlfq"

    def spec(self, request_class: str) -> ClassSpec:
        """Deadlines and priority of a class; unknown and empty names get the defaults."""
        return self.classes.get(request_class, self.default_class)

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @classmethod
    def from_config(cls, config: Any) -> EngineConfig:
        """The engine settings in a resolved `bench.config` Config."""
        scheduler, engine, slo, admission = config.scheduler, config.engine, config.slo, config.admission
        ttft_s, tpot_s = slo.ttft_deadline_ms / 1e3, slo.tpot_deadline_ms / 1e3
        classes = {
            c.name: ClassSpec((c.ttft_deadline_ms or slo.ttft_deadline_ms) / 1e3,
                              (c.tpot_deadline_ms or slo.tpot_deadline_ms) / 1e3, -c.priority)
            for c in config.classes
        }
        overhead_ms = engine.overhead_ms
        return cls(
            profile=load_profile(engine.profile), style=engine.style, policy=scheduler.policy,
            max_num_batched_tokens=scheduler.max_num_batched_tokens, max_num_seqs=scheduler.max_num_seqs,
            batch_size_cap=scheduler.batch_size_cap, enable_chunked_prefill=scheduler.enable_chunked_prefill,
            preemption_mode=scheduler.preemption_mode, swap_space_gb=scheduler.swap_space_gb,
            block_size=engine.block_size, num_blocks=engine.num_blocks, max_model_len=engine.max_model_len,
            watermark=getattr(engine, "watermark", 0.0), prefix_caching=engine.prefix_caching,
            hopeless=getattr(scheduler, "hopeless", "demote"),
            admission=AdmissionSpec(admission.kv_reserve_ratio, admission.oversubscribe_factor,
                                    admission.reject_on_budget_exceed, admission.promise,
                                    admission.max_num_queued_reqs, admission.max_num_queued_tokens),
            noise_cv=engine.noise_cv, overhead_s=None if overhead_ms is None else overhead_ms / 1e3,
            time_scale=engine.time_scale, seed=engine.seed, replicas=engine.replicas, router=engine.router,
            stream_interval=engine.stream_interval, default_class=ClassSpec(ttft_s, tpot_s), classes=classes,
            tenants={t.name: TenantSpec(t.weight, t.quota_qps, t.priority) for t in config.tenants},
        )


def _problems(c: EngineConfig) -> list[str]:
    """What is wrong with the settings, one sentence each."""
    found = []
    for name, value, allowed in (("style", c.style, STYLES), ("policy", c.policy, POLICIES),
                                 ("preemption_mode", c.preemption_mode, PREEMPTION_MODES),
                                 ("router", c.router, ROUTERS), ("hopeless", c.hopeless, HOPELESS)):
        if value not in allowed:
            found.append(f"engine {name} is {value!r}; allowed: {', '.join(allowed)}")
    for name in ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len", "replicas"):
        if getattr(c, name) < 1:
            found.append(f"engine {name} is {getattr(c, name)}; it must be at least 1")
    if c.total_blocks < 2:
        found.append(f"engine num_blocks is {c.total_blocks}; at least 2 are needed (one is the null block)")
    if c.batch_size_cap is not None and c.batch_size_cap < 1:
        found.append(f"engine batch_size_cap is {c.batch_size_cap}; it must be at least 1")
    if not c.enable_chunked_prefill and c.max_num_batched_tokens < c.max_model_len:
        found.append(f"chunked prefill is off and max_num_batched_tokens ({c.max_num_batched_tokens}) is below "
                     f"max_model_len ({c.max_model_len}); a long prompt could never run: raise the first or "
                     "lower the second")
    return found
