"""Predict before you measure: the queueing models of a run against its measurement.

Input: the rows of every stage as arrays, the SLO, max_num_seqs, the planned lengths.
Output: one JSON-able dict, `Analysis.model`: the step law fitted on the two lowest valid
stages, lambda_max, measured against predicted against naive for every stage, the predicted
knee, notes, and one sentence. Keys: `docs/queueing.md` section 8.
Does not: decide which stages are valid, read files, use a latency of a stage it predicts.

1. Of a predicted stage only arrivals and lengths are used: the plan, not the outcome.
2. Whatever cannot be said is None with a note; nothing is infinite or NaN.
3. Work is bounded: `model_stages.MAX_*_ROWS` per stage, stated in a note when they cut.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.batching import lengths_of
from analysis.model_report import Predictor, describe_fit
from analysis.model_stages import StageArrays, choose_calibration, length_sample, prepare
from analysis.predict import Deadlines
from analysis.replay import DEFAULT_BUDGET_TOKENS
from analysis.step_clock import fit
from bench.records.sentences import said, text_of

__all__ = ["StageArrays", "fit_and_predict"]

MAX_STAGES = 64  # more are a search, not a report


def fit_and_predict(
    stages: Sequence[StageArrays],
    slo: Mapping[str, float | None] | Deadlines,
    max_num_seqs: int | None,
    lengths: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    max_num_batched_tokens: int | None = None,
    process: str = "poisson",
    burstiness: float = 1.0,
    replicas: int = 1,
) -> dict[str, Any]:
    """The model part of the analysis, plain JSON types only (`docs/queueing.md` section 8).

    `slo`: ttft_deadline_s, tpot_deadline_s, e2e_target_s, attainment_target (as `Analysis.slo`).
    `lengths`: planned (input_tokens, output_tokens) samples; None takes those of the stages
    without failures.
    Never raises for what is in the data: a model that cannot be made is `fit: None` and a note.
    """
    report = _modelled(stages, slo, max_num_seqs, lengths, max_num_batched_tokens, process, burstiness, replicas)
    told = report["sentence"]
    return report | {
        "sentence": text_of(told), "code": told["code"], "params": told["params"],
        "notes": [text_of(note) for note in report["notes"]], "notes_said": report["notes"],
    }  # fmt: skip


def _modelled(
    stages: Sequence[StageArrays], slo: Deadlines | Mapping[str, float | None], max_num_seqs: int | None,
    lengths: tuple[np.ndarray, np.ndarray] | None, max_num_batched_tokens: int | None, process: str,
    burstiness: float, replicas: int,
) -> dict[str, Any]:  # fmt: skip
    """The report with its notes and its sentence as codes."""
    deadlines = slo if isinstance(slo, Deadlines) else _deadlines(slo)
    report = _empty()
    if len(stages) > MAX_STAGES:
        report["notes"].append(said("model.stages", stages=len(stages), limit=MAX_STAGES))
    prepared = [p for p in (prepare(s, report["notes"]) for s in stages[:MAX_STAGES]) if p is not None]
    if replicas > 1:
        report["notes"].append(said("model.replicas", replicas=replicas))
    chosen = choose_calibration(prepared, report["notes"])
    if not chosen:
        why = report["notes"][-1]
        hidden = why["code"] == "model.hidden"
        report["sentence"] = why if hidden else said("model.none", why=why)
        report["predictive"] = False if hidden else None
        return report
    try:
        fitted = fit([stage.trace for stage in chosen])
    except ValueError as problem:
        report["notes"].append(said("text", text=str(problem)))
        report["sentence"] = said("model.none", why=report["notes"][-1])
        return report
    if max_num_seqs is None:
        report["notes"].append(said("model.no_limit"))
    budget = max_num_batched_tokens or DEFAULT_BUDGET_TOKENS
    law = fitted.law
    if law.alpha_s + law.beta_s + law.kappa_s + law.kv_s <= 0:
        report["notes"].append(said("model.no_step"))
        report["sentence"] = said("model.none", why=said("model.no_time"))
        return report
    if process not in ("constant", "poisson", "gamma"):
        report["notes"].append(said("model.process", process=process))
    sample = length_sample(prepared, lengths)
    describe_fit(report, fitted, chosen, lengths_of(*sample), max_num_seqs)
    # without a known limit the batch is never full: as many slots as there are requests
    seqs = max_num_seqs or max(int(max(stage.start_s.size for stage in prepared)), 1)
    Predictor(report, fitted, sample, seqs, budget, deadlines, max_num_seqs is not None).run(
        prepared, chosen, process, burstiness
    )
    return report


def _empty() -> dict[str, Any]:
    return {
        "schema": 1, "fit": None, "lambda_max_qps": None, "lambda_max_low_qps": None, "lambda_max_high_qps": None,
        "calibration_stages": [], "calibration_load_max": None, "ttft_overhead_s": None, "lengths": None,
        "predictions": [], "stage_models": [], "knee_predicted_qps": None, "knee_predicted_low_qps": None,
        "knee_predicted_high_qps": None, "knee_kind": None, "p95_crossing_predicted_qps": None,
        "predictive": None, "worst_residual_ratio": None, "batch_curve": [], "usl": None,
        "flattening_batch_size": None, "notes": [], "sentence": said(""),
    }  # fmt: skip


def _deadlines(slo: Mapping[str, float | None]) -> Deadlines:
    def limit(key: str) -> float:
        value = slo.get(key)
        return math.inf if value is None else float(value)

    target = slo.get("attainment_target")
    return Deadlines(
        limit("ttft_deadline_s"), limit("tpot_deadline_s"), limit("e2e_target_s"), 0.99 if target is None else target
    )
