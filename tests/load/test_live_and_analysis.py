"""The live view and the analysis say the same about the same rows: two ways of counting, one in memory, one from files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import client_ceiling as ceiling_module
from analysis import stage as stage_module
from bench.records.clauses import lag_limit_s
from bench.records.packing import batch_of, pack, unpack
from bench.records.request import FIELD_NAMES, RequestRow
from bench.workload import stage_count as count_module
from locustfiles.live import Live
from tests.analysis.synthetic import StageSpec, default_config, make_run, write_csv, write_run
from tests.analysis.test_verdict import QUICK, analyse
from tests.load.test_live import opened, row

SPEC = StageSpec(20, 40, 5)


def without_tpot(made: RequestRow, rng: np.random.Generator) -> RequestRow:
    """The row of an answer whose gaps nobody saw: short or long, counted by the service or by its events."""
    tokens, asked = int(rng.choice([1, 2, 7, 8, 300])), int(rng.choice([1, 7, 8, 300]))
    kind = rng.choice(["usage", "events", "hidden", "wrong usage"])
    cells: dict[str, Any] = {"output_tokens": tokens, "chunks": 1, "flags": "", "max_tokens": max(asked, tokens)}
    if kind == "events":
        cells |= {"output_tokens": 1, "flags": "tokens_estimated", "max_tokens": asked}
    elif kind == "hidden":
        cells |= {"reasoning_tokens": int(rng.integers(0, tokens + 1)), "flags": "burst;hidden_reasoning"}
    elif kind == "wrong usage":
        cells |= {"output_tokens": 1, "chunks": int(rng.choice([3, 7, 8, 40]))}
    return replace(made, tpot_s=None, **cells)


def written(folder: Path, rows: list[RequestRow], config: dict[str, Any]) -> Any:
    run = write_run(folder, [SPEC], QUICK, config=config)
    write_csv(run / "requests.csv", FIELD_NAMES, rows)
    for name in run.glob("locust_*.csv"):
        name.unlink()
    return analyse(run).stages[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "batch"])
def test_attainment_of_a_stage_is_that_of_the_analysis(tmp_path: Path, seed: int, packed: bool) -> None:
    rng = np.random.default_rng(seed)
    rows, stages, _ = make_run([SPEC], QUICK)
    share = float(rng.choice([0.0, 0.02, 0.3, 1.0]))
    rows = [without_tpot(each, rng) if each.status == "ok" and rng.random() < share else each for each in rows]
    known = [each.tpot_s for each in rows if each.tpot_s is not None] or [0.01]
    config = default_config()
    config["slo"] |= {"ttft_deadline_ms": 1000 * float(np.quantile([each.ttft_s for each in rows], 0.9)),
                      "tpot_deadline_ms": 1000 * float(np.quantile(known, 0.8))}  # fmt: skip
    found = written(tmp_path / "r", rows, config)

    live = Live()
    slo = {"ttft_s": config["slo"]["ttft_deadline_ms"] / 1e3, "tpot_s": config["slo"]["tpot_deadline_ms"] / 1e3,
           "e2e_s": config["slo"]["p95_target_ms"] / 1e3, "target": 0.99}  # fmt: skip
    live.open_run(opened().plan, {"model": "m", "target_qps": 20.0, "slo": slo, "gates": []}, run_id="r", run_dir="r",
                  loop="open")  # fmt: skip
    stage = live.open_stage(live.plan.stages[0], [])
    live.begin_stage(stages[0].start_s)
    live.add_rows(0, unpack(pack(rows)) if packed else rows)
    live.end_stage(stages[0].end_s, [])
    assert stage.rows == found.planned
    assert stage.met_tpot / stage.rows == pytest.approx(found.attainment_tpot.value, abs=1e-12)
    assert stage.met_ttft / stage.rows == pytest.approx(found.attainment_ttft.value, abs=1e-12)
    assert stage.attainment(0.0)[0] == pytest.approx(found.attainment_joint.value, abs=1e-12)
    assert (stage.unmeasured > 0) == (share > 0) or share == 0.02  # else the case shows nothing
    summary = live.summary(50.0)["stages"][0]
    assert summary["tpot_unmeasured"] == stage.unmeasured


@pytest.mark.parametrize("lag_s", [0.030, 0.045])
def test_a_late_sender_is_late_here_where_the_analysis_says_so(tmp_path: Path, lag_s: float) -> None:
    """The deadline is 800 ms: the limit is 40. Two in a hundred are late by `lag_s`, more than one must not be."""
    rows, stages, _ = make_run([SPEC], QUICK)
    late = [i % 50 == 0 for i in range(len(rows))]
    rows = [
        replace(each, sent_s=each.intended_s + lag_s, send_lag_s=lag_s, residence_s=each.done_s - each.intended_s - lag_s)
        if slow else each for each, slow in zip(rows, late, strict=True)
    ]  # fmt: skip
    found = written(tmp_path / "r", rows, default_config())
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [])
    live.begin_stage(stages[0].start_s)
    live.add_rows(0, rows)
    live.end_stage(stages[0].end_s, [])
    assert stage.late() == ("INV-LAG" in {r.reason_id for r in found.reasons}) == (lag_s > 0.040)
    summary = live.summary(50.0)
    assert summary["stages"][0]["sender_late"] == (lag_s > 0.040)
    assert summary["stages"][0]["send_lag_limit_s"] == pytest.approx(0.04)
    assert summary["run_verdict"].startswith("invalid so far: our own sender is late") == (lag_s > 0.040)


@pytest.mark.parametrize(("deadline_s", "limit_s"), [(0.02, 0.005), (0.1, 0.005), (0.12, 0.006), (0.8, 0.04), (30.0, 1.5)])
def test_the_limit_of_the_send_lag(deadline_s: float, limit_s: float) -> None:
    """5 % of the deadline, at least 5 ms; live view, analysis and `bench calibrate-client` have no other."""
    assert lag_limit_s(deadline_s) == pytest.approx(limit_s)
    assert count_module.lag_limit_s is stage_module.lag_limit_s is ceiling_module.lag_limit_s is lag_limit_s


def test_a_few_late_sends_at_the_start_decide_nothing_yet() -> None:
    """99 sends, one of them late: that is the p99 of so few, and no fault once a hundred are there."""
    live = opened()
    stage = live.open_stage(live.plan.stages[0], [3.0] * 200)
    live.begin_stage(0.0)
    rows = [replace(row(i), send_lag_s=0.5 if i == 0 else 0.001) for i in range(200)]
    live.add_rows(0, rows[:99])
    assert not stage.late()
    live.add_rows(0, rows[99:])
    assert not stage.late()
    live.add_rows(0, [replace(row(200 + i), send_lag_s=0.5) for i in range(3)])
    assert stage.late()  # 4 of 203; 201 must be in time


def test_the_warm_up_is_no_part_of_the_send_lag() -> None:
    for packed in (False, True):
        live = opened()
        stage = live.open_stage(live.plan.stages[0], [])
        live.begin_stage(0.0)
        rows = [replace(row(0, phase="warmup"), send_lag_s=0.5), row(1)]
        live.add_rows(0, batch_of(rows) if packed else rows)
        assert stage.send_lag.n == 1 and stage.in_time == 1
