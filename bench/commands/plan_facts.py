"""What control/watermark.py needs to know of a run, read from its analysis, its config and its rows.

Input: an `Analysis` and the run folder. Output: `Facts`.
Does not: judge, or invent what the run does not say (absent is None).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.commands.untold import is_ours, origin_of, untold
from bench.records.analysis import Analysis
from control.watermark import Facts, StepLaw

# Variance / mean of counts of the load that a run sends, by process; gamma: 1 / shape in long intervals.
DISPERSION = {"constant": 0.0, "poisson": 1.0}


LIMITS = ("max_num_seqs", "batch_size_cap", "max_num_batched_tokens")


def unknown_limits(run: dict[str, Any], runs_with: dict[str, int]) -> list[str]:
    """The limits that nobody has said: a service runs with its own, whatever the config's defaults are.

    Known are those of the embedded engine (also in virtual time), those in the config, and `runs_with`. The batch is
    known by `max_num_seqs` or `batch_size_cap`, either one.
    """

    def told(key: str) -> bool:
        return key in runs_with or not untold(run, f"scheduler.{key}")

    unknown = [] if told("max_num_seqs") or told("batch_size_cap") else ["max_num_seqs"]
    return unknown if told("max_num_batched_tokens") else [*unknown, "max_num_batched_tokens"]


def now_of(run: dict[str, Any], runs_with: dict[str, int], key: str) -> tuple[Any, bool]:
    """(what the run had for a `section.name` key, whether anybody has said it): a default is no word of a service."""
    section, _, name = key.partition(".")
    scheduler = _scheduler(run, runs_with)
    told = runs_with.keys() | {k for k in LIMITS if not untold(run, f"scheduler.{k}")}
    if section == "scheduler" and name in LIMITS:
        other = told & set(LIMITS[:2]) if name in LIMITS[:2] else set()
        return (scheduler.get(name), True) if name in told or other else (None, False)
    return (None, False) if untold(run, key) else (((run.get("config") or {}).get(section) or {}).get(name), True)


def _scheduler(run: dict[str, Any], runs_with: dict[str, int]) -> dict[str, Any]:
    """The limits that the run had: of what was told, the batch also stands for its other name."""
    found = {**((run.get("config") or {}).get("scheduler") or {}), **runs_with}
    told = [k for k in LIMITS[:2] if k in runs_with] or [
        k for k in LIMITS[:2] if origin_of(run, f"scheduler.{k}") != "default"
    ]
    if len(told) == 1 and not is_ours(run):
        found |= dict.fromkeys(LIMITS[:2], found[told[0]])
    return found


def facts_of(analysis: Analysis, folder: Path, runs_with: dict[str, int] | None = None) -> Facts:
    """The facts of a run whose verdict allows to plan; `runs_with`: limits of the service that the run does not say."""
    config = analysis.run.get("config") or {}
    scheduler, slo = _scheduler(analysis.run, runs_with or {}), analysis.slo
    engine, admission = config.get("engine") or {}, config.get("admission") or {}
    model = analysis.model or {}
    fit, lengths = model.get("fit"), model.get("lengths") or {}
    seqs = int(scheduler.get("max_num_seqs") or 32)
    mean_in, p95_in = _input_tokens(folder)
    mean_out = _output_mean(analysis) or 1.0
    return Facts(
        knee_low_qps=float(analysis.capacity.knee_low_qps or 0.0),
        ttft_deadline_s=slo["ttft_deadline_s"],
        tpot_deadline_s=slo["tpot_deadline_s"],
        attainment_target=slo["attainment_target"],
        max_num_seqs=seqs,
        batch_size_cap=int(scheduler.get("batch_size_cap") or seqs),
        max_num_batched_tokens=int(scheduler.get("max_num_batched_tokens") or 4096),
        input_mean=lengths.get("input_mean_tokens") or mean_in,
        output_mean=lengths.get("output_mean_tokens") or mean_out,
        input_p95=p95_in,
        context_mean=lengths.get("context_mean_tokens") or mean_in + mean_out,
        cached_mean=lengths.get("cached_mean_tokens") or 0.0,
        replicas=int(engine.get("replicas") or 1),
        replicas_known=not untold(analysis.run, "engine.replicas"),
        lambda_max_qps=analysis.capacity.lambda_max_qps,
        law=StepLaw(fit["alpha_s"], fit["beta_s"], fit["gamma_s"], fit["kv_s"]) if fit else None,
        residence=tuple(
            (s.offered_qps, s.little.residence_mean_s)
            for s in analysis.stages
            if s.verdict != "INVALID"
            and s.stationarity != "UNSTABLE"
            and s.little.residence_mean_s is not None
            and (s.attainment_joint.value or 0.0) >= slo["attainment_target"]
        ),
        kv_tokens=_kv_tokens(config),
        kv_reserve_ratio=float(admission.get("kv_reserve_ratio") or 0.85),
        run_dispersion=_dispersion(config, analysis),
    )


def _kv_tokens(config: dict[str, Any]) -> int | None:
    """KV room of one embedded replica; a real service does not say."""
    engine = config.get("engine") or {}
    if not engine.get("embedded"):
        return None
    if engine.get("num_blocks"):
        return int(engine["num_blocks"]) * int(engine.get("block_size") or 16)
    from engine.profiles import load_profile

    return load_profile(engine["profile"]).kv_tokens


def _dispersion(config: dict[str, Any], analysis: Analysis) -> float:
    load = config.get("loadgen") or {}
    process = load.get("arrival_process")
    if process in DISPERSION:
        return DISPERSION[process]
    if process == "gamma":
        return 1.0 / float(load.get("burstiness") or 1.0)
    seen = sorted(s.stimulus.dispersion for s in analysis.stages if s.stimulus.dispersion is not None)
    return seen[len(seen) // 2] if seen else 1.0


def _output_mean(analysis: Analysis) -> float | None:
    """Mean output tokens of finished answers, from rates: tokens per second / answers per second."""
    rows = [(s.output_tps, s.completed_qps) for s in analysis.stages if s.completed_qps > 0]
    return sum(t for t, _ in rows) / sum(q for _, q in rows) if rows else None


def _input_tokens(folder: Path) -> tuple[float, float]:
    """Mean and 95th percentile of the planned prompt lengths."""
    from analysis.load import read_ledger, requests_path
    from analysis.percentiles import nearest_rank

    tokens = read_ledger(requests_path(folder)).columns["input_tokens"]
    tokens = tokens[tokens > 0]
    tokens.sort()
    return float(tokens.mean()), float(nearest_rank(tokens, 0.95))
