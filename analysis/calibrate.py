"""What a measured run says about the step time of its service, and how far it may be trusted.

Input: the stages of a run as arrays, and what the analysis thinks of the run. Output: `Calibration`.
Does not: write a profile (`engine/calibrate.py` does), simulate, or read files.

1. Every valid stage that is not overloaded is used, not only the two lowest: a prediction is not the aim here.
2. A run that is INVALID, has replicas that rows cannot tell apart, or is too thin, is refused with the reason.
3. The law is what a profile can hold: a term in the square of the batch is refitted as a line, and that is said.

Source of the method: `analysis/step_clock.py`; the page for users is docs/calibrate.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.model_stages import MAX_FAILED_RATIO, MAX_HIDDEN_RATIO, Stage, StageArrays, prepare
from analysis.step_clock import (
    MIN_STEPS,
    TERMS,
    Events,
    StepFit,
    Trace,
    fit,
    step_clock_design,
    wall_clock_design,
)

MAX_STAGES = 8  # the lowest and the highest are kept; more stages change no coefficient, and cost seconds
MAX_STEP_ERROR = 0.10  # relative standard error of the time of a middle step: above it the run is too thin
MIN_R2 = 0.0  # a fit that explains less than the mean explains nothing


class CalibrationError(ValueError):
    """The run cannot carry a profile; the message says why and what to do."""


@dataclass(frozen=True)
class Residual:
    """How well the law gives the decode time of the answers of one stage; ratios measured / fitted - 1."""

    stage: int
    offered_qps: float
    rows: int
    median: float
    p05: float
    p95: float


@dataclass(frozen=True)
class Calibration:
    """A fitted step law, its error, and where it holds."""

    fit: StepFit
    residuals: tuple[Residual, ...]
    valid: dict[str, list[float]]  # quantity -> [lowest, highest] seen
    step_error: float  # relative standard error of a step at the middle batch
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types: for the profile file."""
        law = self.fit.law
        return {
            "order": self.fit.order, "rows": self.fit.rows, "outliers": self.fit.outliers, "r2": self.fit.r2,
            "rmse_step_s": self.fit.rmse_s, "step_error_ratio": self.step_error,
            "law": {name: getattr(law, name) for name in TERMS}, "se": dict(self.fit.se),
            "residuals": [
                {"stage": r.stage, "offered_qps": r.offered_qps, "rows": r.rows, "median_ratio": r.median,
                 "p05_ratio": r.p05, "p95_ratio": r.p95} for r in self.residuals
            ],
            "valid": self.valid, "notes": list(self.notes),
        }  # fmt: skip


def refusal(verdict: str, reasons: Sequence[str], replicas: int, loop: str = "open") -> str:
    """Why a run may not be calibrated from, as a sentence; empty when it may."""
    if verdict == "INVALID":
        said = "; ".join(reasons) or "see analysis.json"
        return f"the run is INVALID ({said}); a profile from it would carry the error on: run again"
    if replicas > 1:
        return (
            f"the service has {replicas} replicas and rows do not say which one answered, so the batch of a step is "
            "not known; measure one replica (engine.replicas 1, or the address of one instance)"
        )
    return ""


def calibrate(sources: Sequence[StageArrays]) -> Calibration:
    """The law over all stages that can carry it. Raises CalibrationError with the reason when there are too few."""
    notes: list[str] = []
    stages = _usable(sources, notes)
    if not stages:
        raise CalibrationError(
            "no stage is valid, not overloaded, and has answers of more than 20 tokens with at most 2 % failures; "
            + ("; ".join(notes) + "; " if notes else "")
            + "measure two rates below the knee with longer answers"
        )
    traces = [s.trace for s in stages]
    try:
        fitted = fit(traces)
        if fitted.law.kappa_s:
            notes.append(
                f"a term in the square of the batch fits better (R2 {fitted.r2:.4f}), which a profile cannot hold: "
                "refitted as a line, so calibrate near the load that matters"
            )
            fitted = fit(traces, "affine")
    except ValueError as problem:
        raise CalibrationError(f"too thin: {problem}") from None
    middle = float(np.median(np.concatenate([_batch(t) for t in traces])))
    error = step_error(fitted, middle)
    if not error <= MAX_STEP_ERROR or fitted.r2 <= MIN_R2:
        raise CalibrationError(
            f"too thin: the time of a step at a batch of {middle:.1f} is known to {error:.0%} only "
            f"({MAX_STEP_ERROR:.0%} allowed) with R2 {fitted.r2:.3f}; measure longer stages at two rates far apart"
        )
    if len({s.source.offered_qps for s in stages}) == 1:
        notes.append("one rate only: base and batch cost are told apart by its own fluctuations alone")
    return Calibration(fitted, tuple(_residual(s, fitted) for s in stages), _valid(stages, fitted), error, tuple(notes))


def step_error(fitted: StepFit, batch_size: float) -> float:
    """Relative standard error of alpha + beta n at n = batch_size; inf when the step takes no time."""
    gradient = np.zeros(len(TERMS))
    gradient[:2] = 1.0, batch_size
    step_s = fitted.law.alpha_s + fitted.law.beta_s * batch_size
    variance = float(gradient @ fitted.covariance @ gradient)
    return math.sqrt(max(variance, 0.0)) / step_s if step_s > 0 else math.inf


def _usable(sources: Sequence[StageArrays], notes: list[str]) -> list[Stage]:
    """Prepared stages that may carry the fit, lowest rate first."""
    found: list[Stage] = []
    for source in sources:
        if not source.valid or source.stationarity == "UNSTABLE":
            notes.append(f"stage {source.stage} is left out: {'UNSTABLE' if source.valid else 'INVALID'}")
            continue
        stage = prepare(source, notes)
        if stage is None:
            continue
        if stage.hidden_ratio > MAX_HIDDEN_RATIO:
            notes.append(
                f"stage {source.stage} is left out: {stage.hidden_ratio:.1%} of its output tokens are reasoning that "
                "was not streamed, so nobody saw how many requests shared a step"
            )
            continue
        if not (stage.trace.use & (stage.trace.output_tokens > MIN_STEPS)).any():
            continue
        if stage.failed_ratio > MAX_FAILED_RATIO:
            notes.append(f"stage {source.stage} is left out: {stage.failed_ratio:.1%} of its arrivals failed")
            continue
        found.append(stage)
    found.sort(key=lambda s: (s.source.offered_qps, s.source.stage))
    if len(found) > MAX_STAGES:
        keep = np.unique(np.linspace(0, len(found) - 1, MAX_STAGES).round().astype(int))
        found = [found[i] for i in keep]
    return found


def _batch(trace: Trace) -> np.ndarray:
    """Requests that ran when each request's first token came; at least 1."""
    first, last = np.sort(trace.first_token_s), np.sort(trace.last_token_s)
    at = trace.first_token_s[trace.use]
    running = np.searchsorted(first, at, "right") - np.searchsorted(last, at, "left")
    return np.maximum(running, 1) if at.size else np.ones(1)


def _residual(stage: Stage, fitted: StepFit) -> Residual:
    """Measured against fitted decode time of the rows of the fit, on the virtual step clock."""
    trace = stage.trace
    events = Events(trace)
    design = wall_clock_design(events)
    for _ in range(4):
        design = step_clock_design(events, fitted.law, design)
    rows = trace.use & (trace.output_tokens > MIN_STEPS) & (trace.last_token_s > trace.first_token_s)
    said = design.columns[rows] @ np.array([getattr(fitted.law, name) for name in TERMS])
    ratio = events.duration[rows] / said - 1
    low, middle, high = (float(v) for v in np.quantile(ratio, [0.05, 0.5, 0.95]))
    return Residual(stage.source.stage, stage.source.offered_qps, int(rows.sum()), middle, low, high)


def _valid(stages: Sequence[Stage], fitted: StepFit) -> dict[str, list[float]]:
    """Ranges that the fit has seen: outside them the law extrapolates."""
    prompt = np.concatenate([s.trace.input_tokens for s in stages])
    work = np.concatenate([s.trace.computed_tokens for s in stages])
    output = np.concatenate([s.trace.output_tokens for s in stages])
    rates = [s.source.offered_qps for s in stages]
    return {
        "batch_size": [1.0, float(fitted.batch_size_max)],
        "input_tokens": [float(prompt.min()), float(prompt.max())],
        **({"computed_tokens": [float(work.min()), float(work.max())]} if (work < prompt).any() else {}),
        "output_tokens": [float(output.min()), float(output.max())],
        "offered_qps": [min(rates), max(rates)],
    }
