"""Config checks about what is sent and what it must meet: lengths, stages, deadlines, shares, prices.

Input: a `Config` whose single values are right.
Output: findings, registered by `reads`; the P95 of the output length.
Does not: read the files that the config names (building the plan does).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from bench.config.findings import Finding, reads
from bench.config.schema import Config, Loadgen


def p95_output_tokens(config: Config) -> int | None:
    """P95 of the output length in tokens; None where a file decides, which is not read here."""
    load = config.loadgen
    if load.prompts_file is not None:
        return None
    cap = load.max_output_tokens
    if load.output_len_dist == "lognormal":
        drawn = math.exp(min(load.output_len_mu + load.output_len_sigma * NormalDist().inv_cdf(0.95), 700.0))
        return int(min(max(drawn, 1), cap))
    if load.output_len_dist == "uniform" and load.output_len_range:
        low, high = load.output_len_range
        return min(low + math.ceil(0.95 * (high - low + 1)) - 1, cap)
    if load.output_len_dist == "fixed" and load.output_len_fixed:
        return min(load.output_len_fixed, cap)
    return None


@reads(
    "slo.p95_target_ms",
    "slo.ttft_deadline_ms",
    "slo.tpot_deadline_ms",
    "loadgen.output_len_dist",
    "loadgen.output_len_mu",
    "loadgen.output_len_sigma",
    "loadgen.output_len_range",
    "loadgen.output_len_fixed",
    "loadgen.max_output_tokens",
    "loadgen.prompts_file",
)
def _p95(config: Config) -> Iterator[Finding]:
    tokens = p95_output_tokens(config)
    if tokens is None:
        return
    slo = config.slo
    # n tokens have n - 1 gaps.
    worst_ms = slo.ttft_deadline_ms + (tokens - 1) * slo.tpot_deadline_ms
    if slo.p95_target_ms < worst_ms:
        left = (slo.p95_target_ms - slo.ttft_deadline_ms) / (tokens - 1) if tokens > 1 else 0.0
        need = (
            f"a P95 answer of {tokens} tokens may then take {max(left, 0):.3g} ms per token, "
            f"not {slo.tpot_deadline_ms:g}"
        )
        yield Finding(
            "CFG-026",
            ("slo", "p95_target_ms"),
            f"is {slo.p95_target_ms:g}, below ttft_deadline + (P95 output - 1) x tpot_deadline = {worst_ms:g} ms",
            need,
            "the deadlines and the P95 target contradict each other: all three are reported, the tightest decides",
        )


@reads("loadgen")
def _loadgen(config: Config) -> Iterator[Finding]:
    load = config.loadgen
    for name, pair in (("input_len_range", load.input_len_range), ("output_len_range", load.output_len_range)):
        if pair is not None and pair[0] > pair[1]:
            yield Finding(
                "CFG-030", ("loadgen", name), f"is [{pair[0]}, {pair[1]}]", "low first, then high", "swap the two"
            )
    needs = {"uniform": "output_len_range", "fixed": "output_len_fixed", "empirical": "output_len_file"}
    for kind, name in needs.items():
        given = getattr(load, name) is not None
        if load.output_len_dist == kind and not given:
            yield Finding("CFG-031", ("loadgen", name), f"is missing with output_len_dist {kind}", "", f"add {name}")
        elif load.output_len_dist != kind and given:
            yield Finding(
                "CFG-032",
                ("loadgen", name),
                f"has no effect with output_len_dist {load.output_len_dist}",
                "",
                f"remove it or use {kind}",
            )
    if (
        load.output_len_dist == "uniform"
        and load.output_len_range
        and load.output_len_range[1] > load.max_output_tokens
    ):
        yield Finding(
            "CFG-006",
            ("loadgen", "output_len_range"),
            f"ends at {load.output_len_range[1]}, above max_output_tokens ({load.max_output_tokens})",
            f"at most {load.max_output_tokens}",
            "raise max_output_tokens",
        )
    if load.output_len_dist == "fixed" and load.output_len_fixed and load.output_len_fixed > load.max_output_tokens:
        yield Finding(
            "CFG-006",
            ("loadgen", "output_len_fixed"),
            f"is {load.output_len_fixed}, above max_output_tokens ({load.max_output_tokens})",
            f"at most {load.max_output_tokens}",
            "raise max_output_tokens",
        )
    if load.arrival_process == "trace" and load.trace_file is None:
        yield Finding(
            "CFG-031",
            ("loadgen", "trace_file"),
            "is missing with arrival_process trace",
            "",
            "name an Azure CSV or Mooncake JSONL file",
        )
    yield from _prompts(config)
    if load.arrival_process != "gamma" and load.burstiness != 1.0:
        yield Finding(
            "CFG-032",
            ("loadgen", "burstiness"),
            f"has no effect with arrival_process {load.arrival_process}",
            "",
            "use gamma or remove it",
        )
    if load.trace_end_sec is not None and load.trace_end_sec <= load.trace_start_sec:
        yield Finding(
            "CFG-030",
            ("loadgen", "trace_end_sec"),
            f"is {load.trace_end_sec:g}, not after trace_start_sec ({load.trace_start_sec:g})",
            "",
            "raise it",
        )


def _prompts(config: Config) -> Iterator[Finding]:
    """Keys that a file of prompts makes useless, and the one that is useless without it."""
    load = config.loadgen
    if load.prompts_file is None:
        if load.prompts_order != "shuffled":
            text = "has no effect without prompts_file"
            yield Finding("CFG-032", ("loadgen", "prompts_order"), text, "", "remove it")
        return
    useless = [
        ("input_len_range", load.input_len_range != Loadgen().input_len_range, "lengths are those of the lines"),
        ("unique_prompts", not load.unique_prompts, "prompts repeat as the file says"),
    ]
    for name, given, why in useless:
        if given:
            yield Finding("CFG-032", ("loadgen", name), f"has no effect with prompts_file: {why}", "", "remove it")


@reads("sweep", "loadgen.duration_sec", "loadgen.target_qps")
def _sweep(config: Config) -> Iterator[Finding]:
    shortest = min(config.stage_duration_s(), config.sweep.target_duration_sec or math.inf)
    if config.sweep.warmup_sec is not None and config.sweep.warmup_sec >= shortest:
        yield Finding(
            "CFG-033",
            ("sweep", "warmup_sec"),
            f"is {config.sweep.warmup_sec:g}, a stage lasts {shortest:g} s",
            f"below {shortest:g}",
            "shorten the warm-up or lengthen the stage",
        )
    if config.loadgen.target_qps not in config.sweep.qps:
        yield Finding(
            "CFG-034",
            ("sweep", "qps"),
            f"has no stage at loadgen.target_qps ({config.loadgen.target_qps:g})",
            "the verdict is about that rate",
            f"add {config.loadgen.target_qps:g} to the list",
        )


@reads("classes", "tenants")
def _groups(config: Config) -> Iterator[Finding]:
    for section, groups in (("classes", config.classes), ("tenants", config.tenants)):
        names = [group.name for group in groups]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield Finding("CFG-035", (section,), f'holds the name "{name[:40]}" twice', "each name once", "rename one")
        total = math.fsum(group.share for group in groups)
        if groups and abs(total - 1) > 1e-6:
            yield Finding("CFG-036", (section,), f"has shares that add up to {total:.6g}", "1", "correct the shares")


@reads("limits")
def _money(config: Config) -> Iterator[Finding]:
    limits = config.limits
    if limits.max_cost is not None:
        for name in ("price_per_million_input_tokens", "price_per_million_output_tokens"):
            if getattr(limits, name) is None:
                yield Finding(
                    "CFG-039",
                    ("limits", "max_cost"),
                    f"is given, {name} is not",
                    "both prices",
                    "add the price: a missing one counts as 0",
                )
