"""The policy study: every table of docs/study.md, in virtual time.

    python -m benchmarks.study                              (prints Markdown; about 2 minutes of CPU)
    python -m benchmarks.study --traces DIR --write docs/study.md

DIR holds azure_llm_2023_conv.csv (Azure/AzurePublicDataset, AzureLLMInferenceTrace_conv.csv) and
mooncake_fast25_conversation.jsonl.gz (kvcache-ai/Mooncake, FAST25 release); without it these tables are left out.
Intervals: Student t, 95 %, over seeds (own load) or over windows of the trace that do not overlap.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from analysis.compare import Cell, cells
from bench.config import load_config
from bench.workload.plan import Plan, build_plan
from engine.compare import sample
from engine.settings import EngineConfig
from engine.simulate import simulate_stage

ROOT = Path(__file__).resolve().parents[1]
STUDY = ROOT / "configs" / "study"
DEMO, REFERENCE = ROOT / "configs" / "demo.json", ROOT / "configs" / "reference_4x.json"
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def table(
    base: Path, variants: Path, plans: Iterator[tuple[int, dict[str, Any]]], extra: dict[str, Any], **shape: Any
) -> list[Cell]:
    """One cell per variant and rate; `plans` gives (seed, overrides) of each repeat."""
    repeats, found = list(plans), []
    for name, keys in yaml.safe_load(variants.read_text(encoding="utf-8")).items():
        for seed, more in repeats:
            config = load_config(base, overrides={**extra, **more, **keys}).config
            engine = EngineConfig.from_config(config)
            plan: Plan = build_plan(config, seed=seed, **shape)
            for stage in plan.stages:
                result = simulate_stage(plan, stage, config, engine)
                one = sample(name, result, engine, seed)
                found.append(
                    replace(one, offered_qps=round(one.offered_qps, 1))
                    if "trace" not in str(more)
                    else replace(one, offered_qps=0.0)
                )
    return cells(found)


def markdown(rows: list[Cell], *, rates: bool = True) -> list[str]:
    """The cells as a table; rates in columns."""
    columns = sorted({c.offered_qps for c in rows})
    head = [f"{q:g}/s" if rates else "attainment" for q in columns]
    lines = [
        "| policy | " + " | ".join(head) + " | refused | preemptions | worst TTFT |",
        "|---|" + "---:|" * (len(head) + 3),
    ]
    best = {q: max(c.attainment for c in rows if c.offered_qps == q) for q in columns}
    for name in dict.fromkeys(c.variant for c in rows):
        mine = [c for c in rows if c.variant == name]
        shown = []
        for c in sorted(mine, key=lambda c: c.offered_qps):
            half = 0.0 if c.low is None or c.high is None else max(c.attainment - c.low, c.high - c.attainment)
            text = f"{c.attainment:.3f} ± {half:.3f}"
            clear = c.gain_low is not None and (c.gain_low > 0 or (c.gain_high or 0) < 0)
            mark = ("↑" if c.gain > 0 else "↓") if clear else ""
            shown.append(f"**{text}** {mark}" if c.attainment == best[c.offered_qps] else f"{text} {mark}")
        top = max(mine, key=lambda c: c.offered_qps)
        lines.append(
            f"| {name} | " + " | ".join(s.strip() for s in shown) + f" | {top.refused:.1%} | {top.preemptions:.0f} | "
            f"{top.worst_ttft_s:.1f} s |"
        )
    return lines


def seeds(count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Repeats of an own load."""
    return ((seed, {}) for seed in range(1, count + 1))


def windows(
    path: Path, count: int, length_s: float, scale: float, first_s: float
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Windows of a trace that do not overlap."""
    for i in range(count):
        start = first_s + i * length_s
        yield (
            i + 1,
            {
                "loadgen.trace_file": str(path),
                "loadgen.arrival_process": "trace",
                "loadgen.trace_start_sec": start,
                "loadgen.trace_end_sec": start + length_s,
                "loadgen.trace_rate_scale": scale,
                "loadgen.trace_max_input_tokens": 7000,
                "loadgen.max_output_tokens": 1024,
            },
        )


def batch_curve(more: dict[str, Any], at_qps: float) -> list[str]:
    """Throughput under overload, TPOT and attainment at one rate, by max_num_seqs."""
    lines = [
        "| max_num_seqs | answers/s under overload | gain per added sequence | TPOT p50 there | attainment at "
        f"{at_qps:g}/s | preemptions |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    before: tuple[int, float] | None = None
    turned, best = None, 0.0
    for n in SIZES:
        keys = {**more, "scheduler.max_num_seqs": n, "scheduler.batch_size_cap": n}
        config = load_config(DEMO, overrides=keys).config
        engine = EngineConfig.from_config(config)
        over = build_plan(config, "single", qps=[60.0], duration_s=30.0, seed=1)
        out = simulate_stage(over, over.stages[0], config, engine).outcomes
        # work that was done between second 10 and 30: a cold start and the drain are left out
        done, last, first = np.array(out.done_s), np.array(out.last_s), np.array(out.first_s)
        tokens = np.array(out.output_tokens)
        inside = (np.array(out.kind) == 1) & (done > 10) & (done <= 30)
        rate = inside.sum() / 20.0
        tpot = (
            np.median((last - first)[inside & (tokens > 1)] / (tokens - 1)[inside & (tokens > 1)])
            if inside.any()
            else np.nan
        )
        good = build_plan(config, "single", qps=[at_qps], duration_s=60.0, seed=1)
        one = sample(str(n), simulate_stage(good, good.stages[0], config, engine), engine, 1)
        gain = (rate - before[1]) / (n - before[0]) if before else rate
        best = max(best, rate)
        if rate < 0.98 * best and turned is None:  # less could be the noise of 20 s
            turned = n
        lines.append(
            f"| {n} | {rate:.2f} | {gain:+.3f} | {tpot * 1e3:.1f} ms | {one.met / one.arrivals:.3f} | "
            f"{sum(c.preemptions for c in out.counters)} |"
        )
        before = (n, rate)
    lines += [
        "",
        f"The marginal gain is negative from max_num_seqs {turned} on: what is preempted is computed twice."
        if turned
        else "The marginal gain falls towards 0 and stays positive: memory does not run short here.",
    ]
    return lines


def prefix_table(trace: Path, count: int) -> list[str]:
    """Hits, attainment and TTFT with and without a prefix cache; the same windows for all, four times as fast for 4."""
    lines = [
        "| engine | prompt tokens found | unlimited cache | attainment | TTFT p50 | TTFT p95 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, keys in yaml.safe_load((STUDY / "prefix.yaml").read_text(encoding="utf-8")).items():
        found, asked, met, blocks, seen = 0, 0, [], [], []
        for seed, more in windows(trace, count, 300.0, 1.1 * keys.get("engine.replicas", 1), 600.0):
            config = load_config(DEMO, overrides={**more, **keys}).config
            engine = EngineConfig.from_config(config)
            plan = build_plan(config, "replay", seed=seed)
            result = simulate_stage(plan, plan.stages[0], config, engine)
            one = sample(name, result, engine, seed)
            found += sum(result.outcomes.cached_tokens)
            asked += int(result.schedule.input_tokens.sum())
            met.append(one.met / one.arrivals)
            blocks.append(plan.trace.prefixes.hit_ratio())
            seen.append(np.array(result.outcomes.first_s) - result.schedule.intended_s)
        ttft = np.concatenate(seen)
        p50, p95 = np.quantile(ttft[~np.isnan(ttft)], [0.5, 0.95], method="inverted_cdf")
        lines.append(
            f"| {name} | {found / asked:.1%} | {np.mean(blocks):.1%} | {np.mean(met):.3f} | {p50 * 1e3:.0f} ms | "
            f"{p95 * 1e3:.0f} ms |"
        )
    return lines


def study(count: int, traces: Path | None) -> list[str]:
    """All tables as Markdown lines."""
    policies, preemption = STUDY / "policies.yaml", STUDY / "preemption.yaml"
    lines = [
        "### Demo workload (one H100-8B, 32 sequences, knee near 20/s)",
        "",
        *markdown(
            table(DEMO, policies, seeds(count), {}, shape="sweep", qps=[18.0, 20.0, 22.0, 26.0], duration_s=60.0)
        ),
        "",
        "### Reference workload (four H100-8B, 482 output tokens on average)",
        "",
        *markdown(
            table(
                REFERENCE,
                policies,
                seeds(max(2, count - 2)),
                {
                    "scheduler.policy": "fcfs",
                    "scheduler.batch_size_cap": 32,
                    "admission.reject_on_budget_exceed": False,
                },
                shape="sweep",
                qps=[15.0, 20.0, 25.0],
                duration_s=150.0,
            )
        ),
    ]
    if traces is not None:
        azure, mooncake = traces / "azure_llm_2023_conv.csv", traces / "mooncake_fast25_conversation.jsonl.gz"
        lines += [
            "",
            "### Azure LLM 2023 conversation trace, 2.2 times its rate, windows of 150 s (one H100-8B)",
            "",
            *markdown(table(DEMO, policies, windows(azure, count, 150.0, 2.2, 600.0), {}, shape="replay"), rates=False),
            "",
            "### Mooncake conversation trace, 1.1 times its rate, prompts cut to 7,000 tokens, windows of 150 s",
            "",
            *markdown(
                table(DEMO, policies, windows(mooncake, count, 150.0, 1.1, 600.0), {}, shape="replay"), rates=False
            ),
            "",
            "### Prefix caching, Mooncake conversation trace, prompts cut to 7,000 tokens, windows of 300 s",
            "",
            *prefix_table(mooncake, count),
        ]
    lines += [
        "",
        "### Preemption under short memory (demo workload, 1,600 blocks)",
        "",
        *markdown(
            table(
                DEMO,
                preemption,
                seeds(count),
                {"engine.num_blocks": 1600, "scheduler.swap_space_gb": 8.0},
                shape="sweep",
                qps=[12.0, 14.0, 16.0, 18.0],
                duration_s=60.0,
            )
        ),
        "",
        "### Batch size, memory of an H100 (450,000 tokens)",
        "",
        *batch_curve({}, 18.0),
        "",
        "### Batch size, short memory and long answers (prompts of 50 to 150 tokens, 482 output tokens on average, "
        "1,000 blocks = 16,000 tokens, promises up to twice the memory)",
        "",
        *batch_curve(
            {
                "engine.num_blocks": 1000,
                "loadgen.input_len_range": [50, 150],
                "loadgen.output_len_mu": 6.0,
                "loadgen.max_output_tokens": 4096,
                "admission.kv_reserve_ratio": 1.0,
                "admission.oversubscribe_factor": 2.0,
            },
            5.0,
        ),
    ]
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or put them between the marks of a page."""
    parser = argparse.ArgumentParser(description="The policy study in virtual time.")
    parser.add_argument("--seeds", type=int, default=5, help="repeats per cell (default 5)")
    parser.add_argument("--traces", type=Path, help="folder with the Azure and Mooncake traces")
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    text = "\n".join(study(options.seeds, options.traces)) + "\n"
    if options.write is None:
        print(text, end="")
        return
    page = options.write.read_text(encoding="utf-8")
    part = re.compile(r"(<!-- begin tables -->\n).*?(<!-- end tables -->)", re.S)
    options.write.write_text(part.sub(lambda m: m.group(1) + "\n" + text + "\n" + m.group(2), page), encoding="utf-8")


if __name__ == "__main__":
    main()
