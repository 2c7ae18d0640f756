"""How well the statistics of the analysis keep their promises: coverage, error rates, spread.

Usage: python -m benchmarks.evidence_analysis [--quick] [--out docs/evidence/analysis.md]
Input: nothing; loads are simulated step by step with the reference's service (alpha 0.6 ms,
beta 0.04 ms per sequence, gamma 8 us per prompt token, 32 sequences, lognormal(6, 0.6) answers:
capacity 27.21 requests/s). Output: docs/evidence/analysis.md; one JSON object as the last line.
Does not: use a latency of the simulator as anything but the truth that the statistics must find.
"""
from __future__ import annotations

import argparse
import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.batching import StepLaw
from analysis.intervals import (
    batch_interval,
    independent_states,
    inflation_ceiling,
    split,
    variance_inflation,
    wilson,
)
from analysis.knee import Level, crossing, score_quantile
from analysis.little import identity, in_flight_at
from analysis.percentiles import nearest_rank
from analysis.repeatability import ATTAINABLE_CV
from analysis.replay import replay
from analysis.stationarity import stationarity

LAW = StepLaw(0.6e-3, 0.04e-3, 8e-6)
SEQS = 32
CAPACITY = 27.21
STAGE_S, WARMUP_S = 300.0, 30.0
TTFT_S, E2E_S = 0.8, 2.0
SWEEPS_NOTE = (
    "60 sweeps each on the seeds 20000+; the clusters per state were set on 400000+. The true crossings come from 24 "
    "paths of 3,000 s at three rates; four paths alone had put that of TTFT at 24.42. At the true crossing of TTFT a "
    "stage of 270 s has no miss at all in one case of three, and its median share of misses is .2 % where the mean is "
    "1 %: so the crossing comes out high, and the lower end has to allow for clusters that the stage did not hold."
)


@dataclass
class Stage:
    """One simulated stage, seconds from its start."""

    arrival: np.ndarray
    first: np.ndarray
    last: np.ndarray
    tokens: np.ndarray

    @property
    def window(self) -> np.ndarray:
        return self.arrival >= WARMUP_S

    def residence(self) -> np.ndarray:
        return (self.last - self.arrival)[self.window]

    def states(self, duration_s: float = STAGE_S) -> float:
        t = np.linspace(WARMUP_S, duration_s, 600, endpoint=False)
        return independent_states(in_flight_at(t, self.arrival, self.last))


def simulate(qps: float, seed: int, duration_s: float = STAGE_S) -> Stage:
    """Poisson arrivals with the reference's lengths, through the step-synchronous service."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / qps, int(qps * duration_s * 1.2 + 200)))
    arrival = arrival[arrival < duration_s]
    prompt = rng.integers(100, 2001, len(arrival))
    tokens = np.maximum(1, rng.lognormal(6.0, 0.6, len(arrival)).astype(int))
    done = replay(arrival, prompt, tokens, LAW, SEQS)
    return Stage(arrival, done.first_token_s, done.last_token_s, tokens)


def coverage(repeats: int, truths: int) -> list[dict]:
    """Batch-means interval of P95: coverage, reliability flag, run-to-run variation, range of three runs."""
    rows = []
    for qps in (5.0, 10.0, 15.0, 20.0, 22.0, 24.5, 25.0, 26.0):
        long = [simulate(qps, 90_000 + k, 4000).residence() for k in range(truths)]
        truth = nearest_rank(np.sort(np.concatenate(long)), 0.95)
        covered, reliable, values = 0, 0, []
        for seed in range(repeats):
            s = simulate(qps, 310_000 + seed)
            found = batch_interval(s.residence(), states=s.states())
            assert found is not None and found.low is not None and found.high is not None
            covered += found.low <= truth <= found.high
            reliable += found.reliable
            values.append(found.value)
        cv = float(np.std(values, ddof=1) / np.mean(values))
        triples = np.array(values[: repeats // 3 * 3]).reshape(-1, 3)
        over = float(np.mean((triples.max(axis=1) - triples.min(axis=1)) / triples.mean(axis=1) > 0.15))
        rows.append({
            "qps": qps, "load": qps / CAPACITY, "truth_s": truth, "coverage": covered / repeats,
            "unreliable": 1 - reliable / repeats, "cv": cv, "attainable": cv <= ATTAINABLE_CV, "over_15": over,
        })  # fmt: skip
        print(f"coverage {rows[-1]}", flush=True)
    return rows


def stationarity_rates(repeats: int) -> list[dict]:
    """Share of each verdict at known loads, 240 s after a 60 s cut."""
    rows = []
    for load in (0.2, 0.55, 0.74, 0.92, 0.95, 0.99, 1.03, 1.10, 1.29, 1.47):
        verdicts = []
        residual, expected = [], []
        for seed in range(repeats):
            s = simulate(load * CAPACITY, 5000 + seed)
            law = identity(s.arrival, s.last, 60, STAGE_S)
            off = law.integral / law.residence_sum - 1
            found = stationarity(s.arrival, s.last, 60, STAGE_S, batch=SEQS, little_residual=off)
            verdicts.append(found.verdict)
            residual.append(off)
            expected.append(-(1 - law.departures / law.arrivals))
        rows.append({
            "load": load, **{v: verdicts.count(v) / repeats for v in ("STABLE", "SUSPECT", "UNSTABLE", "TOO_SHORT")},
            "residual": float(np.mean(residual)), "formula": float(np.mean(expected)),
        })  # fmt: skip
        print(f"stationarity {rows[-1]}", flush=True)
    return rows


def _level(qps: float, s: Stage, kind: str) -> Level:
    window = s.window
    e2e, ttft = (s.last - s.arrival)[window], (s.first - s.arrival)[window]
    steps = np.maximum(s.tokens[window] - 1, 1)
    tpot = (s.last - s.first)[window] / steps
    share = 0.95 if kind == "e2e" else 0.99
    score = e2e / E2E_S if kind == "e2e" else np.maximum(ttft / TTFT_S, tpot / 0.1)
    worth = len(score) / inflation_ceiling(score <= 1)
    scv = float(s.tokens[window].var() / s.tokens[window].mean() ** 2)
    return Level(
        qps=qps, attainment=float(np.mean(score <= 1)), arrivals=len(score), score=score_quantile(score, share),
        batch_scores=tuple(score_quantile(p, share) for p in split(score, 5)),
        stable=stationarity(s.arrival, s.last, WARMUP_S, STAGE_S, batch=SEQS).verdict != "UNSTABLE",
        completed_qps=0.0, states=s.states(), load_sd_ratio=math.sqrt((1 + scv) / len(score)),
        attainment_most=wilson(float(np.mean(score <= 1)) * worth, worth)[1], inflation=variance_inflation(score <= 1),
    )  # fmt: skip


def true_crossing(kind: str, paths: int) -> float:
    """Bisection on long runs, then a line through the log odds of a miss at three rates with six times the paths."""
    low, high = 20.0, 27.0
    share = 0.95 if kind == "e2e" else 0.99
    for _ in range(8):
        middle = (low + high) / 2
        scores = []
        for k in range(paths):
            s = simulate(middle, 70_000 + k, 3000)
            w = s.window
            scores.append((s.last - s.arrival)[w] / E2E_S if kind == "e2e" else (s.first - s.arrival)[w] / TTFT_S)
        if score_quantile(np.concatenate(scores), share) > 1:
            high = middle
        else:
            low = middle
    rough, limit = (low + high) / 2, E2E_S if kind == "e2e" else TTFT_S
    x, y, weight = np.log(rough * np.array([0.985, 1.0, 1.015])), np.empty(3), np.empty(3)
    for i, q in enumerate(np.exp(x)):
        shares = []
        for k in range(6 * paths):
            s = simulate(float(q), 1_200_000 + k, 3000)
            value = (s.last if kind == "e2e" else s.first) - s.arrival
            shares.append(float(np.mean(value[s.window] > limit)))
        mean = float(np.mean(shares))
        y[i], weight[i] = math.log(mean / (1 - mean)), mean / max(float(np.std(shares)), 1e-9)
    slope, level = np.polyfit(x - math.log(rough), y, 1, w=weight)
    return rough * math.exp((math.log((1 - share) / share) - level) / slope)


def knee(sweeps: int, paths: int) -> list[dict]:
    """SLO crossing over whole sweeps: error and coverage of the interval in QPS."""
    truth = {kind: true_crossing(kind, paths) for kind in ("e2e", "joint")}
    rows = []
    for first, step, top in ((5.0, 5.0, 35.0), (7.5, 5.0, 32.5), (5.0, 2.5, 30.0)):
        found: dict[str, list] = {"e2e": [], "joint": []}
        for sweep in range(sweeps):
            stages = {q: simulate(q, 20_000 + sweep * 1000 + int(q * 10)) for q in np.arange(first, top + 0.1, step)}
            for kind in found:
                found[kind].append(
                    crossing([_level(q, s, kind) for q, s in stages.items()], 0.95 if kind == "e2e" else 0.99)
                )
        for kind, list_ in found.items():
            value = np.array([c.value for c in list_])
            inside = [c.low <= truth[kind] <= (c.high if c.high is not None else math.inf) for c in list_]
            width = [c.high - c.low for c in list_ if c.high is not None]
            rows.append({
                "target": "P95 E2E <= 2 s" if kind == "e2e" else "99 % TTFT <= 0.8 s",
                "first": first, "step": step, "truth": truth[kind],
                "mean": float(value.mean()), "sd": float(value.std(ddof=1)),
                "within_3": float(np.mean(np.abs(value / truth[kind] - 1) <= 0.03)),
                "coverage": float(np.mean(inside)), "width": float(np.median(width)),
                "low": float(np.median([c.low for c in list_ if c.low is not None])),
            })  # fmt: skip
            print(f"knee {rows[-1]}", flush=True)
    return rows


def page(cover: list[dict], steady: list[dict], crossings: list[dict], counts: dict[str, int]) -> str:
    """The Markdown of docs/evidence/analysis.md."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# Evidence: the statistics of the analysis",
        "",
        f"Written by `python -m benchmarks.evidence_analysis` on {today}. Service: alpha 0.6 ms, beta 0.04 ms, "
        "gamma 8 us, "
        f"32 sequences, capacity {CAPACITY} requests/s; Poisson arrivals, lognormal(6, 0.6) answers; stages of "
        "300 s, 30 s cut. "
        f"Replications: {counts}. Seeds: in the script (310000+, 5000+, 20000+, 70000+, 90000+; the allowance "
        "for excursions was set on 1000+).",
        "",
        "## P95 of the whole answer: interval, flag, spread",
        "",
        "| requests/s | load | true P95 s | coverage of nominal 95 % | flagged unreliable | CV of P95 | 15 % "
        "attainable | range of 3 over 15 % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['qps']:g} | {r['load']:.3f} | {r['truth_s']:.3f} | {r['coverage']:.3f} | {r['unreliable']:.2f} | "
        f"{r['cv']:.1%} | "
        f"{'yes' if r['attainable'] else 'no'} | {r['over_15']:.2f} |"
        for r in cover
    ]
    lines += [
        "",
        "## Stationarity and the overload residual",
        "",
        "240 s after a 60 s cut. Residual: mean of L/(lambda W) - 1; formula: mean of -(1 - X/lambda).",
        "",
        "| load | STABLE | SUSPECT | UNSTABLE | residual | formula |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['load']:.2f} | {r['STABLE']:.2f} | {r['SUSPECT']:.2f} | {r['UNSTABLE']:.2f} | "
        f"{r['residual']:+.1%} | {r['formula']:+.1%} |"
        for r in steady
    ]
    return "\n".join([*lines, "", *knee_section(crossings)]) + "\n"


def knee_section(crossings: list[dict]) -> list[str]:
    """The lines of the last section."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "## Knee over whole sweeps",
        "",
        f"Written on {today}; {SWEEPS_NOTE}",
        "",
        "| target | first rate | step | true crossing | mean | sd | within 3 % | coverage of nominal 95 % "
        "| median width | median low end |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['target']} | {r['first']:g} | {r['step']:g} | {r['truth']:.2f} | {r['mean']:.2f} | {r['sd']:.2f} | "
        f"{r['within_3']:.2f} | {r['coverage']:.2f} | {r['width']:.2f} | {r['low']:.2f} |"
        for r in crossings
    ]
    return lines


def main() -> None:
    """Run the studies and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the replications, page not written")
    parser.add_argument("--only-knee", action="store_true", help="the last section alone; the rest of the page stays")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/analysis.md"))
    options = parser.parse_args()
    full = {"coverage": 200, "truths": 10, "stationarity": 40, "sweeps": 60, "paths": 4}
    counts = {k: max(3, v // 10) for k, v in full.items()} if options.quick else full
    if options.only_knee:
        crossings = knee(counts["sweeps"], counts["paths"])
        text = options.out.read_text(encoding="utf-8")
        options.out.write_text(text[: text.index("## Knee over")] + "\n".join(knee_section(crossings)) + "\n",
                               encoding="utf-8")  # fmt: skip
        return
    cover = coverage(counts["coverage"], counts["truths"])
    steady = stationarity_rates(counts["stationarity"])
    crossings = knee(counts["sweeps"], counts["paths"])
    if not options.quick:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(page(cover, steady, crossings, counts), encoding="utf-8")
    print(json.dumps({
        "coverage_min_to_90_percent_load": min(r["coverage"] for r in cover if r["load"] <= 0.905),
        "coverage_at_25_qps": next(r["coverage"] for r in cover if r["qps"] == 25),
        "flagged_at_26_qps": next(r["unreliable"] for r in cover if r["qps"] == 26),
        "unstable_at_most_to_95": max(r["UNSTABLE"] for r in steady if r["load"] <= 0.95),
        "unstable_at_least_from_110": min(r["UNSTABLE"] for r in steady if r["load"] >= 1.10),
        "knee_p95_within_3": min(r["within_3"] for r in crossings if "P95" in r["target"]),
        "knee_p95_coverage": min(r["coverage"] for r in crossings if "P95" in r["target"]),
        "knee_ttft_coverage": min(r["coverage"] for r in crossings if "TTFT" in r["target"]),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
