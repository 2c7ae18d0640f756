"""Throughput against the batch cap, over runs that differ in nothing else: where does one more seat stop paying?

Input: analyses of runs with different caps (measured or simulated). Output: `BatchCurve`.
Does not: read files, run anything, or compare runs that differ in more than the cap (`differences` names it).

1. The cap of a run is min(max_num_seqs, batch_size_cap) times its replicas. A cap is full when the load was more than
   it served: UNSTABLE, or more than 3 % of the arrivals left behind. Only then is its throughput the cap's.
2. Gain of one more seat between two caps = (X2 - X1)/(n2 - n1), 1/s per seat. Several stages of a cap are repeats:
   Student t over them; a single one has the spread of a count, sqrt(X/window), which is on the safe side for a full
   service (its departures vary less than a Poisson process).
3. The turning point is that of the Universal Scalability Law: a step of n sequences lasts T(n) = a + b n + c n², so
   n/X(n) = A + B n + C n², linear in its coefficients, and X peaks at n* = sqrt(A/C). Three full caps fix it; the
   interval is from draws of the throughputs. C <= 0 in a draw is no peak in that draw.

Source: Gunther, Guerrilla Capacity Planning (USL); docs/queueing.md section 3.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from analysis.compare import mean_interval
from analysis.intervals import z_quantile
from bench.records.analysis import Analysis, StageAnalysis
from bench.records.sentences import said, text_of

FULL_IMBALANCE = 0.03  # as in analysis/stationarity.py
SAME_RATE = 1e-6
DRAWS = 4000
DRAW_SEED = 20261129
# Keys of the config that may differ: the cap itself, and what describes the run but not its service or load.
FREE_KEYS = ("scheduler.max_num_seqs", "scheduler.batch_size_cap", "sweep", "search", "gates", "limits", "base_url",
             "client", "target")  # fmt: skip


@dataclass(frozen=True)
class CapPoint:
    """One cap at one rate, its stages pooled."""

    cap: int
    offered_qps: float
    stages: int
    full: bool
    throughput_qps: float
    low_qps: float
    high_qps: float
    se_qps: float
    attainment: float
    attainment_low: float | None
    attainment_high: float | None
    tpot_p50_s: float | None  # of the answered requests
    tpot_p95_s: float | None
    in_flight_mean: float | None
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class CapGain:
    """One more seat between two neighbouring caps, 1/s per seat."""

    low_cap: int
    high_cap: int
    gain_qps: float
    gain_low_qps: float
    gain_high_qps: float
    sign: str  # "gain" | "loss" | "open": by where the interval lies


@dataclass(frozen=True)
class BatchCurve:
    """The whole answer at one rate."""

    offered_qps: float
    points: tuple[CapPoint, ...]
    gains: tuple[CapGain, ...]
    kind: str  # "peak" | "rising" | "falling" | "flat" | "not_full" | "few"
    best_cap: int | None  # the cap with the highest throughput
    peak: float | None  # n*, sequences
    peak_low: float | None
    peak_high: float | None  # None: in more than 2.5 % of the draws there is no peak
    best_attainment_cap: int | None
    sentence: str
    code: str
    params: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"schema_version": 1, **asdict(self)}


def cap_of(run: dict[str, Any]) -> int | None:
    """Sequences that the service of a run serves at once; None when its config does not tell."""
    config = run.get("config") or {}
    scheduler, engine = config.get("scheduler") or {}, config.get("engine") or {}
    caps = [scheduler.get(key) for key in ("max_num_seqs", "batch_size_cap")]
    known = [int(cap) for cap in caps if isinstance(cap, (int, float)) and cap > 0]
    return min(known) * int(engine.get("replicas") or 1) if known else None


def differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What differs between the configs of runs beside the cap: `key: value, value`; [] when nothing does."""
    flat = [_flat(run.get("config") or {}) for run in runs]
    keys = sorted(set().union(*flat)) if flat else []
    out = []
    for key in keys:
        if any(key == free or key.startswith(free + ".") for free in FREE_KEYS):
            continue
        values = [str(f.get(key)) for f in flat]
        if len(set(values)) > 1:
            out.append(f"{key}: {', '.join(dict.fromkeys(values))}")
    return out


def _flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{before}{key}.")
        else:
            out[before + key] = value
    return out


def common_rates(analyses: Sequence[Analysis]) -> list[float]:
    """Rates, ascending, at which at least two caps have a valid stage."""
    rates: dict[float, set[int]] = {}
    for found in analyses:
        cap = cap_of(found.run)
        for stage in found.stages if cap is not None else []:
            if _usable(stage):
                rates.setdefault(round(stage.offered_qps, 6), set()).add(cap)
    return sorted(rate for rate, caps in rates.items() if len(caps) > 1)


def _usable(stage: StageAnalysis) -> bool:
    return stage.verdict not in ("EMPTY", "INVALID") and "ramp" not in stage.marks and stage.window_s > 0


def cap_points(analyses: Sequence[Analysis], offered_qps: float) -> list[CapPoint]:
    """One point per cap, caps ascending."""
    groups: dict[int, list[tuple[str, StageAnalysis]]] = {}
    for found in analyses:
        cap = cap_of(found.run)
        for stage in found.stages if cap is not None else []:
            if _usable(stage) and abs(stage.offered_qps - offered_qps) <= SAME_RATE * max(offered_qps, 1.0):
                groups.setdefault(cap, []).append((str(found.run.get("run_id", "")), stage))
    return [_point(cap, members, offered_qps) for cap, members in sorted(groups.items())]


def _point(cap: int, members: list[tuple[str, StageAnalysis]], offered_qps: float) -> CapPoint:
    stages = [stage for _, stage in members]
    x = [s.completed_qps for s in stages]
    time_s = sum(s.window_s for s in stages)
    mean, low, high = mean_interval(x)
    # Repeats of one seed send the same load and agree more than chance allows: a count's spread is the least.
    se = math.sqrt(max(mean, 1 / time_s) / time_s)
    if low is not None:
        se = max(se, (mean - low) / z_quantile())
    low, high = max(mean - z_quantile() * se, 0.0), mean + z_quantile() * se
    left = sum(1 - s.completed_qps / s.arrival_qps for s in stages if s.arrival_qps) / len(stages)
    full = all(s.stationarity == "UNSTABLE" for s in stages) or left > FULL_IMBALANCE
    n = sum(s.planned for s in stages)
    lows = [s.attainment_joint.low for s in stages if s.attainment_joint.low is not None]
    highs = [s.attainment_joint.high for s in stages if s.attainment_joint.high is not None]
    in_flight = [s.little.in_flight_mean_integral for s in stages if s.little.in_flight_mean_integral is not None]
    return CapPoint(
        cap=cap, offered_qps=offered_qps, stages=len(stages), full=full, throughput_qps=mean, low_qps=low,
        high_qps=high, se_qps=se,
        attainment=sum((s.attainment_joint.value or 0.0) * s.planned for s in stages) / n if n else 0.0,
        attainment_low=min(lows, default=None), attainment_high=max(highs, default=None),
        tpot_p50_s=_middle([s.survivors["tpot_s"].p50 for s in stages]),
        tpot_p95_s=_middle([s.survivors["tpot_s"].p95 for s in stages]),
        in_flight_mean=sum(in_flight) / len(in_flight) if in_flight else None,
        runs=tuple(dict.fromkeys(name for name, _ in members if name)),
    )  # fmt: skip


def _middle(values: Sequence[float | None]) -> float | None:
    known = sorted(v for v in values if v is not None and math.isfinite(v))
    return known[len(known) // 2] if known else None


def gains(points: Sequence[CapPoint]) -> list[CapGain]:
    """The gain per seat between neighbouring caps."""
    out = []
    for a, b in zip(points, points[1:], strict=False):
        seats = b.cap - a.cap
        gain = (b.throughput_qps - a.throughput_qps) / seats
        half = z_quantile() * math.hypot(a.se_qps, b.se_qps) / seats
        sign = "gain" if gain - half > 0 else "loss" if gain + half < 0 else "open"
        out.append(CapGain(a.cap, b.cap, gain, gain - half, gain + half, sign))
    return out


def usl_peak(caps: np.ndarray, throughput_qps: np.ndarray) -> np.ndarray:
    """Peak n* = sqrt(A/C) of n/X = A + B n + C n², one per row of `throughput_qps` (d, n); inf where there is none.

    Least squares, weighted by X/n, so that all caps count alike in relative terms. A C that is nought but for
    rounding (1e-9 of the largest term) is no curvature.
    """
    top = float(np.max(caps))
    n = np.asarray(caps, dtype=float) / top  # 0..1: the normal equations stay well conditioned
    x = np.atleast_2d(np.asarray(throughput_qps, dtype=float))
    weight = x / n  # of the rows of y = n/x, so that the right-hand side is 1
    design = np.stack([np.ones_like(n), n, n * n], axis=1)[None] * weight[:, :, None]
    square = np.einsum("dni,dnj->dij", design, design)
    a, b, c = np.linalg.solve(square, design.sum(axis=1)[:, :, None])[:, :, 0].T
    curved = (a > 0) & (c > 1e-9 * (np.abs(a) + np.abs(b)))
    return np.where(curved, top * np.sqrt(np.divide(a, c, out=np.ones_like(a), where=curved)), np.inf)


def batch_curve(analyses: Sequence[Analysis], offered_qps: float) -> BatchCurve:
    """The curve at one rate."""
    return curve_of(cap_points(analyses, offered_qps), offered_qps)


def curve_of(points: Sequence[CapPoint], offered_qps: float) -> BatchCurve:
    """The curve through points of one rate, caps ascending."""
    steps, full = gains(points), [p for p in points if p.full]
    peak, low, high = _peak(full)
    kind = _kind(full, gains(full), peak, low, high)
    best = max(points, key=lambda p: p.throughput_qps, default=None)
    fair = max(points, key=lambda p: p.attainment, default=None)
    params: dict[str, Any] = {
        "offered_qps": offered_qps, "caps": len(points), "full": len(full),
        "best_cap": best.cap if best else None, "best_qps": best.throughput_qps if best else None,
        "attainment_cap": fair.cap if fair else None, "attainment": fair.attainment if fair else None,
    }  # fmt: skip
    if kind == "peak":
        params |= {"peak": peak, "low": low, "high": said("batch.open") if high is None else said("batch.n", n=high)}
    if kind in ("rising", "falling"):
        step = gains(full)[-1] if kind == "rising" else gains(full)[0]
        params |= {"gain": step.gain_qps, "gain_low": step.gain_low_qps, "gain_high": step.gain_high_qps,
                   "low_cap": step.low_cap, "high_cap": step.high_cap}  # fmt: skip
    told = said(f"batch.{kind}", **params)
    return BatchCurve(
        offered_qps, tuple(points), tuple(steps), kind, best.cap if best else None, peak, low, high,
        fair.cap if fair else None, text_of(told), told["code"], told["params"],
    )  # fmt: skip


def _peak(full: Sequence[CapPoint]) -> tuple[float | None, float | None, float | None]:
    """(n*, 2.5 %, 97.5 % point); high None when it may lie anywhere above."""
    if len(full) < 3:
        return None, None, None
    caps = np.array([p.cap for p in full])
    x = np.array([p.throughput_qps for p in full])
    if not (x > 0).all():
        return None, None, None
    value = float(usl_peak(caps, x)[0])
    rng = np.random.default_rng(DRAW_SEED)
    drawn = x + np.array([p.se_qps for p in full]) * rng.standard_normal((DRAWS, len(x)))
    found = usl_peak(caps, np.maximum(drawn, x * 1e-3))
    low, high = np.quantile(found, [0.025, 0.975], method="inverted_cdf")
    if not math.isfinite(low):
        return (value if math.isfinite(value) else None), None, None
    return (value if math.isfinite(value) else None), float(low), (float(high) if math.isfinite(high) else None)


def _kind(
    full: Sequence[CapPoint], steps: Sequence[CapGain], peak: float | None, low: float | None, high: float | None
) -> str:
    if not full:
        return "not_full"
    if len(full) < 2:
        return "few"
    signs = [s.sign for s in steps]
    if "loss" in signs:
        inside = peak is not None and low is not None
        return "peak" if inside and ("gain" in signs or low >= full[0].cap / 2) else "falling"  # type: ignore[operator]
    return "rising" if signs[-1] == "gain" else "flat"
