"""Shape `knee_search` against the embedded engine: real HTTP, short stages, the knee that virtual time has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.config import load_config
from bench.workload.plan import build_plan
from engine.settings import EngineConfig
from engine.simulate import simulate_stage

from .conftest import config_with

# Step = 18 ms + 1.2 ms per running sequence: TPOT passes 40 ms at about 18 of them, long before the cap of 32.
# The system forgets within a second, so stages of three seconds already show their rate.
CONFIG = config_with(
    engine={"embedded": True, "profile": "reference-shape", "time_scale": 30.0, "noise_cv": 0.0},
    slo={"ttft_deadline_ms": 5000, "tpot_deadline_ms": 40, "p95_target_ms": 8000, "attainment_target": 0.9},
    admission={"reject_on_budget_exceed": False},
    loadgen={"target_qps": 10, "input_len_range": [4, 20], "output_len_mu": 2.3},
    sweep={"warmup_sec": 0.5, "drain_limit_sec": 2},
    search={"stage_sec": 3, "max_duration_sec": 36, "hold_sec": 2, "width_ratio": 0.3},
)


def virtual_knee(path: Path) -> float:
    """Bisection in virtual time, 100 s per rate; good to about 3 %."""
    config = load_config(path, env={}).config
    engine, slo = EngineConfig.from_config(config), config.slo
    low, high = 10.0, 60.0
    for _ in range(6):
        rate = (low + high) / 2
        plan = build_plan(config, "single", qps=[rate], duration_s=100.0, seed=5)
        rows = [r for r in simulate_stage(plan, plan.stages[0], config, engine).rows() if r.phase == "window"]
        met = [r.status == "ok" and (r.tpot_s or 0.0) <= slo.tpot_deadline_ms / 1e3 for r in rows]
        low, high = (rate, high) if np.mean(met) >= slo.attainment_target else (low, rate)
    return (low + high) / 2


@pytest.mark.slow
def test_the_search_finds_the_knee_of_virtual_time_and_holds_the_watermark(run_bench: Any) -> None:
    """Stages of three seconds on a busy machine: the interval, widened by 15 %, holds the virtual knee."""
    ran = run_bench("--shape", "knee_search", config=CONFIG, timeout=110)
    assert ran.code in (0, 1, 4), ran.out + ran.err  # 4: this machine was too busy for one of the stages
    log = (ran.run_dir / "log.txt").read_text(encoding="utf-8")
    stages = ran.rows("stages.csv")
    analysis = json.loads((ran.run_dir / "analysis.json").read_text(encoding="utf-8"))
    assert analysis["run"]["shape"] == "knee_search" and "Traceback" not in ran.err + log
    assert [s["name"].split("@")[1] for s in stages][0] == "10" and len(stages) >= 3
    assert len({s["seed"] for s in stages}) == len(stages)  # no load is sent twice
    assert float(stages[-1]["drained_s"] or stages[-1]["end_s"]) <= CONFIG["search"]["max_duration_sec"]
    assert all(int(s["rows"]) == int(s["planned"]) for s in stages)
    invalid = sum(s["verdict"] == "INVALID" for s in analysis["stages"])
    if invalid > len(stages) // 2 or (invalid and analysis["capacity"]["knee_kind"] != "crossing"):
        pytest.skip("the machine is too busy to send on time: the search refused its stages, as it must")
    knee = analysis["capacity"]
    assert knee["knee_method"].startswith("adaptive search"), knee
    assert knee["knee_kind"] == "crossing", log[-2000:]
    truth = virtual_knee(ran.run_dir.parent / "config.json")
    assert knee["knee_low_qps"] / 1.15 <= truth <= knee["knee_high_qps"] * 1.15, (knee, truth)
    assert stages[-1]["name"].endswith(" hold") and "search: hold" in log
    assert float(stages[-1]["offered_qps"]) == pytest.approx(0.75 * knee["knee_low_qps"], rel=0.2)
    assert "The hold at the watermark" in knee["sentence"]
