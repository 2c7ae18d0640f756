"""Hand-made analyses for the report's tests: each is a whole `Analysis`, built without `analysis/`.

`sweep()` is a closed-form system with a knee: service time 1/44 s per slot
of a 10-wide server, so delay grows like rho/(1 - rho) below 22 requests/s and
without bound above it. The numbers are consistent with each other (L = lambda*W,
attainment = counts over planned), not realistic to the last digit.
"""

from __future__ import annotations

import math
from typing import Any

from bench.records.analysis import (
    SCHEMA_VERSION,
    Analysis,
    Capacity,
    ErrorGroup,
    Gate,
    Interval,
    Little,
    Percentiles,
    Reason,
    Repeatability,
    StageAnalysis,
    Stimulus,
    Verdict,
)

TARGET = 0.99
SLO = {"ttft_deadline_s": 0.8, "tpot_deadline_s": 0.1, "e2e_target_s": 60.0, "attainment_target": TARGET}
MU_QPS = 24.0
WINDOW_S = 60.0
STAGE_S = 75.0
HOSTILE = "upstream said <script>alert(1)</script></script><img src=x onerror=alert(2)> & \"quoted\" 'text'"


def wilson(hits: int, n: int) -> Interval:
    """Wilson 95 % interval, written out (z = 1.96)."""
    if n == 0:
        return Interval(None, None, None, 0.95, "Wilson", 0)
    z, p = 1.96, hits / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(p, max(0.0, middle - half), min(1.0, middle + half), 0.95, "Wilson", n)


def percentiles(median_s: float, spread: float, n: int, finished: float = 1.0) -> Percentiles:
    """Lognormal quantiles with +inf for the share that never finished."""

    def at(share: float) -> float:
        if share > finished:
            return math.inf
        z = {0.5: 0.0, 0.9: 1.2816, 0.95: 1.6449, 0.99: 2.3263}[share]
        return median_s * math.exp(spread * z)

    withheld = {} if n >= 1000 else {"p99": f"needs 1,000 samples, this stage has n = {n}"}
    return Percentiles(
        n=n,
        mean=median_s * math.exp(spread**2 / 2) if finished == 1 else math.inf,
        p50=at(0.5),
        p90=at(0.9),
        p95=at(0.95),
        p99=at(0.99),
        maximum=at(0.99) * 1.4 if finished == 1 else math.inf,
        withheld=withheld,
        p95_low=at(0.95) * 0.93 if finished >= 0.95 else None,
        p95_high=at(0.95) * 1.08 if finished >= 0.95 else None,
        interval_method="order statistics",
        effective_n=n * 0.6,
        interval_reliable=n >= 200,
    )


def ecdf(p: Percentiles, spread: float, finished: float) -> list[list[float]]:
    """Sixty points of the lognormal distribution function, plateau at `finished`."""
    points = []
    for i in range(61):
        z = -3 + i * 0.1
        share = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        points.append([round((p.p50 or 0.1) * math.exp(spread * z), 5), round(share * finished, 5)])
    return points


def stage(index: int, qps: float, repeat: int = 0, *, wobble: float = 0.0) -> StageAnalysis:
    """One stage of the closed-form system at `qps`."""
    n = int(qps * WINDOW_S)
    rho = qps / MU_QPS
    over = rho >= 1
    wait = 0.04 * rho / (1 - rho) if rho < 0.97 else 0.04 * 32 + max(0.0, rho - 0.97) * 12
    ttft_median = (0.12 + wait) * (1 + wobble)
    tpot_median = 0.021 + 0.02 * min(rho, 1.2) ** 2
    finished = 1.0 if rho < 1.2 else max(0.55, 1 - (rho - 1.2) * 0.9)
    ttft_spread, tpot_spread = (0.35 if not over else 0.6), 0.18
    miss_ttft = 0.5 * (1 - math.erf((math.log(0.8) - math.log(ttft_median)) / ttft_spread / math.sqrt(2)))
    miss_ttft = miss_ttft * (0.6 if rho < 0.95 else 1)
    miss_tpot = 0.5 * (1 - math.erf((math.log(0.1) - math.log(tpot_median)) / tpot_spread / math.sqrt(2)))
    ok = int(n * finished)
    rejected, errors = int((n - ok) * 0.7), 0
    timeout = n - ok - rejected
    if index == 2:
        errors, ok = 3, ok - 3
    hits_ttft = round(ok * (1 - miss_ttft))
    hits_joint = round(ok * (1 - miss_ttft) * (1 - miss_tpot))
    ttft = percentiles(ttft_median, ttft_spread, n, finished)
    tpot = percentiles(tpot_median, tpot_spread, n, finished)
    tokens = 320
    e2e_median = ttft_median + tokens * tpot_median
    e2e = percentiles(e2e_median, 0.5, n, finished)
    residence = e2e_median * 1.1
    throughput = qps if not over else MU_QPS
    in_flight = min(qps, MU_QPS * 1.4) * residence
    gap = 0.01 + 0.03 * math.sin(index * 2.1) if not over else 0.26 + 0.02 * index
    verdict = "MET" if hits_joint / n >= TARGET else "NOT_MET"
    start = index * STAGE_S
    reasons: list[Reason] = []
    if over:
        reasons.append(
            Reason(
                "STG-UNSTABLE",
                "warn",
                f"in-flight grows by {qps - MU_QPS:.1f} per second: overload",
                "read this stage as a finding, not as a steady state",
                index,
                qps - MU_QPS,
                0.5,
            )
        )
    out = StageAnalysis(
        stage=index,
        repeat=repeat,
        name=f"{index:02d} chat @{qps:g}",
        offered_qps=qps,
        process="poisson",
        window_s=WINDOW_S,
        planned=n,
        counts={"ok": ok, "rejected": rejected, "error": errors, "timeout": timeout, "truncated": 0, "unsent": 0},
        arrival_qps=qps * (1 + 0.004 * math.sin(index)),
        completed_qps=min(throughput, ok / WINDOW_S),
        goodput_qps=hits_joint / WINDOW_S,
        output_tps=min(throughput, ok / WINDOW_S) * tokens,
        latency={
            "ttft_s": ttft,
            "tpot_s": tpot,
            "e2e_s": e2e,
            "residence_s": percentiles(residence, 0.5, n, finished),
            "send_lag_s": percentiles(0.0006, 0.5, n),
        },
        survivors={
            "ttft_s": percentiles(ttft_median, ttft_spread, max(ok, 1)),
            "tpot_s": percentiles(tpot_median, tpot_spread, max(ok, 1)),
            "e2e_s": percentiles(e2e_median, 0.5, max(ok, 1)),
        },
        attainment_ttft=wilson(hits_ttft, n),
        attainment_tpot=wilson(int(ok * (1 - miss_tpot)), n),
        attainment_joint=wilson(hits_joint, n),
        attainment_e2e=wilson(ok, n),
        attainment_low=hits_joint / n,
        attainment_high=min(1.0, (hits_joint + timeout) / n),
        attainment_survivors=hits_joint / ok if ok else None,
        binding_clause="ttft" if miss_ttft > 0.001 else "none",
        verdict=verdict,
        stationarity="UNSTABLE" if over else ("SUSPECT" if rho > 0.9 else "STABLE"),
        in_flight_growth_qps=max(0.0, qps - MU_QPS) if over else 0.02,
        little=Little(
            arrival_qps=qps,
            residence_mean_s=residence,
            in_flight_mean_integral=in_flight,
            in_flight_mean_gauge=in_flight * (1 + gap),
            in_flight_mean_server=in_flight * (1 + gap * 0.8),
            lambda_w=in_flight,
            gap_ratio_gauge=gap,
            gap_ratio_server=gap * 0.8,
            identity_residual=0.0004,
            edge_start_s=11.0,
            edge_end_s=13.0,
            gauge_samples=600,
            ok=abs(gap) <= 0.2,
            note="" if abs(gap) <= 0.2 else "not stationary: the law needs a steady window",
        ),
        stimulus=Stimulus(
            planned=n,
            sent=n,
            planned_qps=qps,
            delivered_qps=qps * (1 + 0.004 * math.sin(index)),
            rate_error_ratio=0.004 * math.sin(index),
            gap_cv=1.0 + 0.02 * math.cos(index),
            dispersion=1.04,
            ks_p=0.41,
            send_lag_p50_s=0.0006,
            send_lag_p99_s=0.0021,
            loop_lag_p99_s=0.004,
            client_cpu_max_ratio=0.2 + qps / 120,
            ok=True,
        ),
        reasons=reasons,
        flags={"first_read_bound": 0.01},
        marks=[],
        ecdf_ttft=ecdf(ttft, ttft_spread, finished),
        ecdf_tpot=ecdf(tpot, tpot_spread, finished),
        drain_s=3.2 if not over else 12.5,
        warmup_suggested_s=6.0,
    )
    for name, value in (
        ("start_s", start),
        ("window_start_s", start + 10),
        ("window_end_s", start + 10 + WINDOW_S),
        ("end_s", start + 10 + WINDOW_S),
    ):
        if name in StageAnalysis.__dataclass_fields__:
            setattr(out, name, value)
    return out


def heatmap(stages: list[StageAnalysis]) -> dict[str, Any]:
    """Counts of arrivals by time and latency, one row of +inf on top."""
    t_edges = [i * STAGE_S * len(stages) / 60 for i in range(61)]
    e_edges: list[float] = [0.5 * 1.25**i for i in range(24)] + [math.inf]
    counts = []
    for i in range(60):
        s = stages[min(len(stages) - 1, int(i * len(stages) / 60))]
        median = s.latency["e2e_s"].p50 or 1.0
        total = s.planned / max(1, 60 / len(stages))
        row = []
        for j in range(23):
            mid = math.sqrt(e_edges[j] * e_edges[j + 1])
            z = math.log(mid / median) / 0.5 if math.isfinite(median) else 9
            row.append(round(total * 0.4 * math.exp(-z * z / 2)))
        row.append(int(total * (1 - s.counts.get("ok", 0) / max(1, s.planned))))
        counts.append(row)
    return {"t_s": t_edges, "e2e_s": e_edges, "counts": counts}


def in_flight_series(stages: list[StageAnalysis]) -> list[list[float]]:
    """A ramp to each stage's level with a ripple, 100 points a stage, then a drain."""
    points = []
    for k, s in enumerate(stages):
        level = s.little.in_flight_mean_integral or 0.0
        for i in range(100):
            x = i / 100
            rise = min(1.0, x * 8) if x < 0.93 else max(0.0, (1 - x) / 0.07)
            grow = 1 + (0.5 * x if s.stationarity == "UNSTABLE" else 0)
            points.append([round((k + x) * STAGE_S, 2), round(level * rise * grow * (1 + 0.06 * math.sin(i)), 1)])
    return points


def points(stages: list[StageAnalysis]) -> dict[str, Any]:
    """Twenty arrivals of each stage: every tenth was rejected, and a fifth of the others was late at 30/s and more."""
    columns: dict[str, list[Any]] = {k: [] for k in ("stage", "outcome", "input_tokens", "output_tokens", "ttft_s", "e2e_s")}
    for s in stages:
        for i in range(20):
            outcome = "rejected" if i % 10 == 9 else "missed" if s.offered_qps >= 30 and i % 5 == 0 else "met"
            ended = outcome != "rejected"
            row = (s.stage, outcome, 100 + 45 * i, 10 + 15 * i if ended else None,
                   (0.02 + 0.001 * i) * (60 if outcome == "missed" else 1) if ended else None,
                   1.5 + 0.1 * i if ended else None)  # fmt: skip
            for values, value in zip(columns.values(), row, strict=True):
                values.append(value)
    count = {o: columns["outcome"].count(o) for o in ("met", "missed", "rejected")}
    edges = {"low": 100, "high": 505, "n": 90}, {"low": 550, "high": 955, "n": 90}
    bins = [{**e, "p50_s": 0.03 + 0.01 * k, "p95_s": math.inf, "missed": 12} for k, e in enumerate(edges)]
    return {
        "limit": 1500,
        "arrivals": 3 * len(columns["stage"]),
        "outcomes": {o: [n, n if o != "met" else n + 2 * len(columns["stage"])] for o, n in count.items() if n},
        **columns,
        "bins": {"input_ttft": bins, "output_e2e": bins},
    }


def server(stages: list[StageAnalysis]) -> dict[str, Any]:
    """A service that agrees with us within 1 ms, queues at 30/s and more, and preempts three times."""
    t = [float(5 * k) for k in range(int(STAGE_S * len(stages) / 5))]
    busy = [stages[min(int(x // STAGE_S), len(stages) - 1)].offered_qps for x in t]
    return {
        "samples": len(t),
        "series": {
            "t_s": t,
            "running": [min(q, 30.0) for q in busy],
            "waiting": [max(q - 30.0, 0.0) for q in busy],
            "kv_usage": [q / 50 for q in busy],
            "preemptions": [None] + [3.0 if k == len(t) - 2 else 0.0 for k in range(1, len(t))],
        },
        "stages": [
            {"stage": s.stage, "repeat": s.repeat, "samples": 15, "running_mean": s.offered_qps, "waiting_mean": 0.5,
             "kv_mean_ratio": 0.4, "kv_max_ratio": 0.8, "preemptions": 0.0, "server_ttft_mean_s": 0.040,
             "server_ttft_n": 300, "client_ttft_mean_s": 0.041, "client_ttft_n": 300, "server_queue_mean_s": 0.01,
             "in_flight_mean_client": 1.0}
            for s in stages
        ],
    }  # fmt: skip


def comparison(outcome: str = "worse") -> dict[str, Any]:
    """The content of a compare.json: two rates, one number worse, and an endless p95 in the baseline's second."""
    def side(name: str, share: float, p95: Any) -> dict[str, Any]:
        curve = [
            {"offered_qps": q, "repeat": 0, "stable": True, "attainment": a, "attainment_low": a - 0.02,
             "attainment_high": min(1.0, a + 0.02), "ttft_p95_s": p, "ttft_p95_low_s": 0.03, "ttft_p95_high_s": 0.09}
            for q, a, p in ((5.0, 1.0, 0.05), (10.0, share, p95))
        ]  # fmt: skip
        return {"run_id": name, "path": f"runs/{name}", "started_utc": "2026-11-29T10:15:00+00:00", "model": "m",
                "tool_version": "0.1.0", "verdict": "PASS", "schedule_hash": "ab" * 32, "knee_qps": 20.96,
                "curve": curve}  # fmt: skip

    def change(qps: float, metric: str, statistic: str, effect: Any, word: str) -> dict[str, Any]:
        share = metric == "attainment"
        return {"offered_qps": qps, "metric": metric, "statistic": statistic, "unit": "1" if share else "s",
                "base": 1.0 if share else 0.05, "new": 0.9 if share else 0.2, "effect": effect,
                "low": None if effect is None else effect - 0.02, "high": None if effect is None else effect + 0.02,
                "noise_floor": 0.01, "outcome": word, "base_n": 300, "new_n": 300, "method": "", "note": ""}  # fmt: skip

    word = outcome if outcome in ("worse", "better") else "no clear change"
    return {
        "schema_version": 1, "base": side("base", 1.0, "inf"), "new": side("new", 0.9, 0.2), "outcome": word,
        "exit_code": 5 if word == "worse" else 0, "sentence": "One number.", "tolerance": 0.1, "level": 0.95,
        "level_each": 0.99, "differences": [], "left_out": ["new: 02 @20 is INVALID"],
        "notes": ["neither run repeats a rate, so the noise between runs is unknown"],
        "counts": {"rates": 2, "rates_not_compared": 0, "numbers": 3, "worse": int(word == "worse"),
                   "better": int(word == "better"), "no_clear_change": 2 + (word == "no clear change"),
                   "not_compared": 1},
        "not_compared": [{"rates": [10.0], "numbers": ["E2E p95"], "reason": "no answer has this latency"}],
        "changes": [
            change(5.0, "attainment", "value", 0.0, "no clear change"),
            change(10.0, "attainment", "value", -0.1, word),
            change(10.0, "ttft", "p95", 0.02, "no clear change"),
            change(10.0, "e2e", "p95", None, "not compared"),
        ],
    }  # fmt: skip


def run_info(**changes: Any) -> dict[str, Any]:
    """A `run.json` with every key that the report shows."""
    info: dict[str, Any] = {
        "run_id": "20261129T101500Z-7f3a",
        "started_utc": "2026-11-29T10:15:00Z",
        "finished_utc": "2026-11-29T10:25:04Z",
        "tool_version": "0.1.0",
        "versions": {"python": "3.11.9", "locust": "2.47.0", "gevent": "26.9.0"},
        "host": {"system": "Linux 6.1", "cpu": "x86_64", "cores": 4, "memory_bytes": 16 * 2**30},
        "seed": 42,
        "schedule_hash": "9f" * 32,
        "command": ["bench", "run", "--config", "configs/demo.json"],
        "config": {
            "model": "h100-8b",
            "base_url": "http://127.0.0.1:8000/v1",
            "scheduler": {"policy": "slack_aware", "max_num_seqs": 32, "batch_size_cap": 16},
            "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100},
            "loadgen": {"target_qps": 15.0},
        },
        "config_origin": {"model": "file configs/demo.json", "base_url": "environment BENCH_BASE_URL"},
        "loop": "open",
        "shape": "sweep",
        "workers": 2,
        "worker_info": [],
        "interrupted": False,
        "simulated": False,
        "target": {"server": "scheduler-bench engine", "model": "h100-8b", "version": "0.1.0"},
        "preflight": {},
        "problems": [],
        "files": {"requests.csv": "ab" * 32, "stages.csv": "cd" * 32},
        "schema_version": 1,
    }
    info.update(changes)
    return info


def gates(status: str = "pass") -> list[Gate]:
    """Four gates, one per status that a table must be able to show."""
    return [
        Gate(
            "GATE-ATT",
            "attainment_joint",
            "value",
            ">=",
            0.99,
            0.9978,
            "ratio",
            "target",
            status,
            "fail",
            "joint attainment over all arrivals at 15 requests/s",
        ),
        Gate(
            "GATE-TTFT", "ttft_s", "p95", "<=", 0.8, 0.335, "s", "target", status, "fail", "TTFT p95 at 15 requests/s"
        ),
        Gate(
            "GATE-TPOT", "tpot_s", "p95", "<=", 0.1, 0.039, "s", "target", status, "fail", "TPOT p95 at 15 requests/s"
        ),
        Gate(
            "GATE-E2E99",
            "e2e_s",
            "p99",
            "<=",
            60.0,
            None,
            "s",
            "target",
            "not_measured",
            "warn",
            "p99 withheld: n = 900",
        ),
    ]


def model(stages: list[StageAnalysis]) -> dict[str, Any]:
    """The model part of an analysis, as docs/queueing.md section 8 states it: good replay, blind M/G/K."""
    predictions: list[dict[str, Any]] = []
    loads: list[dict[str, Any]] = []
    for s in stages:
        rho = s.offered_qps / MU_QPS
        status = "calibration" if s.stage < 2 else "beyond" if rho > 0.92 else "predictive"
        mean = s.latency["e2e_s"].mean
        values = {
            "e2e_mean_s": mean,
            "e2e_p95_s": s.latency["e2e_s"].p95,
            "ttft_p95_s": s.latency["ttft_s"].p95,
            "attainment": s.attainment_joint.value,
        }
        for metric, measured in values.items():
            known = measured if measured is not None and math.isfinite(measured) else None
            guess = (
                None
                if known is None or rho >= 1
                else known * (1 + 0.03 * math.sin(s.stage))
                if metric != "attainment"
                else known
            )
            predictions.append(
                {
                    "stage": s.stage,
                    "name": s.name,
                    "offered_qps": s.offered_qps,
                    "metric": metric,
                    "measured": known,
                    "predicted": guess,
                    "predicted_birth_death": None if guess is None else guess * 1.06,
                    "naive_pk": None if rho > 0.3 else known,
                    "naive_mgk": None if known is None else known * (1 - 0.6 * min(rho, 1)),
                    "residual_ratio": None if guess is None or metric == "attainment" else guess / known - 1,
                    "residual_share": guess - known if metric == "attainment" and guess is not None else None,
                    "naive_mgk_residual_ratio": None,
                    "status": status,
                }
            )
        loads.append(
            {
                "stage": s.stage,
                "offered_qps": s.offered_qps,
                "calibration": s.stage < 2,
                "load_ratio": rho,
                "mean_field_batch_size": 30 * rho / (1 - rho) / 6 if rho < 1 else None,
                "mean_field_exists": rho < 1,
                "mean_field_admissible": rho < 1,
                "mean_field_reason": "",
                "naive_pk_rho": rho * 20,
                "naive_mgk_rho": rho * 0.62,
                "failed_ratio": 0.0,
                "arrivals": s.planned,
            }
        )
    return {
        "schema": 1,
        "lambda_max_qps": 23.9,
        "lambda_max_low_qps": 23.4,
        "lambda_max_high_qps": 24.4,
        "calibration_stages": [0, 1],
        "fit": {
            "alpha_s": 0.0079,
            "beta_s": 1.1e-7,
            "gamma_s": 2.4e-5,
            "kappa_s": 0.00031,
            "kv_s": 0.0,
            "se": {"alpha_s": 0.0001},
            "r2": 0.998,
        },
        "lengths": {
            "input_mean_tokens": 1050.0,
            "output_mean_tokens": 320.0,
            "output_scv": 0.43,
            "context_mean_tokens": 1370.0,
        },
        "predictions": predictions,
        "stage_models": loads,
        "knee_predicted_qps": 20.4,
        "knee_predicted_low_qps": 19.7,
        "knee_predicted_high_qps": 21.0,
        "knee_kind": "crossing",
        "predictive": True,
        "notes": ["calibration saw batches of up to 7 of 32: the limit is extrapolated"],
        "sentence": "Fitted on 5 and 10 requests/s alone: knee 20.4 requests/s, hard limit 23.9 requests/s; mean response of "
        "the higher stages predicted within 3.0% (M/G/K: 38%).",
    }


def sweep(qps: tuple[float, ...] = (5, 10, 15, 20, 25, 30, 35, 40), repeats: int = 1) -> Analysis:
    """An 8-stage sweep that passes at its target of 15 requests/s, with a knee near 20."""
    stages = [
        stage(i, q, r, wobble=0.03 * (r - (repeats - 1) / 2))
        for i, (q, r) in enumerate((q, r) for q in qps for r in range(repeats))
    ]
    last_met = max((s.offered_qps for s in stages if s.verdict == "MET"), default=None)
    errors = [
        ErrorGroup("channel", "CH-RESET", "reset", 2, 3, 171.2, 190.4, "connection reset by peer after 812 bytes"),
        ErrorGroup("script", "SC-NODONE", "no_done", len(stages) - 1, 2, 560.0, 571.5, HOSTILE),
    ]
    for s in stages:
        for code, status, layer in (("SV-429", "rejected", "scheduler"), ("CL-DRAIN", "timeout", "client")):
            if s.counts[status]:
                errors.append(
                    ErrorGroup(
                        layer,
                        code,
                        status,
                        s.stage,
                        s.counts[status],
                        s.stage * STAGE_S + 12,
                        s.stage * STAGE_S + 68,
                        '{"error": {"message": "queue is full"}}',
                    )
                )
    return Analysis(
        schema_version=SCHEMA_VERSION,
        run=run_info(),
        slo=dict(SLO),
        target_qps=15.0,
        verdict=Verdict("PASS", 0, "The SLO holds at 15 requests/s: 99.78 % of all arrivals meet it, 99 % are asked."),
        gates=gates(),
        stages=stages,
        capacity=Capacity(
            knee_qps=20.9,
            knee_low_qps=19.6,
            knee_high_qps=21.8,
            knee_kind="crossing",
            knee_method="monotone fit of joint attainment, bootstrap interval",
            last_met_qps=last_met,
            watermark_low_qps=13.7,
            watermark_high_qps=15.7,
            lambda_max_qps=23.9,
            flattening_qps=22.5,
            attainment_target=TARGET,
            sentence="Joint attainment falls below 99 % between 20 and 25 requests/s.",
        ),
        errors=errors,
        repeatability=[
            Repeatability(
                15.0,
                "ttft_p95_s",
                [0.331, 0.335, 0.342][:repeats],
                0.033 if repeats > 1 else None,
                0.15,
                True,
                True if repeats > 1 else None,
            )
        ]
        if repeats > 1
        else [],
        in_flight_series=in_flight_series(stages)[:: max(1, len(stages) // 10)],
        heatmap=heatmap(stages),
        points=points(stages),
        server=server(stages),
        worst=[
            {
                "stage": 7,
                "arrival": 40 + i,
                "request_id": f"r-7-{40 + i}",
                "status": "timeout" if i < 3 else "ok",
                "code": "CL-DRAIN" if i < 3 else None,
                "intended_s": 530.0 + i,
                "ttft_s": 4.1 - 0.1 * i,
                "e2e_s": math.inf if i < 3 else 44.0 - i,
                "input_tokens": 1800 - 20 * i,
                "output_tokens": 900 - 11 * i,
            }
            for i in range(12)
        ],
        csv_check={
            "ok": True,
            "rows_ledger": sum(s.planned for s in stages),
            "rows_csv": sum(s.planned for s in stages),
        },
        clients=[
            {
                "worker": w,
                "rows": 4000 + w,
                "send_lag_p50_s": 0.0006,
                "send_lag_p99_s": 0.0019 + w * 0.0004,
                "loop_lag_p99_s": 0.004,
                "cpu_max_ratio": 0.51 + 0.04 * w,
                "rss_max_bytes": 210 * 2**20,
                "clock_offset_s": 0.00002 * w,
            }
            for w in range(2)
        ],
        model=model(stages),
        ledger={"rows": sum(s.planned for s in stages), "duplicates": 0, "missing": 0, "problems": []},
        diagnosis=[
            Reason(
                "DIA-CLAUSE",
                "info",
                "attainment at 25 requests/s is 4.20% though the median answer takes 14 s; the cause is TTFT",
                "read attainment per clause",
                4,
                0.042,
                0.99,
            )
        ],
        warnings=[
            Reason(
                "WRN-P99",
                "warn",
                "p99 is withheld at 5, 10 and 15 requests/s: fewer than 1,000 arrivals",
                "lengthen the stages to 200 s",
            )
        ],
    )


def failed() -> Analysis:
    """The same sweep asked to hold 25 requests/s: it does not."""
    out = sweep()
    out.target_qps = 25.0
    out.verdict = Verdict(
        "FAIL",
        1,
        "The SLO does not hold at 25 requests/s: 46.1 % of all arrivals meet it, 99 % are asked.",
        [
            Reason(
                "SLO-ATT",
                "fail",
                "joint attainment 0.461 is below 0.99 at 25 requests/s",
                "stay below 15.7 requests/s, or add replicas",
                4,
                0.461,
                0.99,
            )
        ],
    )
    out.gates = gates("fail")
    return out


def invalid() -> Analysis:
    """A saturated client: no capacity figure may be printed."""
    out = sweep()
    out.verdict = Verdict(
        "INVALID",
        4,
        "The measurement cannot be trusted: the sender was late.",
        [
            Reason(
                "INV-LAG",
                "invalid",
                "send lag p99 was 84 ms at 40 requests/s; the limit is 40 ms",
                "use more workers: --processes 4",
                7,
                0.084,
                0.04,
            ),
            Reason(
                "INV-RATE",
                "invalid",
                "delivered rate was off by 3.1 % at 35 requests/s; the limit is 1 %",
                "",
                6,
                0.031,
                0.01,
            ),
        ],
    )
    out.gates = gates("invalid")
    for s in out.stages[6:]:
        s.verdict, s.stimulus.ok, s.stimulus.send_lag_p99_s = "INVALID", False, 0.084
    return out


def one_stage() -> Analysis:
    """A smoke run: one stage, no knee can be found."""
    out = sweep((2,))
    out.run["shape"], out.target_qps = "smoke", 2.0
    out.capacity = Capacity(
        None,
        None,
        None,
        "at_least",
        "one stage only",
        2.0,
        None,
        None,
        sentence="One stage only: the knee lies above 2 requests/s.",
    )
    out.model = None
    return out


def empty() -> Analysis:
    """Nothing succeeded: the key was wrong."""
    out = sweep((5, 10))
    none = Percentiles(n=0)
    for s in out.stages:
        s.counts = {"ok": 0, "error": s.planned, "rejected": 0, "timeout": 0, "truncated": 0, "unsent": 0}
        s.completed_qps = s.goodput_qps = s.output_tps = 0.0
        never = Percentiles(
            n=s.planned, mean=math.inf, p50=math.inf, p90=math.inf, p95=math.inf, p99=math.inf, maximum=math.inf
        )
        s.latency = {k: never for k in ("ttft_s", "tpot_s", "e2e_s")} | {
            "send_lag_s": percentiles(0.001, 0.4, s.planned)
        }
        s.survivors = {k: none for k in ("ttft_s", "tpot_s", "e2e_s")}
        for name in ("ttft", "tpot", "joint", "e2e"):
            setattr(s, f"attainment_{name}", wilson(0, s.planned))
        s.attainment_low = s.attainment_high = 0.0
        s.attainment_survivors, s.binding_clause, s.verdict = None, "failures", "NOT_MET"
        s.ecdf_ttft, s.ecdf_tpot = [], []
        s.little = Little(
            s.offered_qps, None, None, None, None, None, None, None, None, ok=None, note="nothing finished"
        )
        s.stationarity = "TOO_SHORT"
    out.errors = [
        ErrorGroup("channel", "CH-401", "auth", s.stage, s.planned, 0.1, 59.9, "HTTP 401: invalid key")
        for s in out.stages
    ]
    out.capacity = Capacity(None, None, None, "none", "", None, None, None, sentence="No stage met the SLO.")
    out.verdict = Verdict(
        "FAIL",
        3,
        "No request succeeded: HTTP 401 for every arrival.",
        [Reason("CHN-AUTH", "fail", "900 of 900 arrivals got HTTP 401", "set BENCH_API_KEY")],
    )
    out.target_qps, out.model, out.worst, out.heatmap, out.warnings = 5.0, None, [], {}, []
    out.gates = [
        Gate("GATE-ATT", "attainment_joint", "value", ">=", 0.99, 0.0, "ratio", "target", "fail", "fail"),
        Gate("GATE-TTFT", "ttft_s", "p95", "<=", 0.8, math.inf, "s", "target", "fail", "fail"),
    ]
    return out


def nothing() -> Analysis:
    """No stage at all: stopped before the first arrival."""
    return Analysis(
        schema_version=SCHEMA_VERSION,
        run=run_info(interrupted=True),
        slo=dict(SLO),
        target_qps=None,
        verdict=Verdict("INVALID", 130, "The run was stopped before the first window.", interrupted=True),
        gates=[],
        stages=[],
        capacity=Capacity(None, None, None, "none", "", None, None, None),
    )


def interrupted() -> Analysis:
    """Stopped by hand in the fourth stage."""
    out = sweep((5, 10, 15, 20))
    out.run["interrupted"] = out.verdict.interrupted = True
    out.verdict.exit_code = 130
    out.stages[-1].marks = ["interrupted"]
    return out


def simulated() -> Analysis:
    """A sweep in virtual time: no client, no clocks."""
    out = sweep()
    out.run["simulated"] = True
    out.clients = []
    for s in out.stages:
        s.stimulus.send_lag_p50_s = s.stimulus.send_lag_p99_s = s.stimulus.loop_lag_p99_s = None
        s.stimulus.client_cpu_max_ratio = None
        s.little.in_flight_mean_gauge = s.little.gap_ratio_gauge = None
    return out


def many() -> Analysis:
    """40 rates x 3 repeats = 120 stages."""
    out = sweep(tuple(float(q) for q in range(1, 41)), repeats=3)
    out.run["shape"] = "repeat"
    out.model = model(out.stages[:75:5])
    return out


ALL = {
    "sweep": sweep,
    "failed": failed,
    "invalid": invalid,
    "one_stage": one_stage,
    "empty": empty,
    "nothing": nothing,
    "interrupted": interrupted,
    "simulated": simulated,
    "many": many,
}
