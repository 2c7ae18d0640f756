"""Whether a service should accept a request now, from three budgets: compute, memory, tenant.

Input: facts about the request and the load, as plain numbers. Output: `Refusal` or None, and a predicted TTFT.
Does not: keep state, queue, or see the true output length.

Order of the checks: impossible (400), tenant quota and share (429), memory (503), compute (503). A refusal counts as
a missed SLO, and still early refusal keeps more promises than queueing: past the knee a queue longer than the
deadline serves everybody late. vLLM documents the same bound: queued tokens = target TTFT x prefill rate.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

# reason -> HTTP status; the labels are counters in /metrics and `detail` in the ledger.
REASONS: dict[str, int] = {
    "too_long": 400,  # prompt + max_tokens exceeds the model's length
    "never_fits": 400,  # needs more KV blocks, or a larger step, than there are
    "tenant_quota": 429,
    "tenant_share": 429,
    "queue_full": 503,
    "kv_budget": 503,
    "ttft_budget": 503,
    "hopeless": 503,  # dropped from the queue: its deadline had become out of reach
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, the HTTP status, and how long to wait before another try (None = do not try again)."""

    reason: str
    http_status: int
    retry_after_s: float | None = None


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


def refuse(reason: str, retry_after_s: float | None = None) -> Refusal:
    """The refusal with the HTTP status of its reason."""
    return Refusal(reason, REASONS[reason], retry_after_s)


def impossible(prompt_tokens: int, max_tokens: int, max_model_len: int, block_size: int, usable_blocks: int,
               step_limit: int | None) -> Refusal | None:
    """400 for a request that no state of the engine could serve; `step_limit` None = prompts may be split."""
    total = prompt_tokens + max_tokens
    if total > max_model_len or prompt_tokens < 1 or max_tokens < 1:
        return refuse("too_long")
    if -(-total // block_size) > usable_blocks or (step_limit is not None and total - 1 > step_limit):
        return refuse("never_fits")
    return None


def commit_limit(usable_blocks: int, kv_reserve_ratio: float, oversubscribe_factor: float) -> int:
    """Blocks that may be promised: ratio x factor x usable."""
    return int(usable_blocks * kv_reserve_ratio * oversubscribe_factor)


def over_memory(load: Load, promise_blocks: int, limit: int) -> bool:
    """Whether promising `promise_blocks` more breaks the limit; the first promise is always allowed."""
    return load.committed_blocks > 0 and load.committed_blocks + promise_blocks > limit


def predicted_ttft_s(load: Load, prompt_tokens: int) -> float:
    """Seconds until a request arriving now would have its first token.

    residual step + max(Q / R, wait for a slot) + P / R. Prompts ahead are computed while we wait for a slot, so the
    two waits overlap. The slot wait is (n_ahead + 1) departures at active_cap / service_s, once all slots are taken.
    """
    prefill_s = load.backlog_tokens / load.prefill_tps if load.prefill_tps < math.inf else 0.0
    own_s = prompt_tokens / load.prefill_tps if load.prefill_tps < math.inf else 0.0
    short = load.running + load.waiting + 1 - load.active_cap
    slot_s = max(0, short) * load.service_s / load.active_cap
    return load.residual_step_s + max(prefill_s, slot_s) + own_s


def over_tenant_share(tenant_blocks: int, promise_blocks: int, committed_blocks: int, limit: int,
                      weight_share: float) -> bool:
    """Whether a tenant asks for more than its weighted share while memory is short (above 80 % of the limit)."""
    return committed_blocks + promise_blocks > 0.8 * limit and tenant_blocks + promise_blocks > weight_share * limit
