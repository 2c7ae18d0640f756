"""The shape of `analysis.json`: what `analysis/` computes and `reports/` draws.

Input: nothing; these are plain dataclasses with a JSON codec.
Does not: compute, judge or format. Absent is None; a latency that never
ended is the string "inf" in JSON and `math.inf` in Python.

1. Every number with a unit carries it in its name (s, qps, tokens, ratio).
2. `schema_version` changes only when a reader of the old one would misread.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
VERDICTS = ("PASS", "FAIL", "INVALID")
STAGE_VERDICTS = ("MET", "NOT_MET", "UNDECIDED", "INVALID", "EMPTY")
STATIONARITY = ("STABLE", "SUSPECT", "UNSTABLE", "TOO_SHORT")
# Warnings of a deciding stage that say what its numbers rest on: the verdict names them, not the stage alone.
TRUST = ("WARN-EVENTS", "WARN-USAGE", "WARN-CACHED")
LATENCY_METRICS = ("ttft_s", "tpot_s", "e2e_s", "residence_s", "send_lag_s")


@dataclass
class Reason:
    """One plain sentence of a verdict with the number that caused it."""

    reason_id: str  # stable, such as "INV-RATE"; listed in docs/verdicts.md
    severity: str  # "invalid" | "fail" | "warn" | "info"
    text: str  # what is so, with its number and its limit
    next_step: str = ""
    stage: int | None = None
    value: float | None = None
    limit: float | None = None
    # the same sentences for a catalogue in any language (bench/records/sentences.py)
    code: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    next_code: str = ""
    next_params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Interval:
    """A share or a value with its two-sided interval."""

    value: float | None
    low: float | None = None
    high: float | None = None
    level: float = 0.95
    method: str = ""
    n: int = 0


@dataclass
class Percentiles:
    """Nearest-rank percentiles over all arrivals; inf = did not finish by then."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    maximum: float | None = None
    # percentile name -> why it is not to be read as a number (too few samples)
    withheld: dict[str, str] = field(default_factory=dict)
    # the same as {"code", "params"}
    withheld_said: dict[str, dict[str, Any]] = field(default_factory=dict)
    p95_low: float | None = None
    p95_high: float | None = None
    interval_method: str = ""
    effective_n: float | None = None
    interval_reliable: bool | None = None


@dataclass
class Little:
    """Little's law on one window, from sources that do not share code."""

    arrival_qps: float | None  # lambda
    residence_mean_s: float | None  # W
    in_flight_mean_integral: float | None  # L by the exact time integral of the rows
    in_flight_mean_gauge: float | None  # L by the 10 Hz gauge of the sender
    in_flight_mean_server: float | None  # L by the service's own running + waiting
    lambda_w: float | None
    gap_ratio_gauge: float | None  # (L_gauge - lambda*W) / (lambda*W)
    gap_ratio_server: float | None  # (service's count - rows at the same instants) / (lambda*W)
    identity_residual: float | None  # relative residual of the edge-corrected identity
    edge_start_s: float | None = None  # Rs
    edge_end_s: float | None = None  # Re
    gauge_samples: int = 0
    outside_s: float | None = None  # time of a request outside the service's own count, from the same instants
    outside_se_s: float | None = None  # its standard error
    ok: bool | None = None
    note: str = ""
    code: str = ""  # of the note
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stimulus:
    """Planned against delivered arrivals of one window."""

    planned: int
    sent: int
    planned_qps: float
    delivered_qps: float
    rate_error_ratio: float
    gap_cv: float | None = None
    dispersion: float | None = None  # variance / mean of counts per second
    ks_p: float | None = None  # gaps against the process asked for
    send_lag_p50_s: float | None = None
    send_lag_p99_s: float | None = None
    loop_lag_p99_s: float | None = None
    client_cpu_max_ratio: float | None = None
    ok: bool | None = None


@dataclass
class StageAnalysis:
    """Everything said about one stage (one offered rate, one repeat)."""

    stage: int
    repeat: int
    name: str
    offered_qps: float
    process: str
    window_s: float
    planned: int
    counts: dict[str, int]  # status -> rows, of the window
    arrival_qps: float
    completed_qps: float
    goodput_qps: float
    output_tps: float
    latency: dict[str, Percentiles]  # key in LATENCY_METRICS
    survivors: dict[str, Percentiles]  # the same over status ok only
    attainment_ttft: Interval
    attainment_tpot: Interval
    attainment_joint: Interval
    attainment_e2e: Interval
    attainment_low: float  # bounds for what was unfinished at the drain limit
    attainment_high: float
    attainment_survivors: float | None
    binding_clause: str  # "ttft" | "tpot" | "failures" | "none"
    verdict: str  # one of STAGE_VERDICTS
    stationarity: str  # one of STATIONARITY
    in_flight_growth_qps: float | None
    little: Little
    stimulus: Stimulus
    reasons: list[Reason] = field(default_factory=list)
    flags: dict[str, float] = field(default_factory=dict)  # flag -> share of rows
    marks: list[str] = field(default_factory=list)  # worker_lost, interrupted, drain_limit, ...
    ecdf_ttft: list[list[float]] = field(default_factory=list)  # [value_s, share], at most 100 points
    ecdf_tpot: list[list[float]] = field(default_factory=list)
    drain_s: float | None = None
    warmup_suggested_s: float | None = None  # what the data ask for, max(MSER-5, 10 median residences); cuts nothing
    warmup_applied_s: float | None = None  # what was cut: window_start_s - start_s, as configured
    # seconds from the run's start, as in stages.csv
    start_s: float | None = None
    window_start_s: float | None = None
    window_end_s: float | None = None


@dataclass
class Capacity:
    """The knee and what follows from it."""

    knee_qps: float | None  # SLO crossing of joint attainment
    knee_low_qps: float | None
    knee_high_qps: float | None
    knee_kind: str  # "crossing" | "at_least" | "below" | "none"
    knee_method: str
    last_met_qps: float | None  # last offered rate that held the target
    watermark_low_qps: float | None  # 70 % of the knee's lower bound
    watermark_high_qps: float | None  # 80 %
    lambda_max_qps: float | None = None
    flattening_qps: float | None = None
    attainment_target: float = 0.99
    sentence: str = ""
    # where P95 of the whole answer crosses its target; another limit than the knee
    p95_crossing_qps: float | None = None
    p95_crossing_low_qps: float | None = None
    p95_crossing_high_qps: float | None = None
    p95_crossing_kind: str = "none"  # as knee_kind; "growth": in-flight grows above, the answers were still in time
    # the rate above the knee, when its stage was UNSTABLE and its answers were still in time
    grows_qps: float | None = None
    code: str = ""  # of the sentence
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Hysteresis:
    """Attainment at one rate before the highest load of the run and after it."""

    offered_qps: float
    before: Interval
    after: Interval
    difference: Interval  # after - before
    verdict: str  # "recovers" | "degraded" | "undecided" | "no_overload"
    recovery_s: float | None = None  # from the end of the peak to the last miss, where the rate was held constant


@dataclass
class Gate:
    """One check of the verdict table = one JUnit test case."""

    gate_id: str
    metric: str
    statistic: str
    operator: str
    limit: float | None
    measured: float | None
    unit: str
    at: str  # "target" | "max" | a rate | "run"
    status: str  # "pass" | "fail" | "invalid" | "not_measured"
    severity: str  # "fail" | "warn"
    text: str = ""
    measured_qps: float | None = None  # the rate that `measured` belongs to; None: no single rate
    code: str = ""  # of the text
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class ErrorGroup:
    """Failures of one code in one stage."""

    layer: str  # "channel" | "script" | "scheduler" | "client"
    code: str
    error_kind: str
    stage: int
    count: int
    first_s: float
    last_s: float
    sample: str  # one redacted line


@dataclass
class Verdict:
    """PASS, FAIL or INVALID, why, and the exit code that goes with it."""

    status: str
    exit_code: int
    sentence: str
    reasons: list[Reason] = field(default_factory=list)
    interrupted: bool = False
    code: str = ""  # of the sentence
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class Repeatability:
    """Spread of one statistic over repeats of one rate."""

    offered_qps: float
    statistic: str
    values: list[float]
    range_ratio: float | None
    limit_ratio: float
    same_seed: bool
    ok: bool | None  # None: nothing is said (beyond capacity, too few valid repeats)
    note: str = ""
    repeats: int = 0  # measured
    valid: int = 0  # valid ones with a value
    unstable: bool = False  # beyond capacity: no failed repeat
    reachable: dict[str, Any] = field(default_factory=dict)  # was the limit attainable, as a sentence; {} = not asked


@dataclass
class Analysis:
    """The whole of `analysis.json`."""

    schema_version: int
    run: dict[str, Any]  # run.json, as read
    slo: dict[str, float]  # ttft_deadline_s, tpot_deadline_s, e2e_target_s, attainment_target
    target_qps: float | None
    verdict: Verdict
    gates: list[Gate]
    stages: list[StageAnalysis]
    capacity: Capacity
    errors: list[ErrorGroup] = field(default_factory=list)
    repeatability: list[Repeatability] = field(default_factory=list)
    # [t_s, in_flight] thinned to at most 1,200 points, of the whole run
    in_flight_series: list[list[float]] = field(default_factory=list)
    # arrival-time x latency counts: {"t_s": edges, "e2e_s": edges, "counts": 2-d}
    heatmap: dict[str, Any] = field(default_factory=dict)
    worst: list[dict[str, Any]] = field(default_factory=list)  # at most 20 rows
    # at most 1,500 arrivals as columns, and bins over all of them (analysis/sample.py)
    points: dict[str, Any] = field(default_factory=dict)
    # the service's own numbers over time and per stage (analysis/server_series.py); {} = not scraped
    server: dict[str, Any] = field(default_factory=dict)
    csv_check: dict[str, Any] = field(default_factory=dict)  # Locust CSV against the ledger
    clients: list[dict[str, Any]] = field(default_factory=list)  # one per worker
    model: dict[str, Any] | None = None  # queueing models against measurement
    ledger: dict[str, Any] = field(default_factory=dict)  # rows, duplicates, missing, problems
    warnings: list[Reason] = field(default_factory=list)
    # likely causes with their evidence and the next experiment; they change no verdict
    diagnosis: list[Reason] = field(default_factory=list)
    # rates that were sent before and after the highest load: does the service come back?
    hysteresis: list[Hysteresis] = field(default_factory=list)


def to_json(analysis: Analysis) -> str:
    """JSON text of an analysis; infinite values become "inf", NaN is refused."""
    return json.dumps(_plain(analysis), ensure_ascii=False, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    """What json can write. Records are walked here: `dataclasses.asdict` would copy every number of them first."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item"):  # numpy scalar
        value = value.item()
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def from_json(text: str) -> Analysis:
    """The analysis in a JSON text. Raises ValueError on an unknown schema version."""
    data = json.loads(text)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"analysis.json: schema_version is {data.get('schema_version')!r}, this version reads "
            f"{SCHEMA_VERSION}; run `bench analyse` on the run folder again"
        )
    return _build(Analysis, data)


def read_analysis(path: Path) -> Analysis:
    """The analysis stored at `path`."""
    return from_json(path.read_text(encoding="utf-8"))


_NESTED: dict[str, Any] = {}


def _build(cls: type, data: dict[str, Any]) -> Any:
    import typing

    hints = _NESTED.get(cls.__name__)
    if hints is None:
        hints = _NESTED[cls.__name__] = typing.get_type_hints(cls)
    return cls(**{k: _value(hints[k], v) for k, v in data.items() if k in hints})


def _value(hint: Any, value: Any) -> Any:
    import typing

    if value is None:
        return None
    if value in ("inf", "-inf") and hint is not str:
        return math.inf if value == "inf" else -math.inf
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _build(hint, value)
    args = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is list and args:
        return [_value(args[0], v) for v in value]
    if origin is dict and len(args) == 2:
        return {k: _value(args[1], v) for k, v in value.items()}
    if args and origin is not None:  # unions
        for arg in args:
            if dataclasses.is_dataclass(arg) and isinstance(value, dict):
                return _build(arg, value)
    return value
