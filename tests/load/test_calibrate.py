"""`bench calibrate` on a real HTTP run of the embedded engine gives back the engine's step time."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .conftest import clean_environment, config_with

SCALE = 30.0
# Steps of 18 ms + 1.2 ms per sequence: a stamp that is a millisecond late moves an answer of 30 tokens by 0.2 %.
CONFIG = config_with(
    engine={"embedded": True, "profile": "reference-shape", "time_scale": SCALE, "noise_cv": 0.0},
    slo={"ttft_deadline_ms": 5000, "tpot_deadline_ms": 100, "p95_target_ms": 8000, "attainment_target": 0.9},
    loadgen={"target_qps": 12, "duration_sec": 8, "input_len_range": [4, 100], "output_len_dist": "uniform",
             "output_len_range": [21, 50]},
    sweep={"qps": [4, 12], "warmup_sec": 1},
)  # fmt: skip


@pytest.mark.slow
def test_a_measured_run_gives_back_the_engine(run_bench: Any) -> None:
    ran = run_bench(config=CONFIG)
    assert ran.code in (0, 1, 4), ran.out + ran.err
    out = ran.run_dir.parent / "mine.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench", "calibrate", str(ran.run_dir), "-o", str(out), "--json"],
        env=clean_environment(), capture_output=True, text=True, check=False, cwd=ran.run_dir.parent, timeout=60,
    )  # fmt: skip
    if done.returncode == 4 and "INVALID" in done.stderr:
        pytest.skip("the machine was too busy to send on time: the run is INVALID and calibrate refused it, as it must")
    assert done.returncode == 0, done.stderr
    from engine.profiles import PROFILES, load_profile

    profile, truth = load_profile(str(out)), PROFILES["reference-shape"]
    assert profile.kind == "measured" and profile.calibration["measured"] is True
    # a step of 4 sequences: (0.6 ms + 4 * 0.04 ms) * 30 = 22.8 ms; 5 % for a busy machine of two cores
    assert profile.step_s(4, 4) == pytest.approx(SCALE * truth.step_s(4, 4), rel=0.05)
    tpot = [r for r in json.loads(done.stdout)["compare"] if r["statistic"] == "tpot p50"]
    assert len(tpot) == 2 and all(abs(r["ratio"]) < 0.1 for r in tpot)
