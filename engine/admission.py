"""The admission state of one replica: promises, tenant buckets, and the decision at the door.

Input: a request and the core's load. Output: `control.admission.Refusal` or None.
Does not: hold a queue; the core does.

1. `committed` is the sum of promises of accepted, unfinished requests.
2. A refused request changes nothing but its tenant's bucket.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from control import admission as rules
from engine.request import Request
from engine.settings import EngineConfig

RECENT = 256  # finished answers whose P95 stands for the next one: 13 of them lie above it

class Bucket:
    """Tokens that refill at `rate_qps`, at most one second's worth (and at least one request)."""

    __slots__ = ("rate_qps", "size", "level", "at_s")

    def __init__(self, rate_qps: float) -> None:
        self.rate_qps = rate_qps
        self.size = max(1.0, rate_qps)
        self.level = self.size
        self.at_s: float | None = None

    def take(self, now_s: float) -> float:
        """0 when a request may pass now, else seconds until one may."""
        if self.at_s is not None:
            self.level = min(self.size, self.level + (now_s - self.at_s) * self.rate_qps)
        self.at_s = now_s
        if self.level >= 1.0 - 1e-9:
            self.level -= 1.0
            return 0.0
        return (1.0 - self.level) / self.rate_qps


class Door:
    """Decides about arrivals of one replica and remembers what was promised."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.spec = config.admission
        self.committed = 0
        self.by_tenant: dict[str, int] = {}
        # Quotas are for the service as a whole; a replica enforces its part.
        self.buckets = {name: Bucket(t.quota_qps / config.replicas) for name, t in config.tenants.items()
                        if t.quota_qps is not None}
        self.weights = sum(t.weight for t in config.tenants.values())
        self.mean_output = 0.0  # of finished requests, for promise "ewma"
        self.relief = 1.0  # how much of the oversubscription is in force
        self._recent: deque[int] = deque()  # output lengths of the last finished requests, for promise "p95_output"
        self._ordered: list[int] = []
        self.limit = 0
        self._set_limit()
        self.rejects = self.spec is not None and self.spec.reject
        self.gates = self.spec is not None and not self.spec.reject  # over budget waits in the queue

    def _set_limit(self) -> None:
        spec = self.spec
        if spec is not None:
            self.limit = rules.commit_limit(self.config.usable_blocks, spec.kv_reserve_ratio,
                                            spec.oversubscribe_factor, self.relief)
            self.limits = rules.Budgets(self.limit, spec.max_queued_requests, spec.max_queued_tokens)

    def impossible(self, request: Request) -> rules.Refusal | None:
        """400 for a request that could never run."""
        config = self.config
        step_limit = None if config.enable_chunked_prefill else config.max_num_batched_tokens
        return rules.impossible(request.prompt_tokens, request.max_tokens, config.max_model_len, config.block_size,
                                config.usable_blocks, step_limit)

    def quota(self, request: Request, now_s: float) -> rules.Refusal | None:
        """429 for a tenant above its quota."""
        bucket = self.buckets.get(request.tenant)
        wait_s = bucket.take(now_s) if bucket is not None else 0.0
        return rules.over_quota(request.tenant, bucket.rate_qps, wait_s) if bucket is not None and wait_s > 0 else None

    def promise(self, request: Request) -> int:
        """Blocks that the request is expected to need at its end."""
        output = request.max_tokens
        if self.spec is not None and self.spec.promise != "max_tokens":
            p95 = rules.nearest_rank_p95(self._ordered)
            output = rules.promised_output(self.spec.promise, request.max_tokens, self.mean_output, p95)
        return -(-(request.prompt_tokens + output) // self.config.block_size)

    def asked(self, request: Request) -> rules.Asked:
        """The facts about a request that the decision looks at."""
        share, priority = None, 0
        if self.weights > 0:
            tenant = self.config.tenants.get(request.tenant)
            share, priority = (tenant.weight / self.weights, tenant.priority) if tenant else (0.0, 0)
        return rules.Asked(request.prompt_tokens, self.promise(request), request.ttft_deadline_s,
                           self.by_tenant.get(request.tenant, 0), share, priority)

    def budgets(self, request: Request, load: rules.Load) -> rules.Refusal | None:
        """429 or 503 when a budget is exceeded and the config says to refuse then."""
        return rules.decide(self.asked(request), load, self.limits) if self.rejects else None

    def enter(self, request: Request) -> None:
        """Note the promise of an accepted request."""
        request.promised = self.promise(request)
        self.committed += request.promised
        self.by_tenant[request.tenant] = self.by_tenant.get(request.tenant, 0) + request.promised

    def learn_from(self, other: Door) -> None:
        """Go on with what another door learnt (an empty one takes the place of one in use)."""
        self.mean_output, self.relief = other.mean_output, other.relief
        self._recent, self._ordered = other._recent, other._ordered
        for name, bucket in self.buckets.items():
            if name in other.buckets and other.buckets[name].rate_qps == bucket.rate_qps:
                self.buckets[name] = other.buckets[name]
        self._set_limit()

    def leave(self, request: Request) -> None:
        """Forget the promise of a request that ended."""
        self.committed -= request.promised
        self.by_tenant[request.tenant] -= request.promised
        request.promised = 0

    def preempted(self) -> None:
        """Memory ran out: promise less from now on."""
        self.relief = rules.relief_after_preemption(self.relief)
        self._set_limit()

    def finished(self, request: Request) -> None:
        """Learn from a finished answer: moving mean over about 64 of them, order statistics of the last RECENT."""
        gain = 1.0 / 64 if self.mean_output else 1.0
        self.mean_output += gain * (request.generated - self.mean_output)
        if self.spec is None:
            return
        if self.spec.promise == "p95_output":
            self._recent.append(request.generated)
            insort(self._ordered, request.generated)
            if len(self._recent) > RECENT:
                del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        if self.relief < 1.0:
            self.relief = rules.relief_after_finish(self.relief)
            self._set_limit()
