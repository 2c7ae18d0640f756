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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.intervals import wilson
from analysis.reasons import sentence
from analysis.repeatability import CLOSE_S, statistic_words
from bench.records.analysis import Capacity, Gate, Repeatability, StageAnalysis
from bench.records.sentences import render, said

OPERATORS: dict[str, Callable[[float, float], bool]] = {"<=": op.le, "<": op.lt, ">=": op.ge, ">": op.gt}
LATENCY_METRICS = {"ttft": "ttft_s", "ttfo": "ttfo_s", "tpot": "tpot_s", "e2e": "e2e_s", "residence": "residence_s",
                   "send_lag": "send_lag_s", "itl_p99": "itl_p99_s"}  # fmt: skip
SAME_RATE = 1e-6
Said = dict[str, Any]  # {"code", "params"}, see bench/records/sentences.py
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


def attainment_at(place: Place, qps: float, clause: str = "joint") -> tuple[float | None, Said]:
    """Attainment at a rate, measured or by the interpolation rule, and how it was got."""
    if place.exact:
        return pooled_attainment(place.exact, clause), said("gate.measured", offered_qps=place.exact[0].offered_qps)
    low, high = pooled_attainment(place.below, clause), pooled_attainment(place.above, clause)
    if low is not None and high is not None:
        x0, x1 = place.below[0].offered_qps, place.above[0].offered_qps
        value = low + (high - low) * (qps - x0) / (x1 - x0)
        return value, said("gate.share_between", target_qps=qps, low_qps=x0, low=low, high_qps=x1, high=high)
    return None, said("gate.one_side")


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


def evaluate(
    spec: dict[str, Any], stages: list[StageAnalysis], capacity: Capacity, target_qps: float | None,
    repeats: Sequence[Repeatability] = (),
) -> Gate:  # fmt: skip
    """One gate, measured and compared. `repeats`: what `repeat_spread` reads."""
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
        _say(gate, said("gate.unusable"))
        return gate
    if metric == "knee_qps":
        _capacity_gate(gate, capacity)
    elif at == "target" and target_qps is None:
        _say(gate, said("gate.no_target"))
    elif metric == "repeat_spread":
        _repeat_gate(gate, stages, repeats, target_qps)
    elif at in ("target", "max") or _as_rate(at) is not None:
        rate = target_qps if at == "target" else _as_rate(at)
        if at == "max":
            rate = max((s.offered_qps for s in stages if s.verdict != "EMPTY"), default=None)
        _rate_gate(gate, stages, rate, bool(spec.get("by_share")))
    else:
        _all_gate(gate, stages, bool(spec.get("by_share")))
    return gate


def label(gate: Gate) -> Said:
    """What a gate compares, as a sentence."""
    if gate.metric == "repeat_spread":
        return said("gate.label.repeats")
    if gate.metric == "attainment_e2e":
        return said("gate.label.share")
    if gate.statistic == "value":
        return said("gate.label", metric=gate.metric)
    return said("gate.label.statistic", metric=gate.metric, statistic=gate.statistic)


def amount(gate: Gate, value: float, apart_from: float | None = None) -> Said:
    """A value of the gate's metric with its unit; as many digits as set it apart from another value."""
    share = gate.unit == "1" and (
        gate.metric.startswith("attainment") or gate.metric.endswith("_ratio") or gate.metric == "repeat_spread"
    )
    code = "amount.share" if share else {"s": "amount.s", "1/s": "amount.qps"}.get(gate.unit, "amount")
    scale = 100 if share else 1
    texts = [f"{scale * value:.{digits}g}" for digits in range(4, 10)]
    other = [None if apart_from is None else f"{scale * apart_from:.{digits}g}" for digits in range(4, 10)]
    number = next((mine for mine, theirs in zip(texts, other, strict=True) if mine != theirs), texts[0])
    return said(code, number=number)


def where(gate: Gate, target_qps: float | None) -> Said:
    """Where a gate applies, as a sentence."""
    if gate.at == "target":
        known = target_qps is not None
        return said("gate.where.target_rate", target_qps=target_qps) if known else said("gate.where.target")
    return said(f"gate.where.{gate.at}") if gate.at in ("run", "all", "max") else said("gate.where.rate", at=gate.at)


def besides(how: Said, measured_qps: float | None) -> Said | None:
    """What a gate's text says besides "measured at that rate"; None when that is all."""
    code, params = how["code"], how["params"]
    if not code or (code == "gate.measured" and params["offered_qps"] == measured_qps):
        return None
    if "how" not in params:
        return how
    inner = besides(params["how"], measured_qps)
    if inner is None:
        return {"code": f"{code}.only", "params": {k: v for k, v in params.items() if k != "how"}}
    return {"code": code, "params": {**params, "how": inner}}


def _say(gate: Gate, how: Said) -> None:
    gate.code, gate.params = how["code"], how["params"]
    gate.text = render(gate.code, gate.params)


def _told(gate: Gate) -> Said:
    return {"code": gate.code, "params": gate.params}


def _as_rate(at: Any) -> float | None:
    try:
        return float(at)
    except (TypeError, ValueError):
        return None


def _compare(gate: Gate, measured: float | None, how: Said) -> None:
    gate.measured = measured
    _say(gate, how)
    if measured is None or math.isnan(measured):
        gate.measured, gate.status = None, "not_measured"
        return
    assert gate.limit is not None
    gate.status = "pass" if OPERATORS[gate.operator](measured, gate.limit) else "fail"


def _rate_gate(gate: Gate, stages: list[StageAnalysis], rate: float | None, by_share: bool) -> None:
    if rate is None:
        _say(gate, said("gate.no_stage"))
        return
    place = locate(stages, rate)
    if not place.exact and place.invalid_exact:
        gate.status = "invalid"
        first = place.invalid_exact[0]
        _say(gate, said("gate.invalid", stage_name=first.name, reason=_first_invalid(first)))
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
        _compare_worst(gate, place.exact, said("gate.measured", offered_qps=rate), by_share)
    elif place.below and place.above:
        _compare_worst(
            gate,
            place.above,
            said("gate.next_rate", target_qps=rate, offered_qps=place.above[0].offered_qps),
            by_share,
        )
        gate.measured_qps = place.above[0].offered_qps
        if gate.status == "fail":
            _between(gate, place, rate)
    else:
        _one_sided(gate, place, rate, lambda s: _worst(gate, s)[0])


def _unstable_fails(gate: Gate, place: Place) -> None:
    """An overloaded stage cannot hold an SLO: its attainment only waits for a longer stage."""
    over = [s for s in place.exact if s.stationarity == "UNSTABLE"]
    if gate.status == "pass" and gate.operator in (">=", ">") and over:
        gate.status = "fail"
        why = next((sentence(r) for s in over for r in s.reasons if r.reason_id == "UNSTABLE"), said("gate.grows"))
        _say(gate, said("gate.unstable", how=_told(gate), why=why))


def _between(gate: Gate, place: Place, rate: float) -> None:
    """The upper stage missed the limit and the lower may not: interpolate, linear in the rate."""
    low, _ = _worst(gate, place.below)
    high, _ = _worst(gate, place.above)
    if low is None or high is None or not math.isfinite(high) or not math.isfinite(low):
        return
    x0, x1 = place.below[0].offered_qps, place.above[0].offered_qps
    value = low + (high - low) * (rate - x0) / (x1 - x0)
    gate.measured_qps = rate
    ends = said("gate.between", target_qps=rate, low_qps=x0, low=amount(gate, low), high_qps=x1,
                high=amount(gate, high))  # fmt: skip
    _compare(gate, value, ends)


def _one_sided(
    gate: Gate, place: Place, rate: float, read: Callable[[tuple[StageAnalysis, ...]], float | None]
) -> None:
    """Only rates on one side were measured. A pass above, or a miss below, decides; nothing else does."""
    side = place.above or place.below
    if not side:
        _say(gate, said("gate.no_valid_stage"))
        return
    measured = read(side)
    near = gate.measured_qps = side[0].offered_qps
    _compare(gate, measured, said("gate.nearest", target_qps=rate, offered_qps=near))
    decided = "pass" if place.above else "fail"
    # More load makes no latency and no share better; a throughput rises with it, so that one side says nothing.
    monotone = not gate.metric.endswith("_qps")
    if gate.status == decided == "fail" and monotone:
        _say(gate, said("gate.cannot_be_better", target_qps=rate))
    elif gate.status == decided and monotone:
        _say(gate, said("gate.cannot_be_worse", target_qps=rate, offered_qps=near))
    elif gate.status != "not_measured":
        gate.status = "not_measured"
        _say(gate, said("gate.not_decided", how=_told(gate)))


def _worst(gate: Gate, stages: tuple[StageAnalysis, ...]) -> tuple[float | None, Said]:
    """The value of the worst repeat, in the sense of the gate's operator, and a note."""
    read = [_read(gate.metric, gate.statistic, s) for s in stages]
    values = [v for v, _ in read if v is not None]
    if len(values) < len(read):
        return None, next(note for v, note in read if v is None)
    return (max(values) if gate.operator in ("<=", "<") else min(values)), said("")


def _compare_worst(gate: Gate, stages: tuple[StageAnalysis, ...], how: Said, by_share: bool = False) -> None:
    value, note = _worst(gate, stages)
    how = said("gate.worst", how=how) if len(stages) > 1 else how
    if value is None and by_share and _judge_share(gate, stages, how, note):
        return
    _compare(gate, value, said("gate.noted", how=how, note=note) if note["code"] else how)


def _judge_share(gate: Gate, stages: tuple[StageAnalysis, ...], how: Said, note: Said) -> bool:
    """Put the share within the limit in the place of a withheld P95; False when a stage has none.

    "P95 <= target" holds exactly when 95 % of all arrivals are within it, also for few arrivals. So the share
    passes the gate; it fails the gate only when its interval lies below 95 %, since few arrivals miss by chance.
    Between the two nothing is measured.
    """
    worst = min((s for s in stages if s.attainment_e2e.value is not None),
                key=lambda s: s.attainment_e2e.value, default=None)  # fmt: skip
    if worst is None or gate.limit is None or any(s.attainment_e2e.value is None for s in stages):
        return False
    interval, within = worst.attainment_e2e, amount(gate, gate.limit)
    share = interval.value or 0.0
    most = interval.high if interval.high is not None else wilson(share * interval.n, interval.n)[1]
    if most >= E2E_SHARE > share:
        gate.measured, gate.status = None, "not_measured"
        _say(gate, said("gate.too_few", withheld=note, share=share, planned=worst.planned, limit=within))
        return True
    gate.metric, gate.statistic, gate.operator, gate.limit, gate.unit = "attainment_e2e", "value", ">=", E2E_SHARE, "1"
    _compare(gate, share, said("gate.share", how=how, withheld=note, limit=within))
    return True


def _read(metric: str, statistic: str, s: StageAnalysis) -> tuple[float | None, Said]:
    """One number of one stage, or None with the reason."""
    if metric in LATENCY_METRICS:
        p = s.latency.get(LATENCY_METRICS[metric])
        if p is None:
            return None, said("gate.not_recorded", metric=metric)
        name = {"max": "maximum"}.get(statistic, statistic)
        value = getattr(p, name, None) if name != "value" else p.mean
        why = said("text", text=p.withheld[name]) if name in p.withheld else said("gate.not_measured")
        return value, p.withheld_said.get(name, why)
    if metric == "error_ratio":
        failed = s.planned - s.counts.get("ok", 0)
        return (failed / s.planned if s.planned else None), said("gate.no_arrivals")
    if metric in ("goodput_qps", "completed_qps"):
        return getattr(s, metric), said("")
    if metric.startswith("attainment"):
        clause = metric.removeprefix("attainment").lstrip("_") or "joint"
        return getattr(s, f"attainment_{clause}").value, said("gate.no_arrivals")
    return None, said("gate.not_recorded", metric=metric)


def _all_gate(gate: Gate, stages: list[StageAnalysis], by_share: bool) -> None:
    """Every valid stage (`all`), or the whole run (`run`): ramps count here, attainment is pooled over arrivals."""
    measured = tuple(s for s in stages if s.verdict not in ("EMPTY", "INVALID"))
    if not measured:
        _say(gate, said("gate.no_valid_stage"))
    elif gate.at == "run" and gate.metric.startswith("attainment"):
        clause = gate.metric.removeprefix("attainment").lstrip("_") or "joint"
        _compare(gate, pooled_attainment(measured, clause), said("gate.run"))
    else:
        _compare_worst(gate, measured, said("gate.all"), by_share)


def _capacity_gate(gate: Gate, capacity: Capacity) -> None:
    if capacity.knee_kind == "at_least" and gate.operator in (">=", ">"):
        _compare(gate, capacity.knee_low_qps, said("gate.at_least"))
        if gate.status == "fail":
            gate.status = "not_measured"
            _say(gate, said("gate.at_least_unknown"))
    elif capacity.knee_kind == "below" and gate.operator in (">=", ">"):
        gate.status = "fail" if (capacity.knee_high_qps or 0) <= (gate.limit or 0) else "not_measured"
        _say(gate, said("gate.below"))
    else:
        _compare(gate, capacity.knee_qps, said("text", text=capacity.knee_method))


def _repeat_gate(
    gate: Gate, stages: list[StageAnalysis], repeats: Sequence[Repeatability], target_qps: float | None
) -> None:
    """The widest spread of the repeats at the gate's rates; what lies beyond capacity is unstable and fails nothing."""
    rate = target_qps if gate.at == "target" else _as_rate(gate.at)
    if gate.at == "max":
        rate = max((s.offered_qps for s in stages if s.verdict != "EMPTY"), default=None)
    mine = [r for r in repeats if rate is None or abs(r.offered_qps - rate) <= SAME_RATE * max(rate, 1.0)]
    known = [r for r in mine if r.range_ratio is not None]
    if not known:
        first = next((r for r in mine if r.unstable), mine[0] if mine else None)
        if first is None:
            _say(gate, said("gate.repeats.none"))
        elif first.unstable:
            _say(gate, said("gate.repeats.unstable", offered_qps=first.offered_qps))
        else:
            _say(gate, said("gate.repeats.few", valid=first.valid, repeats=first.repeats,
                            offered_qps=first.offered_qps))  # fmt: skip
        return
    # a spread below the clock's resolution is no spread, whatever its ratio
    loud = [r for r in known if max(r.values) - min(r.values) >= CLOSE_S] or known
    worst = max(loud, key=lambda r: r.range_ratio or 0.0)
    how = said("gate.repeats", statistic=statistic_words(worst.statistic), runs=len(worst.values),
               offered_qps=worst.offered_qps)  # fmt: skip
    gate.measured_qps = worst.offered_qps
    _compare(gate, worst.range_ratio, how)
    if gate.status == "fail" and loud is known and max(worst.values) - min(worst.values) < CLOSE_S:
        gate.status = "pass"
        _say(gate, said("gate.repeats.close", how=how))


def _first_invalid(stage: StageAnalysis) -> Said:
    first = next((r for r in stage.reasons if r.severity == "invalid"), None)
    return said("gate.see_reasons") if first is None else sentence(first)
