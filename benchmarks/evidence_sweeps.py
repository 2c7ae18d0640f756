"""How often the knee's interval of a plain sweep covers the true knee: short stages, coarse steps, three services.

Usage: python -m benchmarks.evidence_sweeps [--quick] [--out docs/evidence/knee_sweeps.md]
Input: nothing; sweeps over the services of `evidence_knee.py`. The knees of `mm1` are a closed form, those of
`batching` and `bursty` are the ones of docs/evidence/knee_search.md.
Output: docs/evidence/knee_sweeps.md; one JSON object as the last line.
Does not: search. Beside the interval as it is, two rules for its lower end that were given up are counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from analysis.intervals import independent_states, inflation_ceiling, split, variance_inflation, wilson
from analysis.knee import Level, crossing, score_quantile
from analysis.little import in_flight_at
from analysis.search import FAR_INSIDE, SEEN_STATES
from analysis.stationarity import stationarity
from benchmarks.evidence_knee import SEQS, WARMUP_MAX_S, WARMUP_SHARE, Served, Service, batching, mm1, mm1_knee
from benchmarks.evidence_page import at_least

SEED = 900_000
STAGES_S = (300.0, 120.0, 60.0)
STEP_5, STEP_25 = (5.0, 10.0, 15.0, 20.0, 25.0, 30.0), tuple(np.arange(12.5, 30.1, 2.5).tolist())


@dataclass(frozen=True)
class Case:
    """A service, its target and true knee (1/s), and the rates of the sweep."""

    name: str
    service: Service
    batch: int  # requests that it serves at once
    target: float
    knee_qps: float
    rates: tuple[float, ...]


def cases() -> list[Case]:
    """Every service with a coarse and a fine step."""
    out = []
    for name, service, batch, target, knee in (
        ("mm1, deadline 0.8 s", mm1(25, 0.8), 1, 0.99, mm1_knee(25, 0.8, 0.99)),
        ("mm1, deadline 0.8 s", mm1(25, 0.8), 1, 0.95, mm1_knee(25, 0.8, 0.95)),
        ("batching", batching(), SEQS, 0.99, 24.54),
        ("bursty", batching(0.25), SEQS, 0.99, 19.96),
    ):
        out += [Case(name, service, batch, target, knee, rates) for rates in (STEP_5, STEP_25)]
    return out


def level(served: Served, qps: float, duration_s: float, case: Case) -> Level:
    """What the analysis of a sweep knows of one stage."""
    start_s = min(WARMUP_MAX_S, WARMUP_SHARE * duration_s)
    score = served.score[served.arrival_s >= start_s]
    hit = score <= 1
    worth, share = len(score) / inflation_ceiling(hit), float(hit.mean())
    flow = stationarity(served.arrival_s, served.done_s, start_s, duration_s, batch=case.batch)
    t = np.linspace(start_s, duration_s, 600, endpoint=False)
    return Level(
        qps=qps, attainment=share, arrivals=len(score), score=score_quantile(score, case.target),
        batch_scores=tuple(score_quantile(p, case.target) for p in split(score, 5)), stable=flow.verdict != "UNSTABLE",
        completed_qps=0.0, states=independent_states(in_flight_at(t, served.arrival_s, served.done_s)),
        attainment_most=wilson(share * worth, worth)[1], inflation=variance_inflation(hit),
        load_sd_ratio=math.sqrt(2 / len(score)),
    )  # fmt: skip


def floors(levels: list[Level], target: float) -> tuple[float, float]:
    """(highest MET rate, highest rate that the adaptive search would call held), below the first that does not hold."""
    met = far = 0.0
    for x in levels:
        if not (x.stable and x.attainment >= target):
            break
        inflation = max(x.inflation or 1.0, 1.0)
        if wilson(x.attainment * x.arrivals / inflation, x.arrivals / inflation)[0] >= target:
            met = x.qps
        if not x.misses and max(x.batch_scores) <= FAR_INSIDE and x.states >= SEEN_STATES / (1 - target):
            far = x.qps
    return met, far


def study(sweeps: int) -> list[dict]:
    """One row per case and length of the stages."""
    rows = []
    for duration_s in STAGES_S:
        for case in cases():
            lows, highs, met, far = (np.empty(sweeps) for _ in range(4))
            for k in range(sweeps):
                levels = [
                    level(case.service(q, duration_s, SEED + 1000 * k + int(10 * q)), q, duration_s, case)
                    for q in case.rates
                ]
                found = crossing(levels, case.target)
                lows[k] = found.low if found.low is not None else 0.0
                highs[k] = found.high if found.high is not None else math.inf
                met[k], far[k] = floors(levels, case.target)

            def covered(low: np.ndarray, knee: float = case.knee_qps, high: np.ndarray = highs) -> float:
                return float(np.mean((low <= knee) & (knee <= high)))

            rows.append({
                "service": case.name, "target": case.target, "knee_qps": case.knee_qps,
                "step_qps": case.rates[1] - case.rates[0], "stage_s": duration_s, "coverage": covered(lows),
                "low_qps": float(np.median(lows)), "below_met": float(np.mean(lows < met - 1e-9)),
                "coverage_met": covered(np.maximum(lows, met)), "coverage_far": covered(np.maximum(lows, far)),
            })  # fmt: skip
            print(f"sweeps {rows[-1]}", flush=True)
    return rows


def worst(coverage: float, rows: int) -> str:
    """The sentence that judges the lowest coverage."""
    return f"Coverage, the lowest of {rows} rows: {at_least(coverage, 0.90, '{:.3f}')}."


def page(rows: list[dict], sweeps: int) -> str:
    """The Markdown of docs/evidence/knee_sweeps.md."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# Evidence: the knee of a plain sweep",
        "",
        f"Written by `python -m benchmarks.evidence_sweeps` on {today}; {sweeps} sweeps a row, seeds {SEED}+. Services "
        "as in [knee_search.md](knee_search.md); a tenth of a stage, at most 30 s, is warm-up. *Covered*: share of "
        "sweeps whose nominal 95 % interval holds the true knee. *Below MET*: share whose lower end lies below a rate "
        "that is MET by its Wilson interval. The last two columns: what would be covered if the lower end were never "
        "below the highest MET rate, and never below the highest rate that the adaptive search calls held (no miss, "
        f"every part below {FAR_INSIDE:g} of the deadline, {SEEN_STATES:g}/(1 - target) independent states).",
        "",
        worst(min(r["coverage"] for r in rows), len(rows)),
        "",
        "| service | target | true knee, 1/s | step | stage, s | covered | median low end | below MET | MET as a "
        "floor | held as a floor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['service']} | {r['target']:g} | {r['knee_qps']:.2f} | {r['step_qps']:g} | {r['stage_s']:g} | "
        f"{r['coverage']:.3f} | {r['low_qps']:.2f} | {r['below_met']:.2f} | {r['coverage_met']:.2f} | "
        f"{r['coverage_far']:.2f} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the sweeps and rewrite the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sweeps, page not written")
    parser.add_argument("--out", type=Path, default=Path("docs/evidence/knee_sweeps.md"))
    options = parser.parse_args()
    sweeps = 6 if options.quick else 60
    rows = study(sweeps)
    if not options.quick:
        options.out.write_text(page(rows, sweeps), encoding="utf-8")
    print(json.dumps({
        "coverage_min": min(r["coverage"] for r in rows), "coverage_met_min": min(r["coverage_met"] for r in rows),
        "coverage_far_min": min(r["coverage_far"] for r in rows),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
