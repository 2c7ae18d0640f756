"""Who gives way when memory runs out, and whether its tokens are copied out or computed again.

Input: facts about the running sequences (tokens, blocks, seconds of slack) and the costs of the machine.
Output: an index, a mode, costs in seconds.
Does not: move anything; never sees the true output length.

Costs of a victim with context L = prompt + generated, cached prefix h, B bytes per token (docs/engine.md):
    recompute = (L - h) b1 + att (L^2 - h^2) / 2     paid by the shared GPU: all other sequences wait
    swap      = 2 (t_fix + L B / link)               out and in again
Both are linear in L to first order, so the winner follows from b1 against 2 B / link; length matters through t_fix
and the quadratic attention term only.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_PREEMPTIONS = 3  # after that many a sequence is exempt: bounds the work lost per finished token
ALMOST_DONE_RATIO = 0.8  # of max_tokens; what is thrown away there would be needed again almost whole


@dataclass(frozen=True, slots=True)
class VictimRule:
    """Costs of the machine and weights of the victim score; the lowest score gives way."""

    prefill_s: float  # b1, seconds per recomputed token
    attention_s: float  # att, seconds per token squared
    kv_bytes_per_token: int
    link_bytes_per_s: float
    transfer_fixed_s: float
    swap_allowed: bool
    age_tau_s: float = 1.0
    weight_cost: float = 1.0
    weight_slack: float = 1.0
    weight_memory: float = 1.0
    weight_age: float = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One running sequence, as far as a server knows it."""

    context_tokens: int
    generated: int
    max_tokens: int
    blocks: int
    preemptions: int
    arrival_s: float
    slack_s: float  # seconds to its next deadline, inf = none


def recompute_s(context: int, cached: int, prefill_s: float, attention_s: float) -> float:
    """Seconds of GPU time to compute `context` tokens again when the first `cached` are still there."""
    return (context - cached) * prefill_s + attention_s * (context * context - cached * cached) / 2.0


def swap_s(context: int, bytes_per_token: int, link_bytes_per_s: float, fixed_s: float) -> float:
    """Seconds to copy `context` tokens out and in again."""
    return 2.0 * (fixed_s + context * bytes_per_token / link_bytes_per_s)


def break_even_tokens(prefill_s: float, bytes_per_token: int, link_bytes_per_s: float, fixed_s: float) -> float:
    """Context L* above which swapping is cheaper, without the attention term; inf when it never is."""
    gain = prefill_s - 2.0 * bytes_per_token / link_bytes_per_s
    return 2.0 * fixed_s / gain if gain > 0 else math.inf


def cheaper_mode(context: int, cached: int, rule: VictimRule) -> str:
    """"swap" or "recompute", whichever costs less for this context."""
    copy = swap_s(context, rule.kv_bytes_per_token, rule.link_bytes_per_s, rule.transfer_fixed_s)
    return "swap" if copy < recompute_s(context, cached, rule.prefill_s, rule.attention_s) else "recompute"


def victim_score(c: Candidate, now_s: float, rule: VictimRule) -> float:
    """Harm of preempting this sequence now, in seconds; the memory it frees counts against it.

    cost + shortage of slack - memory x remaining bound + age: costly, urgent and old sequences stay, those that
    would hold much memory for long go. The remaining bound is max_tokens - generated: all a server knows.
    """
    cost = recompute_s(c.context_tokens, 0, rule.prefill_s, rule.attention_s)
    if rule.swap_allowed:
        cost = min(cost, swap_s(c.context_tokens, rule.kv_bytes_per_token, rule.link_bytes_per_s,
                                rule.transfer_fixed_s))
    shortage = max(0.0, cost - c.slack_s) if math.isfinite(c.slack_s) else 0.0
    remaining = (c.max_tokens - c.generated) * rule.prefill_s
    share = c.blocks / (c.blocks + 64.0)  # of no unit: 64 blocks = 1,024 tokens count half
    age = (now_s - c.arrival_s) / rule.age_tau_s
    return (rule.weight_cost * cost + rule.weight_slack * shortage - rule.weight_memory * remaining * share
            + rule.weight_age * min(age, 100.0) * rule.prefill_s)


@dataclass(frozen=True, slots=True)
class Standing:
    """One running sequence in the choice of a victim: its score, or why it is exempt."""

    index: int
    score: float
    exempt: str = ""


def exemption(c: Candidate, index: int) -> str:
    """Why a sequence may not be preempted; empty when it may."""
    if index == 0:
        return "first in order: it must be able to finish"
    if c.preemptions >= MAX_PREEMPTIONS:
        return f"preempted {c.preemptions} times, at most {MAX_PREEMPTIONS}"
    if c.generated >= ALMOST_DONE_RATIO * c.max_tokens:
        return f"{c.generated} of {c.max_tokens} tokens done, {ALMOST_DONE_RATIO:.0%} is enough to stay"
    return ""


def standings(running: Sequence[Candidate], now_s: float, rule: VictimRule) -> list[Standing]:
    """Every running sequence with its score (seconds; the lowest gives way) and exemption, for explanations."""
    return [Standing(i, victim_score(c, now_s, rule), exemption(c, i)) for i, c in enumerate(running)]


def choose_victim(running: Sequence[Candidate], now_s: float, rule: VictimRule) -> int:
    """Index of the sequence that gives way. All exempt: the last one, so there always is a victim.

    Exempt: 80 % of max_tokens generated; preempted MAX_PREEMPTIONS times; the first in order (the head must be able
    to finish, or nothing would).
    """
    best, best_score = len(running) - 1, math.inf
    for i, c in enumerate(running):
        if i == 0 or c.preemptions >= MAX_PREEMPTIONS or c.generated >= ALMOST_DONE_RATIO * c.max_tokens:
            continue
        score = victim_score(c, now_s, rule)
        if score <= best_score:  # ties go to the later one, as in vLLM
            best, best_score = i, score
    return best
