"""The checks of the verdict, as a list: one gate = one comparison = one test case.

Input: stage analyses, capacity, the SLO and the gates of the config. Output: `Gate`s.
Does not: decide PASS or FAIL (`verdict.py` does), or measure anything.

Grammar of a config gate: metric, statistic, operator, value, at, severity.
Three steps: find the stages (`at`), read the number (`metric`, `statistic`), compare.
"Nothing measured" is not "failed": a withheld statistic fails no gate.
Latency limits are in ms in the config, seconds here.

`at: target` when the target rate is not among the stages: attainment is interpolated
linearly between the nearest valid stages below and above; other metrics take the
upper one, so that a pass cannot come from interpolating.
"""
from __future__ import annotations

import math
import operator as op
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from analysis.intervals import wilson
from bench.records.analysis import Capacity, Gate, StageAnalysis

OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": op.le, "<": op.lt, ">=": op.ge, ">": op.gt}
LATENCY_METRICS = {"ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "residence": "residence_s",
                   "send_lag": "send_lag_s", "itl_p99": "itl_p99_s"}  # fmt: skip
SAME_RATE = 1e-6
E2E_SHARE = 0.95  # "P95 <= target" holds exactly when this share of all arrivals is within the target


@dataclass(frozen=True)
class Place:
    """The valid stages that decide at one rate."""

    exact: tuple[StageAnalysis, ...]
    below: tuple[StageAnalysis, ...]
    above: tuple[StageAnalysis, ...]
    invalid_exact: tuple[StageAnalysis, ...]

    @property
    def words(self) -> str:
        """Which stages decide, for the reader."""
        if self.exact:
            return ", ".join(s.name for s in self.exact)
        names = [s[0].name for s in (self.below, self.above) if s]
        return "between " + " and ".join(names) if len(names) == 2 else "nearest stage " + "".join(names)


def usable(stage: StageAnalysis) -> bool:
    """A stage that may decide: measured, trusted, and at one rate."""
    return stage.verdict not in ("EMPTY", "INVALID") and "ramp" not in stage.marks


def locate(stages: list[StageAnalysis], qps: float) -> Place:
    """Stages at `qps`, and the nearest valid ones on either side."""

    def near(s: StageAnalysis) -> bool:
        return abs(s.offered_qps - qps) <= SAME_RATE * max(qps, 1.0)

    good = [s for s in stages if usable(s)]
    lower = max((s.offered_qps for s in good if not near(s) and s.offered_qps < qps), default=None)
    upper = min((s.offered_qps for s in good if not near(s) and s.offered_qps > qps), default=None)
    return Place(
        exact=tuple(s for s in good if near(s)),
        below=tuple(s for s in good if lower is not None and s.offered_qps == lower),
        above=tuple(s for s in good if upper is not None and s.offered_qps == upper),
        invalid_exact=tuple(s for s in stages if near(s) and s.verdict == "INVALID"),
    )


def pooled_attainment(stages: tuple[StageAnalysis, ...], clause: str = "joint") -> float | None:
    """Share over all arrivals of the stages together."""
    n = sum(s.planned for s in stages)
    if not n:
        return None
    return sum((getattr(s, f"attainment_{clause}").value or 0.0) * s.planned for s in stages) / n


def attainment_at(place: Place, qps: float, clause: str = "joint") -> tuple[float | None, str]:
    """Attainment at a rate, measured or by the interpolation rule, and how it was got."""
    if place.exact:
        return pooled_attainment(place.exact, clause), f"measured at {place.exact[0].offered_qps:g} requests/s"
    low, high = pooled_attainment(place.below, clause), pooled_attainment(place.above, clause)
    if low is not None and high is not None:
        x0, x1 = place.below[0].offered_qps, place.above[0].offered_qps
        value = low + (high - low) * (qps - x0) / (x1 - x0)
        return value, f"{qps:g} was not measured: interpolated between {x0:g} ({low:.2%}) and {x1:g} ({high:.2%})"
    return None, "not measured on both sides"


def default_gates(slo: dict[str, float], configured: list[dict[str, Any]], at: str = "target") -> list[dict[str, Any]]:
    """The SLO as gates; a configured gate on the same statistic at the same place stands in for a default.

    `at`: "target", or "run" for a load that has no single rate (ramp, spike, replay, closed loop).
    """
    wanted = [
        {"metric": "attainment", "statistic": "value", "operator": ">=", "value": slo["attainment_target"],
         "at": at, "severity": "fail"},
        {"metric": "e2e", "statistic": "p95", "operator": "<=", "value": slo["e2e_target_s"] * 1e3,
         "at": at, "severity": "fail", "by_share": True},
    ]  # fmt: skip
    taken = {(g.get("metric"), g.get("statistic", "value")) for g in configured if g.get("at", "target") == at}
    return [g for g in wanted if (g["metric"], g["statistic"]) not in taken] + list(configured)


def evaluate(spec: dict[str, Any], stages: list[StageAnalysis], capacity: Capacity, target_qps: float | None) -> Gate:
    """One gate, measured and compared."""
    metric, statistic = spec.get("metric", ""), spec.get("statistic", "value")
    operator, at = spec.get("operator", "<="), spec.get("at", "target")
    latency = metric in LATENCY_METRICS
    value = float(spec.get("value", math.nan))
    limit = value / 1e3 if latency else value
    unit = "s" if latency else "1/s" if metric.endswith("_qps") else "1"
    label = metric if statistic == "value" else f"{metric} {statistic}"
    gate = Gate(
        gate_id=f"{label.replace(' ', '_')}@{at}", metric=metric, statistic=statistic, operator=operator, limit=limit,
        measured=None, unit=unit, at=str(at), status="not_measured", severity=spec.get("severity", "fail"),
    )  # fmt: skip
    if operator not in OPERATORS or math.isnan(limit):
        gate.text = "the gate has no usable operator or value"
        return gate
    if metric == "knee_qps":
        _capacity_gate(gate, capacity)
    elif at == "target" and target_qps is None:
        gate.text = "the run has no target rate (loadgen.target_qps)"
    elif at in ("target", "max") or _as_rate(at) is not None:
        rate = target_qps if at == "target" else _as_rate(at)
        if at == "max":
            rate = max((s.offered_qps for s in stages if s.verdict != "EMPTY"), default=None)
        _rate_gate(gate, stages, rate, bool(spec.get("by_share")))
    else:
        _all_gate(gate, stages, bool(spec.get("by_share")))
    return gate


def label(gate: Gate) -> str:
    """What a gate compares, in words."""
    if gate.metric == "attainment_e2e":
        return "the share of whole answers in time"
    return f"{gate.metric} {gate.statistic}".removesuffix(" value")


def amount(gate: Gate, value: float, apart_from: float | None = None) -> str:
    """A value of the gate's metric with its unit; as many digits as set it apart from another value."""
    share = gate.unit == "1" and (gate.metric.startswith("attainment") or gate.metric.endswith("_ratio"))
    unit = " %" if share else {"s": " s", "1/s": " requests/s"}.get(gate.unit, "")
    scale = 100 if share else 1
    texts = [f"{scale * value:.{digits}g}{unit}" for digits in range(4, 10)]
    other = [None if apart_from is None else f"{scale * apart_from:.{digits}g}{unit}" for digits in range(4, 10)]
    return next((mine for mine, theirs in zip(texts, other, strict=True) if mine != theirs), texts[0])


def where(gate: Gate, target_qps: float | None) -> str:
    """Where a gate applies, in words."""
    if gate.at == "target":
        return "at the target" if target_qps is None else f"at the target of {target_qps:g} requests/s"
    named = {"run": "over the whole run", "all": "in every stage", "max": "at the highest rate"}
    return named.get(gate.at, f"at {gate.at} requests/s")


def _as_rate(at: Any) -> float | None:
    try:
        return float(at)
    except (TypeError, ValueError):
        return None


def _compare(gate: Gate, measured: float | None, text: str) -> None:
    gate.measured = measured
    gate.text = text
    if measured is None or math.isnan(measured):
        gate.measured, gate.status = None, "not_measured"
        return
    assert gate.limit is not None
    gate.status = "pass" if OPERATORS[gate.operator](measured, gate.limit) else "fail"


def _rate_gate(gate: Gate, stages: list[StageAnalysis], rate: float | None, by_share: bool) -> None:
    if rate is None:
        gate.text = "no stage was measured"
        return
    place = locate(stages, rate)
    if not place.exact and place.invalid_exact:
        gate.status = "invalid"
        gate.text = f"{place.invalid_exact[0].name} is INVALID: {_first_invalid(place.invalid_exact[0])}"
        return
    if gate.metric.startswith("attainment"):
        clause = gate.metric.removeprefix("attainment").lstrip("_") or "joint"
        value, how = attainment_at(place, rate, clause)
        if value is None and not place.exact:
            _one_sided(gate, place, rate, lambda s: pooled_attainment(s, clause))
            return
        gate.measured_qps = rate
        _compare(gate, value, how)
        _unstable_fails(gate, place)
        return
    gate.measured_qps = rate
    if place.exact:
        _compare_worst(gate, place.exact, f"measured at {rate:g} requests/s", by_share)
    elif place.below and place.above:
        _compare_worst(
            gate,
            place.above,
            f"{rate:g} was not measured: taken at the next rate, {place.above[0].offered_qps:g}",
            by_share,
        )
        gate.measured_qps = place.above[0].offered_qps
        if gate.status == "fail":
            _between(gate, place, rate)
    else:
        _one_sided(gate, place, rate, lambda s: _worst(gate, s)[0])


def _unstable_fails(gate: Gate, place: Place) -> None:
    """An overloaded stage cannot hold an SLO: its attainment only waits for a longer stage."""
    if (
        gate.status == "pass"
        and gate.operator in (">=", ">")
        and any(s.stationarity == "UNSTABLE" for s in place.exact)
    ):
        gate.status = "fail"
        gate.text += "; UNSTABLE: in-flight grows, a longer stage would miss it"


def _between(gate: Gate, place: Place, rate: float) -> None:
    """The upper stage missed the limit and the lower may not: interpolate, linear in the rate."""
    low, _ = _worst(gate, place.below)
    high, _ = _worst(gate, place.above)
    if low is None or high is None or not math.isfinite(high) or not math.isfinite(low):
        return
    x0, x1 = place.below[0].offered_qps, place.above[0].offered_qps
    value = low + (high - low) * (rate - x0) / (x1 - x0)
    gate.measured_qps = rate
    ends = f"{x0:g} ({amount(gate, low)}) and {x1:g} ({amount(gate, high)})"
    _compare(gate, value, f"{rate:g} was not measured: interpolated between {ends}")


def _one_sided(
    gate: Gate, place: Place, rate: float, read: Callable[[tuple[StageAnalysis, ...]], float | None]
) -> None:
    """Only rates on one side were measured. A pass above, or a miss below, decides; nothing else does."""
    side = place.above or place.below
    if not side:
        gate.text = "no valid stage was measured"
        return
    measured = read(side)
    near = gate.measured_qps = side[0].offered_qps
    _compare(gate, measured, f"{rate:g} was not measured; the nearest valid stage is {near:g}")
    decided = "pass" if place.above else "fail"
    # More load makes no latency and no share better; a throughput rises with it, so that one side says nothing.
    monotone = not gate.metric.endswith("_qps")
    if gate.status == decided == "fail" and monotone:
        gate.text = f"a higher rate, such as the target {rate:g}, cannot be better"
    elif gate.status == decided and monotone:
        gate.text = f"{rate:g} was not measured: it lies below {near:g}, and a lower rate cannot be worse"
    elif gate.status != "not_measured":
        gate.status = "not_measured"
        gate.text += ", which does not decide it: measure the target rate itself"


def _worst(gate: Gate, stages: tuple[StageAnalysis, ...]) -> tuple[float | None, str]:
    """The value of the worst repeat, in the sense of the gate's operator, and a note."""
    read = [_read(gate.metric, gate.statistic, s) for s in stages]
    values = [v for v, _ in read if v is not None]
    if len(values) < len(read):
        return None, next(note for v, note in read if v is None)
    return (max(values) if gate.operator in ("<=", "<") else min(values)), ""


def _compare_worst(gate: Gate, stages: tuple[StageAnalysis, ...], how: str, by_share: bool = False) -> None:
    value, note = _worst(gate, stages)
    many = " (worst of the repeats)" if len(stages) > 1 else ""
    if value is None and by_share and _judge_share(gate, stages, how + many, note):
        return
    _compare(gate, value, how + many + (f"; {note}" if note else ""))


def _judge_share(gate: Gate, stages: tuple[StageAnalysis, ...], how: str, note: str) -> bool:
    """Put the share within the limit in the place of a withheld P95; False when a stage has none.

    "P95 <= target" holds exactly when 95 % of all arrivals are within it, also for few arrivals. So the share
    passes the gate; it fails the gate only when its interval lies below 95 %, since few arrivals miss by chance.
    Between the two nothing is measured.
    """
    worst = min((s for s in stages if s.attainment_e2e.value is not None),
                key=lambda s: s.attainment_e2e.value, default=None)  # fmt: skip
    if worst is None or gate.limit is None or any(s.attainment_e2e.value is None for s in stages):
        return False
    interval, within = worst.attainment_e2e, f"within {amount(gate, gate.limit)}"
    share, withheld = interval.value or 0.0, f"P95 itself is withheld ({note})"
    most = interval.high if interval.high is not None else wilson(share * interval.n, interval.n)[1]
    if most >= E2E_SHARE > share:
        gate.measured, gate.status = None, "not_measured"
        gate.text = f"{withheld}; {share:.2%} of {worst.planned} arrivals were {within}, too few to decide on 95 %"
        return True
    gate.metric, gate.statistic, gate.operator, gate.limit, gate.unit = "attainment_e2e", "value", ">=", E2E_SHARE, "1"
    _compare(gate, share, f"{how}; {withheld}, so the share {within} is judged")
    return True


def _read(metric: str, statistic: str, s: StageAnalysis) -> tuple[float | None, str]:
    """One number of one stage, or None with the reason."""
    if metric in LATENCY_METRICS:
        p = s.latency.get(LATENCY_METRICS[metric])
        if p is None:
            return None, "not recorded"
        name = {"max": "maximum"}.get(statistic, statistic)
        value = getattr(p, name, None) if name != "value" else p.mean
        return value, p.withheld.get(name, "not measured")
    if metric == "error_ratio":
        failed = s.planned - s.counts.get("ok", 0)
        return (failed / s.planned if s.planned else None), "no arrivals"
    if metric in ("goodput_qps", "completed_qps"):
        return getattr(s, metric), ""
    if metric.startswith("attainment"):
        clause = metric.removeprefix("attainment").lstrip("_") or "joint"
        return getattr(s, f"attainment_{clause}").value, "no arrivals"
    return None, f"{metric} is not recorded"


def _all_gate(gate: Gate, stages: list[StageAnalysis], by_share: bool) -> None:
    """Every valid stage (`all`), or the whole run (`run`): ramps count here, attainment is pooled over arrivals."""
    measured = tuple(s for s in stages if s.verdict not in ("EMPTY", "INVALID"))
    if not measured:
        gate.text = "no valid stage was measured"
    elif gate.at == "run" and gate.metric.startswith("attainment"):
        clause = gate.metric.removeprefix("attainment").lstrip("_") or "joint"
        _compare(gate, pooled_attainment(measured, clause), "over all arrivals of the run")
    else:
        _compare_worst(gate, measured, "worst over all valid stages", by_share)


def _capacity_gate(gate: Gate, capacity: Capacity) -> None:
    if capacity.knee_kind == "at_least" and gate.operator in (">=", ">"):
        _compare(gate, capacity.knee_low_qps, "every measured rate held the SLO: the knee is at least this")
        if gate.status == "fail":
            gate.status, gate.text = "not_measured", "the highest measured rate lies below the limit and still held"
    elif capacity.knee_kind == "below" and gate.operator in (">=", ">"):
        gate.status = "fail" if (capacity.knee_high_qps or 0) <= (gate.limit or 0) else "not_measured"
        gate.text = "the lowest measured rate missed the SLO"
    else:
        _compare(gate, capacity.knee_qps, capacity.knee_method)


def _first_invalid(stage: StageAnalysis) -> str:
    return next((r.text for r in stage.reasons if r.severity == "invalid"), "see its reasons")
