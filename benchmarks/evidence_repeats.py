"""The section on repeats in docs/evidence/analysis.md: how far apart three runs of one load lie, same seed and others.

Input: seeds. Output: rows and lines of Markdown. Run by `benchmarks.evidence_analysis`; `python -m
benchmarks.evidence_repeats --real CONFIG` runs `bench run --shape repeat` against the embedded engine over HTTP
instead and prints what the analysis says of it.
Does not: judge by itself; `analysis.repeatability` does, as in a run.

1. "Same seed" is the product's own: one plan of three repeats, the same arrivals and lengths; the engine's step noise
   (CV 5 %) has a stream of its own in every repeat. Nothing else differs in virtual time: no network, no client.
2. Other seeds: the plan's repeats each draw their load, as with `sweep.repeat_seed: different`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from analysis.percentiles import summarise
from analysis.repeatability import ATTAINABLE_CV, OTHER_SEED_LIMIT, SAME_SEED_LIMIT, repeatability
from bench.config.schema import Config
from bench.records.analysis import Interval, Little, Repeatability, StageAnalysis, Stimulus
from bench.workload.plan import build_plan
from benchmarks.evidence_page import at_most, met, table, today
from benchmarks.evidence_service import CAPACITY
from engine.settings import EngineConfig
from engine.simulate import StageResult, simulate_stage

RATES = (5.0, 15.0, 20.0, 22.0, 25.0, 26.0)
SEED = 600_000  # of the first plan
STAGE_S, WARMUP_S, NOISE_CV = 300.0, 30.0, 0.05
REPEATS = 3


def config_of(same: bool, noise_cv: float = NOISE_CV, stage_s: float = STAGE_S) -> Config:
    """The reference's service as the embedded engine, without admission; a tenth of a stage is warm-up."""
    return Config.model_validate({
        "engine": {"embedded": True, "profile": "reference-shape", "noise_cv": noise_cv},
        "scheduler": {"policy": "fcfs", "batch_size_cap": 32}, "admission": {"reject_on_budget_exceed": False},
        "sweep": {"repeat_seed": "same" if same else "different", "warmup_sec": WARMUP_S / STAGE_S * stage_s,
                  "drain_limit_sec": 60.0},
    })  # fmt: skip


def as_stage(result: StageResult) -> StageAnalysis:
    """What `repeatability` reads of a stage: the percentiles of its window; everything else is empty."""
    arrival, out = result.schedule.intended_s, result.outcomes
    window = arrival >= result.stage.warmup_s
    e2e, ttft = (np.array(out.last_s) - arrival)[window], (np.array(out.first_s) - arrival)[window]
    latency = {"e2e_s": summarise(e2e), "ttft_s": summarise(ttft)}
    none = Interval(None)
    return StageAnalysis(
        stage=result.stage.index, repeat=result.stage.repeat, name=result.stage.name,
        offered_qps=result.stage.offered_qps, process="poisson", window_s=float(np.ptp(arrival[window])),
        planned=int(window.sum()), counts={"ok": int(window.sum())}, arrival_qps=0.0, completed_qps=0.0,
        goodput_qps=0.0, output_tps=0.0, latency=latency, survivors=latency, attainment_ttft=none,
        attainment_tpot=none, attainment_joint=none, attainment_e2e=none, attainment_low=0.0, attainment_high=1.0,
        attainment_survivors=None, binding_clause="none", verdict="MET", stationarity="STABLE",
        in_flight_growth_qps=None, little=_empty(Little), stimulus=_empty(Stimulus),
    )  # fmt: skip


def _empty(kind: type) -> Any:
    """An instance that nobody reads."""
    return object.__new__(kind)


def three(
    qps: float, seed: int, same: bool, noise_cv: float = NOISE_CV, stage_s: float = STAGE_S
) -> list[Repeatability]:
    """What the analysis says of one plan of three repeats: P95 of E2E and of TTFT."""
    config = config_of(same, noise_cv, stage_s)
    engine = EngineConfig.from_config(config)
    plan = build_plan(config, "repeat", qps=[qps], duration_s=stage_s, repeats=REPEATS, seed=seed)
    stages = [as_stage(simulate_stage(plan, stage, config, engine)) for stage in plan.stages]
    return repeatability(stages, {stage.index: stage.seed for stage in plan.stages})


def repeats(sets: int) -> list[dict[str, Any]]:
    """Per rate, statistic and kind of seed: ranges of `sets` sets of three runs."""
    rows = []
    for qps in RATES:
        for same in (True, False):
            found = [three(qps, SEED + k, same) for k in range(sets)]
            for which in range(len(found[0])):
                one = [f[which] for f in found]
                values = np.array([r.values for r in one])
                ranges = np.array([r.range_ratio for r in one], dtype=float)
                mean = values.mean(axis=1)
                rows.append({
                    "qps": qps, "load": qps / CAPACITY, "same": same, "statistic": one[0].statistic,
                    # within a set: its variance is the mean of the sets' own
                    "cv": float(np.sqrt(np.mean((values.std(axis=1, ddof=1) / mean) ** 2))),
                    "median": float(np.median(ranges)), "max": float(ranges.max()),
                    "ok": float(np.mean([bool(r.ok) for r in one])), "judged": qps / CAPACITY <= 0.921,
                    "small": float(np.mean((values.max(axis=1) - values.min(axis=1)) < 1e-3)),
                })  # fmt: skip
                print(f"repeats {rows[-1]}", flush=True)
    return rows


def section(rows: list[dict[str, Any]], sets: int) -> list[str]:
    """The lines of the section."""
    same = [r for r in rows if r["same"]]
    judged = max(r["max"] for r in same if r["judged"] and r["statistic"] == "e2e_p95_s")
    everywhere = max(r["max"] for r in same if r["statistic"] == "e2e_p95_s")
    body = [[
        f"{r['qps']:g}", f"{r['load']:.3f}", "same" if r["same"] else "other", r["statistic"].removesuffix("_s"),
        f"{r['cv']:.2%}", f"{r['median']:.2%}", f"{r['max']:.2%}", f"{r['ok']:.2f}",
        "-" if r["same"] else ("yes" if r["cv"] <= ATTAINABLE_CV else "no"), _verdict(r),
    ] for r in rows]  # fmt: skip
    other = [r for r in rows if not r["same"] and r["statistic"] == "e2e_p95_s"]
    fine = [r["qps"] for r in other if r["cv"] <= ATTAINABLE_CV]
    return [
        "## Repeats: three runs of one load", "",
        f"Written on {today()}; {sets} sets of {REPEATS} runs a row, plans with the seeds {SEED}+, the embedded engine "
        f"in virtual time (reference-shape, step noise of CV {NOISE_CV:.0%}, stages of {STAGE_S:g} s, {WARMUP_S:g} s "
        "cut). Range: (largest - smallest)/mean of three P95. Same seed: the same arrivals and lengths, other step "
        f"noise; asked: at most {SAME_SEED_LIMIT:.0%}. Other seeds: at most {OTHER_SEED_LIMIT:.0%}, where that is "
        f"attainable (CV at most {ATTAINABLE_CV:.1%}). *Judged ok*: by `analysis.repeatability`, which lets ranges "
        "below a millisecond pass.", "",
        f"Same seed, P95 of E2E, largest range up to 92 % load {at_most(judged, SAME_SEED_LIMIT)}, of all rates "
        f"{everywhere:.2%}. Other seeds: 15 % is attainable at {', '.join(f'{q:g}' for q in fine)} requests/s; there "
        "the load that was drawn, not the service, makes the difference. In virtual time no network and no client add "
        "to the spread, so this is the part that the service and the method cannot be without. P95 of TTFT stands "
        "where a queue begins (from about 80 % load on): there it is the wait of a few bursts, and spreads as they "
        "do.", "",
        *table(["requests/s", "load", "seed", "statistic", "CV within a set", "median range", "largest range",
                "judged ok", "15 % attainable", "verdict"], body),
    ]  # fmt: skip


def _verdict(r: dict[str, Any]) -> str:
    """Met when every set is ok; for other seeds where it is attainable."""
    if r["same"]:
        return met(r["ok"] == 1)
    return met(r["ok"] == 1) if r["cv"] <= ATTAINABLE_CV else "not attainable"


def real(config: Path, qps: float, seconds: float) -> list[dict[str, Any]]:
    """What `bench run --shape repeat` says of three short runs over HTTP, same seed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "bench", "run", "--config", str(config), "--shape", "repeat",
                   "--qps", f"{qps:g}", "--stage-duration", f"{seconds:g}", "--run-dir", str(run)]  # fmt: skip
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, timeout=5 * seconds + 120)
        return json.loads((run / "analysis.json").read_text(encoding="utf-8"))["repeatability"]


def main() -> None:
    """Three real runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--real", type=Path, required=True, metavar="CONFIG", help="three runs over HTTP with it")
    parser.add_argument("--qps", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(json.dumps(real(options.real, options.qps, options.seconds)))


if __name__ == "__main__":
    main()
