"""Config checks about batching and memory of the service: caps, budgets, KV blocks, profile.

Input: a `Config` whose single values are right.
Output: findings, registered by `reads`; the two bounds of the batch size for a TPOT deadline.
Does not: import the engine (`profiles.py` holds the few numbers that are needed).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from bench.config.checks_load import p95_output_tokens
from bench.config.findings import Finding, reads
from bench.config.profiles import STEP_COEFFICIENTS
from bench.config.schema import Config


@reads("scheduler.batch_size_cap", "scheduler.max_num_seqs")
def _cap(config: Config) -> Iterator[Finding]:
    cap, seqs = config.scheduler.batch_size_cap, config.scheduler.max_num_seqs
    if cap > seqs:
        yield Finding(
            "CFG-020",
            ("scheduler", "batch_size_cap"),
            f"is {cap}, above scheduler.max_num_seqs ({seqs})",
            f"at most {seqs}",
            "lower the cap or raise max_num_seqs",
        )


@reads("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs")
def _budget(config: Config) -> Iterator[Finding]:
    budget, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    if budget < seqs:
        yield Finding(
            "CFG-021",
            ("scheduler", "max_num_batched_tokens"),
            f"is {budget}, below scheduler.max_num_seqs ({seqs})",
            f"at least {seqs}: each running sequence takes one token of a step",
            "raise the budget or lower max_num_seqs",
        )


@reads(
    "scheduler.enable_chunked_prefill",
    "scheduler.max_num_batched_tokens",
    "engine.embedded",
    "engine.max_model_len",
    "loadgen.input_len_range",
    "loadgen.prompts_file",
)
def _chunking(config: Config) -> Iterator[Finding]:
    by_file = config.loadgen.prompts_file is not None and not config.engine.embedded  # its lengths are not known here
    if config.scheduler.enable_chunked_prefill or by_file:
        return
    budget = config.scheduler.max_num_batched_tokens
    need, name = max(config.loadgen.input_len_range), "loadgen.input_len_range"
    if config.engine.embedded:
        need, name = config.engine.max_model_len, "engine.max_model_len"
    if budget < need:
        yield Finding(
            "CFG-022",
            ("scheduler", "max_num_batched_tokens"),
            f"is {budget} with enable_chunked_prefill false, below {name} ({need})",
            f"at least {need}: a prompt must fit one step whole",
            "raise the budget or turn chunked prefill on",
        )


@reads("admission.kv_reserve_ratio", "admission.oversubscribe_factor")
def _oversubscribe(config: Config) -> Iterator[Finding]:
    ratio, factor = config.admission.kv_reserve_ratio, config.admission.oversubscribe_factor
    product = ratio * factor
    sum_ = f"x kv_reserve_ratio is {factor:g} x {ratio:g} = {product:.4g}"
    # 1.15: a guess of the reference notes; above 2 half of all promises cannot be kept at once.
    if product > 2 + 1e-9:
        yield Finding(
            "CFG-024",
            ("admission", "oversubscribe_factor"),
            sum_,
            "at most 2",
            "lower one of them: preemption would never end",
        )
    elif product > 1.15 + 1e-9:
        yield Finding(
            "CFG-023",
            ("admission", "oversubscribe_factor"),
            sum_,
            "up to 1.15 without preemption storms",
            "lower one of them",
        )


def naive_batch_bound(v_single_tps: float, tpot_s: float) -> float:
    """Largest batch by the seed's rule n <= v_single x deadline (step time proportional to n)."""
    return v_single_tps * tpot_s


def affine_batch_bound(
    profile: str, tpot_s: float, context_tokens: float, overhead_s: float | None = None
) -> float | None:
    """Largest batch by the affine rule n = (TPOT - a0 - o)/(b0 + g c), in sequences; None for an unknown profile.

    a0: s per step; o: overhead, s per step; b0: s per token of the step; g: s per cached token read;
    c: mean context, tokens. Source: docs/engine.md, step-time models.
    """
    coefficients = STEP_COEFFICIENTS.get(profile)
    if coefficients is None:
        return None
    o = coefficients.overhead_s if overhead_s is None else overhead_s
    slope = coefficients.b0_s + coefficients.g_s * context_tokens
    return (tpot_s - coefficients.a0_s - o) / slope if slope > 0 else math.inf


@reads(
    "scheduler.batch_size_cap",
    "slo.tpot_deadline_ms",
    "engine.profile",
    "engine.overhead_ms",
    "loadgen.input_len_range",
    "loadgen.output_len_dist",
    "loadgen.output_len_mu",
    "loadgen.output_len_sigma",
    "loadgen.prompts_file",
)
def _tpot_cap(config: Config) -> Iterator[Finding]:
    coefficients = STEP_COEFFICIENTS.get(config.engine.profile)
    if coefficients is None or config.loadgen.prompts_file is not None:
        return
    tpot_s = config.slo.tpot_deadline_ms / 1000
    overhead_s = None if config.engine.overhead_ms is None else config.engine.overhead_ms / 1000
    o = coefficients.overhead_s if overhead_s is None else overhead_s
    v_single = 1.0 / (coefficients.a0_s + coefficients.b0_s + o)  # one sequence: one token a step
    naive = naive_batch_bound(v_single, tpot_s)
    cap = config.scheduler.batch_size_cap
    # Mean context of a running sequence: its prompt and, on average, half of its output.
    context = sum(config.loadgen.input_len_range) / 2 + (p95_output_tokens(config) or 0) / 4
    affine = affine_batch_bound(config.engine.profile, tpot_s, context, overhead_s) or 0.0
    if cap <= max(naive, affine):  # steps of a GPU follow the affine rule: above the naive one alone nothing is wrong
        return
    bound = max(math.floor(affine), 0)
    both = f"; by the affine rule (TPOT - a0 - o)/(b0 + g c) it is {bound} (context {context:.0f} tokens)"
    yield Finding(
        "CFG-025",
        ("scheduler", "batch_size_cap"),
        f"is {cap}, above v_single x tpot_deadline = {v_single:.0f}/s x {tpot_s:g} s = {naive:.1f}",
        f"at most {math.floor(naive)} by that rule for profile {config.engine.profile}{both}",
        "lower the cap, or raise slo.tpot_deadline_ms: both rules say so",
    )


@reads(
    "engine.embedded",
    "engine.max_model_len",
    "engine.num_blocks",
    "engine.block_size",
    "loadgen.input_len_range",
    "loadgen.max_output_tokens",
    "loadgen.output_len_dist",
    "loadgen.output_len_range",
    "loadgen.output_len_fixed",
    "loadgen.arrival_process",
    "loadgen.prompts_file",
)
def _fits(config: Config) -> Iterator[Finding]:
    load = config.loadgen
    if not config.engine.embedded or load.arrival_process == "trace" or load.prompts_file is not None:
        return
    outputs = {"uniform": max(load.output_len_range or [0]), "fixed": load.output_len_fixed or 0}
    output = min(
        outputs.get(load.output_len_dist, load.max_output_tokens) or load.max_output_tokens, load.max_output_tokens
    )
    need = max(load.input_len_range) + output
    room = config.engine.max_model_len
    if need > room:
        yield Finding(
            "CFG-027",
            ("engine", "max_model_len"),
            f"is {room}, below the longest request: prompt {max(load.input_len_range)} + output {output} = {need}",
            f"at least {need}",
            "raise it, or lower loadgen.max_output_tokens",
        )
    # One block of the pool is the null block, which holds no sequence.
    if config.engine.num_blocks is not None and (config.engine.num_blocks - 1) * config.engine.block_size < need:
        blocks = math.ceil(need / config.engine.block_size) + 1
        yield Finding(
            "CFG-027",
            ("engine", "num_blocks"),
            f"is {config.engine.num_blocks}, the longest request ({need} tokens) needs {blocks} with the null block",
            f"at least {blocks}",
            "raise it",
        )


@reads("engine.profile")
def _profile(config: Config) -> Iterator[Finding]:
    name = config.engine.profile
    if name in STEP_COEFFICIENTS or name.endswith(".json"):
        return
    near = difflib.get_close_matches(name, STEP_COEFFICIENTS, n=1)
    yield Finding(
        "CFG-007",
        ("engine", "profile"),
        f'is "{name[:60]}"',
        f"one of {', '.join(STEP_COEFFICIENTS)}, or a .json file",
        f"did you mean {near[0]}?" if near else "choose one of them",
    )


@reads("scheduler.preemption_mode", "scheduler.swap_space_gb")
def _swap(config: Config) -> Iterator[Finding]:
    if config.scheduler.preemption_mode == "swap" and config.scheduler.swap_space_gb == 0:
        yield Finding(
            "CFG-028",
            ("scheduler", "swap_space_gb"),
            "is 0 with preemption_mode swap",
            "above 0",
            "give it memory or use recompute",
        )
