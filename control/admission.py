"""Whether a service should accept a request now, from three budgets: compute, memory, tenant.

Input: facts about the request and the load, as plain numbers. Output: `Refusal` or None, and a predicted TTFT.
Does not: keep state, queue, or see the true output length.

Order of the checks: impossible (400), tenant quota and share (429), queue, memory, compute (503). A refusal counts as
a missed SLO, and still early refusal keeps more promises than queueing: past the knee a queue longer than the
deadline serves everybody late. vLLM documents the same bound: queued tokens = target TTFT x prefill rate.

1. Every refusal carries what was measured, its limit, and one line with both ("predicted TTFT 912 ms > 800 ms").
2. Memory fills in three bands: below PRESSURE of the limit everybody may in; up to the limit only tenants within
   their weighted share, or of a priority above 0; above the limit nobody.
3. Each preemption halves what may be promised beyond the reserve, each finished answer gives a part of it back:
   oversubscription ends by itself where it does harm.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# reason -> HTTP status; the labels are counters in /metrics and `detail` in the ledger.
REASONS: dict[str, int] = {
    "too_long": 400,  # prompt + max_tokens exceeds the model's length
    "never_fits": 400,  # needs more KV blocks, or a larger step, than there are
    "tenant_quota": 429,
    "tenant_share": 429,
    "queue_full": 503,
    "queue_tokens": 503,
    "kv_budget": 503,
    "ttft_budget": 503,
    "hopeless": 503,  # dropped from the queue: its deadline had become out of reach
}
# A request is refused unless 19 of 20 like it had their first token in time. With the mean alone (0) half of those at
# the edge are served late, which costs as much as serving them: on the demo's load at 1.5 times the knee 17 % of all.
SURE_SD = 1.645
PRESSURE = 0.8  # of the commit limit: from here on tenants keep to their shares
RELIEF_HALVING = 0.5  # one preemption costs more than the 64 finishes that restore it, so the factor settles below it
RELIEF_GAIN = 1.0 / 64


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, the HTTP status, how long to wait before another try (None = do not try again), and the numbers."""

    reason: str
    http_status: int
    retry_after_s: float | None = None
    measured: float | None = None
    limit: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine at the moment of the arrival."""

    running: int
    waiting: int
    active_cap: int
    backlog_tokens: int  # uncomputed prompt tokens of waiting and running requests
    committed_blocks: int  # promised to accepted requests
    usable_blocks: int
    prefill_tps: float  # rate of full steps beside the running decodes
    residual_step_s: float  # until the step in flight ends
    service_s: float  # mean time a request keeps its slot


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of one replica; None = no such limit."""

    commit_blocks: int
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for."""

    prompt_tokens: int
    promise_blocks: int
    ttft_deadline_s: float | None
    tenant_blocks: int = 0  # committed to its tenant already
    tenant_share: float | None = None  # of the weights of all tenants; None = there are no tenants
    tenant_priority: int = 0


def refuse(reason: str, retry_after_s: float | None = None, *, measured: float | None = None,
           limit: float | None = None, text: str = "") -> Refusal:
    """The refusal with the HTTP status of its reason."""
    return Refusal(reason, REASONS[reason], retry_after_s, measured, limit, text)


def impossible(prompt_tokens: int, max_tokens: int, max_model_len: int, block_size: int, usable_blocks: int,
               step_limit: int | None) -> Refusal | None:
    """400 for a request that no state of the engine could serve; `step_limit` None = prompts may be split."""
    total = prompt_tokens + max_tokens
    if total > max_model_len or prompt_tokens < 1 or max_tokens < 1:
        return refuse("too_long", measured=total, limit=max_model_len,
                      text=f"prompt {prompt_tokens} + max_tokens {max_tokens} = {total} > {max_model_len} tokens")
    blocks = -(-total // block_size)
    if blocks > usable_blocks:
        return refuse("never_fits", measured=blocks, limit=usable_blocks,
                      text=f"{total} tokens need {blocks} KV blocks > {usable_blocks}")
    if step_limit is not None and total - 1 > step_limit:
        return refuse("never_fits", measured=total - 1, limit=step_limit,
                      text=f"a prompt of up to {total - 1} tokens cannot be split and one step holds {step_limit}")
    return None


def over_quota(tenant: str, quota_qps: float, wait_s: float) -> Refusal:
    """429 for a tenant whose bucket is empty for another `wait_s` seconds."""
    return refuse("tenant_quota", wait_s, measured=wait_s, limit=0.0,
                  text=f"tenant {tenant} is above its quota of {quota_qps:g}/s for another {_ms(wait_s)}")


def commit_limit(usable_blocks: int, kv_reserve_ratio: float, oversubscribe_factor: float,
                 relief: float = 1.0) -> int:
    """Blocks that may be promised: usable x ratio x (1 + (factor - 1) x relief); relief 1 = no preemption lately."""
    return int(usable_blocks * kv_reserve_ratio * (1.0 + (oversubscribe_factor - 1.0) * relief))


def relief_after_preemption(relief: float) -> float:
    """Half of the oversubscription is taken back."""
    return relief * RELIEF_HALVING


def relief_after_finish(relief: float) -> float:
    """A 64th of what is missing comes back."""
    return relief + (1.0 - relief) * RELIEF_GAIN


def promised_output(kind: str, max_tokens: int, mean_output: float, p95_output: float) -> int:
    """Output tokens to reckon with: the limit asked for, or the P95 or the mean of finished answers once known."""
    guess = {"ewma": mean_output, "p95_output": p95_output}.get(kind, 0.0)
    return min(max_tokens, max(1, round(guess))) if guess else max_tokens


def nearest_rank_p95(ordered: Sequence[int]) -> float:
    """The 95th percentile (nearest rank) of a sorted sample; 0 when it is empty."""
    return float(ordered[math.ceil(0.95 * len(ordered)) - 1]) if ordered else 0.0


def over_memory(load: Load, promise_blocks: int, limit: int) -> bool:
    """Whether promising `promise_blocks` more breaks the limit; the first promise is always allowed."""
    return load.committed_blocks > 0 and load.committed_blocks + promise_blocks > limit


def predicted_ttft_s(load: Load, prompt_tokens: int, sd: float = 0.0) -> float:
    """Seconds until a request arriving now would have its first token.

    residual step + max(Q / R, wait for a slot) + P / R. Prompts ahead are computed while we wait for a slot, so the
    two waits overlap. The slot wait is k = n_ahead + 1 departures at active_cap / service_s, once all slots are taken:
    departures of many independent sequences are near Poisson, so their time has mean k and standard deviation sqrt(k)
    departure times; `sd` of these are added.
    """
    prefill_s = load.backlog_tokens / load.prefill_tps if load.prefill_tps < math.inf else 0.0
    own_s = prompt_tokens / load.prefill_tps if load.prefill_tps < math.inf else 0.0
    short = max(0, load.running + load.waiting + 1 - load.active_cap)
    slot_s = (short + sd * math.sqrt(short)) * load.service_s / load.active_cap
    return load.residual_step_s + max(prefill_s, slot_s) + own_s


def over_tenant_share(tenant_blocks: int, promise_blocks: int, committed_blocks: int, limit: int,
                      weight_share: float) -> bool:
    """Whether a tenant asks for more than its weighted share while memory is short (above 80 % of the limit)."""
    return (committed_blocks + promise_blocks > PRESSURE * limit
            and tenant_blocks + promise_blocks > weight_share * limit)


def decide(asked: Asked, load: Load, budgets: Budgets) -> Refusal | None:
    """The first budget that the request would break, in the module's order; None = accept."""
    limit, promise = budgets.commit_blocks, asked.promise_blocks
    departure_s = load.service_s / load.active_cap
    if (asked.tenant_share is not None and asked.tenant_blocks and asked.tenant_priority <= 0
            and over_tenant_share(asked.tenant_blocks, promise, load.committed_blocks, limit, asked.tenant_share)):
        held, own = asked.tenant_blocks + promise, asked.tenant_share * limit
        return refuse("tenant_share", load.service_s, measured=held, limit=own,
                      text=f"the tenant would hold {held} KV blocks > its share of {own:.0f}, and "
                           f"{load.committed_blocks + promise} of {limit} are promised")
    most = budgets.max_num_queued_reqs
    if most is not None and load.waiting >= most:
        return refuse("queue_full", departure_s * (load.waiting - most + 1), measured=load.waiting, limit=most,
                      text=f"{load.waiting} requests wait >= max_num_queued_reqs {most}")
    tokens = budgets.max_num_queued_tokens
    if tokens is not None and load.backlog_tokens > 0 and load.backlog_tokens + asked.prompt_tokens > tokens:
        ahead = load.backlog_tokens + asked.prompt_tokens
        return refuse("queue_tokens", (ahead - tokens) / load.prefill_tps, measured=ahead, limit=tokens,
                      text=f"{ahead} prompt tokens would wait > max_num_queued_tokens {tokens}")
    if over_memory(load, promise, limit):
        total = load.committed_blocks + promise
        return refuse("kv_budget", departure_s, measured=total, limit=limit,
                      text=f"{total} KV blocks would be promised > {limit}")
    if asked.ttft_deadline_s is not None:
        wait_s = predicted_ttft_s(load, asked.prompt_tokens, SURE_SD)
        if wait_s > asked.ttft_deadline_s:
            return refuse("ttft_budget", wait_s - asked.ttft_deadline_s, measured=wait_s,
                          limit=asked.ttft_deadline_s,
                          text=f"predicted TTFT {_ms(wait_s)} > {_ms(asked.ttft_deadline_s)} (19 of 20 have it sooner)")
    return None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
