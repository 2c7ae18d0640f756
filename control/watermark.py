"""From a measured knee to settings of production: safe rate, instances, batch limits, queue limits.

Input: `Facts` of a run (knee, step law, lengths, waits), a target rate, the dispersion of a trace. Output: `Line`s,
each a value with its formula and the numbers that went in.
Does not: read files, fit, or change anything.

1. The safe rate is 70-80 % of the LOWER bound of the knee; a trace that bursts more than the load of the run did
   lowers it further, nothing raises it.
2. A limit is the smallest of its candidates, and every candidate is shown. A value that the run did not cover is no
   candidate: larger batches than measured would void the knee.
3. Absent facts make a line absent (value None) with a note, never a guess.

Symbols: K lower bound of the knee, lambda rate, W residence, L = lambda W (Little), X departures at full batch,
T(n) = alpha + (beta + kv c) n seconds of a decode step with n sequences of mean context c, gamma seconds per prompt
token, B tokens of a step, P and O mean prompt and output tokens, C those of P that came from the service's cache.
Source: reference method section 6; docs/production.md; vLLM's rule queued tokens = target TTFT x prefill rate.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from control.admission import SURE_SD

SAFE_LOW, SAFE_HIGH = 0.70, 0.80
BURST_Z = 2.326  # 99 of 100 intervals stay below mean + z sd
MIN_KV_HEADROOM = 1.0


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a step: alpha + (beta + kv c) n + gamma p for n sequences of context c and p prompt tokens."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    kv_s: float = 0.0

    def decode_s(self, n: float, context: float) -> float:
        """Seconds of a pure decode step."""
        return self.alpha_s + (self.beta_s + self.kv_s * context) * n


@dataclass(frozen=True, slots=True)
class Facts:
    """What a run says. Rates are of the whole service under test, limits of one of its replicas."""

    knee_low_qps: float
    ttft_deadline_s: float
    tpot_deadline_s: float
    attainment_target: float
    max_num_seqs: int
    batch_size_cap: int
    max_num_batched_tokens: int
    input_mean: float
    output_mean: float
    input_p95: float
    context_mean: float
    cached_mean: float = 0.0  # prompt tokens that the service took from its cache: context, no prefill work
    replicas: int = 1
    replicas_known: bool = True
    lambda_max_qps: float | None = None
    law: StepLaw | None = None
    residence: tuple[tuple[float, float], ...] = ()  # (rate, mean residence in s) of stages that held
    kv_tokens: int | None = None  # room of one replica
    kv_reserve_ratio: float = 0.85
    run_dispersion: float = 1.0  # variance / mean of counts of the load that the knee was measured with


@dataclass(frozen=True, slots=True)
class Burst:
    """Dispersion of a trace: variance / mean of the counts in intervals of one length."""

    interval_s: float
    dispersion: float
    intervals: int


@dataclass(frozen=True, slots=True)
class Line:
    """One result: value None = could not be derived, `note` says why."""

    key: str
    value: float | None
    unit: str
    formula: str
    numbers: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """All lines, and the settings among them by config key."""

    lines: list[Line]
    settings: dict[str, float | int | bool] = field(default_factory=dict)

    def line(self, key: str) -> Line:
        """The line of a key."""
        return next(line for line in self.lines if line.key == key)


def dispersion(times_s: Sequence[float], span_s: float, interval_s: float) -> Burst | None:
    """Variance / mean of the counts per interval over [0, span); None with fewer than 10 whole intervals."""
    n = int(span_s // interval_s)
    if n < 10:
        return None
    counts = [0] * n
    for t in times_s:
        place = int(t // interval_s)
        if place < n:
            counts[place] += 1
    mean = sum(counts) / n
    if mean <= 0:
        return None
    return Burst(interval_s, sum((c - mean) ** 2 for c in counts) / (n - 1) / mean, n)


def burst_rate_qps(limit_qps: float, excess: float, interval_s: float, z: float = BURST_Z) -> float:
    """The mean rate whose bursts stay below the limit: lambda + z sqrt(I lambda / w) = limit, solved for lambda.

    `excess` is I: dispersion beyond that of the load which the limit was measured with; w the interval in s.
    """
    b = z * math.sqrt(max(0.0, excess) / interval_s)
    return ((math.sqrt(b * b + 4.0 * limit_qps) - b) / 2.0) ** 2


def residence_at_s(points: Sequence[tuple[float, float]], qps: float) -> float | None:
    """Mean residence at a rate, linear between measured rates, the nearest one outside; None without points."""
    if not points:
        return None
    points = sorted(points)
    if qps <= points[0][0]:
        return points[0][1]
    for (q0, w0), (q1, w1) in zip(points, points[1:], strict=False):
        if qps <= q1:
            return w0 + (w1 - w0) * (qps - q0) / (q1 - q0) if q1 > q0 else max(w0, w1)
    return points[-1][1]


def make_plan(facts: Facts, *, target_qps: float | None = None, growth: float = 0.0,
              bursts: Sequence[Burst] = ()) -> CapacityPlan:
    """The safe rate, the instances for a target rate grown by `growth` (0.3 = 30 % more), and all limits."""
    lines = _rates(facts, bursts)
    safe = lines[-1].value
    assert safe is not None
    lines += _instances(facts, safe, target_qps, growth)
    settings: dict[str, float | int | bool] = {"admission.reject_on_budget_exceed": True}
    for key, line in (
        ("scheduler.max_num_seqs", _max_num_seqs(facts, safe)),
        ("scheduler.batch_size_cap", None),
        ("scheduler.max_num_batched_tokens", None),
        ("admission.max_num_queued_reqs", _queued_reqs(facts)),
        ("admission.max_num_queued_tokens", _queued_tokens(facts)),
    ):
        if key == "scheduler.batch_size_cap":
            line = _batch_size_cap(facts, safe, int(settings["scheduler.max_num_seqs"]))
        elif key == "scheduler.max_num_batched_tokens":
            line = _step_tokens(facts, int(settings["scheduler.max_num_seqs"]))
        assert line is not None
        lines.append(line)
        if line.value is not None:
            settings[key] = int(line.value)
    lines.append(_hold(facts, safe))
    return CapacityPlan(lines, settings)


def without_limits(plan: CapacityPlan, why: str) -> CapacityPlan:
    """The plan without batch and queue limits, where it is not known what the service runs with."""
    own = ("max_num_seqs", "batch_size_cap", "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens")
    lines = [Line(x.key, None, x.unit, "not known", "", why) if x.key in own else x for x in plan.lines]
    return CapacityPlan(lines, {})


def _rates(f: Facts, bursts: Sequence[Burst]) -> list[Line]:
    k = f.knee_low_qps
    lines = [
        Line("safe_low_qps", SAFE_LOW * k, "1/s", "0.70 K", f"0.70 x {k:.4g}"),
        Line("safe_high_qps", SAFE_HIGH * k, "1/s", "0.80 K", f"0.80 x {k:.4g}"),
    ]
    rate, why, note = SAFE_HIGH * k, f"0.80 x {k:.4g}; no trace was given, so no burst is reckoned with", ""
    if bursts:
        rates = [(burst_rate_qps(k, b.dispersion - f.run_dispersion, b.interval_s), b) for b in bursts]
        worst, burst = min(rates, key=lambda item: item[0])
        lines.append(Line(
            "burst_qps", worst, "1/s", "lambda + z sqrt((I - I_run) lambda / w) = K, for the worst interval w",
            f"I = {burst.dispersion:.3g} in intervals of {burst.interval_s:g} s ({burst.intervals} of them), I_run = "
            f"{f.run_dispersion:.3g}, z = {BURST_Z}, K = {k:.4g}",
        ))
        rate, why = min(rate, worst), f"min({SAFE_HIGH * k:.4g}, {worst:.4g})"
        if worst < SAFE_LOW * k:
            note = "the trace bursts more than 70-80 % of the knee leaves room for"
    return [*lines, Line("watermark_qps", rate, "1/s", "min(0.80 K, burst_qps)", why, note)]


def _instances(f: Facts, safe: float, target: float | None, growth: float) -> list[Line]:
    w = residence_at_s(f.residence, safe)
    if w is None:
        lines = [Line("in_flight_per_instance", None, "requests", "L = lambda W", "", "no stage held the SLO")]
    else:
        lines = [Line("in_flight_per_instance", safe * w, "requests", "L = lambda W (Little)",
                      f"{safe:.4g}/s x {w:.4g} s")]
    if target is None:
        return lines
    grown = target * (1.0 + growth)
    if w is None:
        count = math.ceil(grown / safe - 1e-9)
        return [*lines, Line("instances", count, "", "ceil(lambda_target / watermark)", f"{grown:.4g} / {safe:.4g}")]
    total, one = grown * w, safe * w
    count = math.ceil(total / one - 1e-9)
    lines.append(Line("in_flight_total", total, "requests", "L = lambda_target (1 + growth) W",
                      f"{target:.4g}/s x {1 + growth:.3g} x {w:.4g} s"))
    lines.append(Line(
        "instances", count, "", "ceil(L_total / L_instance)", f"{total:.4g} / {one:.4g} = {total / one:.3f}",
        f"one instance is the whole service of the run{_replicas(f)}; add one to survive the loss of one",
    ))
    lines.append(Line("load_per_instance_ratio", grown / count / f.knee_low_qps, "of K", "lambda_target / n / K",
                      f"{grown:.4g} / {count} / {f.knee_low_qps:.4g}"))
    return lines


def _replicas(f: Facts) -> str:
    """How many replicas the service of the run had; empty when nobody has said it."""
    if not f.replicas_known:
        return ""
    return " (1 replica)" if f.replicas == 1 else f" ({f.replicas} replicas)"


def _smallest(key: str, unit: str, candidates: list[tuple[str, float, str]], note: str = "") -> Line:
    """The line of the smallest candidate (name of formula, value, numbers); all are shown."""
    least = min(candidates, key=lambda c: c[1])
    shown = "; ".join(f"{name} = {math.floor(value)} ({numbers})" for name, value, numbers in candidates)
    return Line(key, max(1, math.floor(least[1] + 1e-9)), unit, "min over candidates: " + least[0] + " binds", shown,
                note)


def _max_num_seqs(f: Facts, safe: float) -> Line:
    found: list[tuple[str, float, str]] = [("measured", f.max_num_seqs, "the knee was measured with it")]
    if f.law is not None:
        busy = safe / f.replicas * f.law.gamma_s * max(0.0, f.input_mean - f.cached_mean)
        room = f.tpot_deadline_s * max(0.0, 1.0 - busy) - f.law.alpha_s
        cost = f.law.beta_s + f.law.kv_s * f.context_mean
        if cost > 0:
            found.append((
                f"TPOT: (D (1 - lambda gamma {'(P - C)' if f.cached_mean else 'P'}) - alpha) / (beta + kv c)",
                room / cost,
                f"({f.tpot_deadline_s:.3g} x (1 - {busy:.3g}) - {f.law.alpha_s:.3g}) / {cost:.3g}",
            ))
    if f.kv_tokens is not None:
        need = f.input_mean + f.output_mean
        found.append(("memory: ratio x KV tokens / (P + O)", f.kv_reserve_ratio * f.kv_tokens / need,
                      f"{f.kv_reserve_ratio:g} x {f.kv_tokens} / {need:.4g}"))
    return _smallest("max_num_seqs", "sequences", found)


def _batch_size_cap(f: Facts, safe: float, seqs: int) -> Line:
    found: list[tuple[str, float, str]] = [
        ("max_num_seqs", seqs, "no more can run"), ("measured", f.batch_size_cap, "the knee was measured with it"),
    ]
    w = residence_at_s(f.residence, safe)
    note = ""
    if w is not None:
        level = safe / f.replicas * w
        note = (f"at the watermark {level:.3g} run on average (Little), {level + 3 * math.sqrt(level):.3g} in one of "
                "700 moments (Poisson, 3 sd); a cap below that would queue at the safe rate")
    return _smallest("batch_size_cap", "sequences", found, note)


def _step_tokens(f: Facts, seqs: int) -> Line:
    found: list[tuple[str, float, str]] = [("measured", f.max_num_batched_tokens, "the knee was measured with it")]
    note = ""
    if f.law is not None and f.law.gamma_s > 0:
        decode = f.law.decode_s(seqs, f.context_mean)
        value = seqs + (f.tpot_deadline_s - decode) / f.law.gamma_s
        found.append(("gap: n + (D_tpot - T(n)) / gamma", max(value, seqs + 1.0),
                      f"{seqs} + ({f.tpot_deadline_s:.3g} - {decode:.3g}) / {f.law.gamma_s:.3g}"))
        full = decode + (f.max_num_batched_tokens - seqs) * f.law.gamma_s
        note = (f"a full step of {f.max_num_batched_tokens} tokens takes {full * 1e3:.0f} ms: the longest gap between "
                "tokens")
    return _smallest("max_num_batched_tokens", "tokens", found, note)


def _wait_s(f: Facts) -> tuple[float, str]:
    """Seconds that a request may wait in the queue: deadline less one full step and a long prompt's own prefill."""
    if f.law is None:
        return f.ttft_deadline_s, f"{f.ttft_deadline_s:.3g}"
    step = f.law.decode_s(f.max_num_seqs, f.context_mean)
    own = f.input_p95 * f.law.gamma_s
    return max(0.0, f.ttft_deadline_s - step - own), f"({f.ttft_deadline_s:.3g} - {step:.3g} - {own:.3g})"


def _departures(f: Facts) -> tuple[float, str]:
    """Requests per second that one replica finishes when it is full."""
    if f.lambda_max_qps is not None:
        return f.lambda_max_qps / f.replicas, f"{f.lambda_max_qps:.4g} / {f.replicas}"
    return f.knee_low_qps / f.replicas, f"{f.knee_low_qps:.4g} / {f.replicas} (K: lambda_max is not known)"


def _queued_reqs(f: Facts) -> Line:
    wait, w_text = _wait_s(f)
    rate, r_text = _departures(f)
    return Line("max_num_queued_reqs", max(1, math.floor(_sure_queue(wait * rate))), "requests",
                "N + z sqrt(N) = (D_ttft - T(n) - gamma P95) x X",
                f"{w_text} s x {r_text}/s = {wait * rate:.4g}, z = {SURE_SD:g}",
                "per replica; of those that join last 19 in 20 still have their first token in time")


def _sure_queue(departures: float) -> float:
    """N with N + z sqrt(N) = departures: past capacity the queue is always full, so the last place must be safe too.

    The time of N departures of many independent sequences has a standard deviation of sqrt(N) departure times.
    """
    return ((math.sqrt(SURE_SD * SURE_SD + 4.0 * departures) - SURE_SD) / 2.0) ** 2


def _queued_tokens(f: Facts) -> Line:
    wait, w_text = _wait_s(f)
    rate, r_text = _departures(f)
    places = max(1.0, _sure_queue(wait * rate))
    found = [("slots: N P95", places * f.input_p95, f"{places:.4g} x {f.input_p95:.4g}")]
    if f.law is not None and f.law.gamma_s > 0:
        n, b = f.max_num_seqs, f.max_num_batched_tokens
        step = f.law.decode_s(n, f.context_mean) + (b - n) * f.law.gamma_s
        prefill = (b - n) / step if b > n else 1.0 / f.law.gamma_s
        found.append(("prefill: (D_ttft - ...) R", wait * prefill, f"{w_text} s x {prefill:.5g} tokens/s"))
    line = _smallest("max_num_queued_tokens", "tokens", found)
    floor = math.ceil(f.input_p95)
    if line.value is not None and line.value < floor:
        return Line(line.key, floor, line.unit, line.formula, line.numbers,
                    f"raised to {floor}: a prompt of P95 length must be able to wait")
    return line


def _hold(f: Facts, safe: float) -> Line:
    """How long the hold shape must run to prove the watermark: 3 / (1 - a) arrivals without a miss prove a at 95 %."""
    allowed = 1.0 - f.attainment_target
    need = 10.0 * 3.0 / allowed  # ten times that leaves room for misses in a stage that does hold
    return Line("hold_s", math.ceil(need / safe), "s", "10 x 3 / (1 - a) / watermark",
                f"10 x 3 / {allowed:.3g} / {safe:.4g}",
                "3 / (1 - a) arrivals without any miss prove attainment a at 95 %; ten times that allows some")


# Options by engine, as (option, keys whose values add up); None: the engine has none. Checked against the sources and
# pages of: vLLM 0.33 (--max-num-active-seqs since 0.31, --max-num-queued-* since 0.29), SGLang 0.5 (server arguments),
# TensorRT-LLM 1.x (trtllm-serve), llama.cpp 0.5 (llama-server). vLLM counts waiting AND running requests against
# --max-num-queued-reqs.
FLAGS: dict[str, dict[str, tuple[str, tuple[str, ...]] | None]] = {
    "vllm": {
        "max_num_seqs": ("--max-num-seqs", ("max_num_seqs",)),
        "max_num_batched_tokens": ("--max-num-batched-tokens", ("max_num_batched_tokens",)),
        "batch_size_cap": ("--max-num-active-seqs", ("batch_size_cap",)),
        "max_num_queued_reqs": ("--max-num-queued-reqs", ("batch_size_cap", "max_num_queued_reqs")),
        "max_num_queued_tokens": ("--max-num-queued-tokens", ("max_num_queued_tokens",)),
    },
    "sglang": {
        "batch_size_cap": ("--max-running-requests", ("batch_size_cap",)),
        "max_num_batched_tokens": ("--chunked-prefill-size", ("max_num_batched_tokens",)),
        "max_num_queued_reqs": ("--max-queued-requests", ("max_num_queued_reqs",)),
        "max_num_queued_tokens": None,
    },
    "tensorrt-llm": {
        "batch_size_cap": ("--max_batch_size", ("batch_size_cap",)),
        # Without chunks a prompt longer than the step's tokens is refused.
        "max_num_batched_tokens": ("--enable_chunked_prefill --max_num_tokens", ("max_num_batched_tokens",)),
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
    },
    "llama.cpp": {
        "batch_size_cap": ("--parallel", ("batch_size_cap",)),
        "max_num_batched_tokens": ("--batch-size", ("max_num_batched_tokens",)),
        "max_num_queued_reqs": None,
        "max_num_queued_tokens": None,
    },
}


def engine_flags(plan: CapacityPlan) -> dict[str, tuple[str, list[str]]]:
    """Per engine: its command-line options, and the limits it has no option for (keep those in the gateway)."""
    values = {line.key: line.value for line in plan.lines}
    found: dict[str, tuple[str, list[str]]] = {}
    for engine, options in FLAGS.items() if plan.settings else ():
        parts, missing = [], []
        for key, option in options.items():
            if option is None:
                missing.append(key)
                continue
            told = [values[name] for name in option[1]]
            if None not in told:
                parts.append(f"{option[0]} {sum(int(value or 0) for value in told)}")
        found[engine] = (" ".join(parts), missing)
    return found
