"""`abort` gates in virtual time: the sweep ends behind the first whole stage that misses one, as a measured run does."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.commands.simulate import command

RATES = (5.0, 15.0, 30.0, 40.0)  # one H100-8B with these answers holds about 20 requests/s
SLO_S = (0.8, 0.1)  # TTFT, TPOT
CONFIG = {
    "scheduler": {"policy": "fcfs", "max_num_seqs": 32, "batch_size_cap": 32},
    "admission": {"reject_on_budget_exceed": False},
    "slo": {"ttft_deadline_ms": 1000 * SLO_S[0], "tpot_deadline_ms": 1000 * SLO_S[1], "p95_target_ms": 20_000},
    "loadgen": {"output_len_mu": 4.4, "duration_sec": 20.0, "target_qps": 15.0},
    "sweep": {"warmup_sec": 2.0, "qps": list(RATES), "drain_limit_sec": 60.0},
}


def simulated(folder: Path, gates: list[dict[str, Any]], *more: str) -> Result:
    folder.mkdir()
    (folder / "c.json").write_text(json.dumps({**CONFIG, "gates": gates}), encoding="utf-8")
    return CliRunner().invoke(command, ["-c", str(folder / "c.json"), "--run-dir", str(folder / "run"), *more])


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "run" / name).open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "w"
    assert simulated(folder, [], "--no-report").exit_code == 0
    return folder


def window(folder: Path, stage: int) -> list[dict[str, str]]:
    return [r for r in rows(folder, "requests.csv") if int(r["stage"]) == stage and r["phase"] == "window"]


def attainment(folder: Path, stage: int) -> float:
    """Counted here: TTFT and TPOT of every planned arrival of the window."""
    met = [
        r["status"] == "ok" and float(r["ttft_s"]) <= SLO_S[0] and (not r["tpot_s"] or float(r["tpot_s"]) <= SLO_S[1])
        for r in window(folder, stage)
    ]
    return sum(met) / len(met)


def p95_s(folder: Path, stage: int) -> float:
    """Nearest rank of TTFT; who did not answer waits for ever."""
    values = sorted(float(r["ttft_s"]) if r["status"] == "ok" else math.inf for r in window(folder, stage))
    return values[math.ceil(0.95 * len(values)) - 1]


def test_the_sweep_ends_behind_the_first_stage_that_misses(whole: Path, tmp_path: Path) -> None:
    shares = [attainment(whole, i) for i in range(4)]
    assert min(shares[:2]) > 0.95 and shares[2] < 0.9  # else the case shows nothing
    done = simulated(tmp_path / "a", [{"metric": "attainment", "operator": ">=", "value": 0.9, "at": "all", "abort": True}])
    assert done.exit_code == 1, done.output
    said = f"gate attainment >= 0.9 at all was missed in 02 chat @30: {shares[2]:.4g}"
    assert f"stopped in order: {said}" in done.output
    marks = [r["marks"] for r in rows(tmp_path / "a", "stages.csv")]
    assert marks == ["", "", "gate_abort", "not_run"]
    kept = [r for r in rows(whole, "requests.csv") if int(r["stage"]) < 3]
    assert rows(tmp_path / "a", "requests.csv") == kept  # a stage is never cut short, and the others are as without a gate
    info = json.loads((tmp_path / "a" / "run" / "run.json").read_text(encoding="utf-8"))
    found = json.loads((tmp_path / "a" / "run" / "analysis.json").read_text(encoding="utf-8"))
    assert info["stopped_by"] == said
    assert [r["text"] for r in found["verdict"]["reasons"] if r["reason_id"] == "WARN-ABORT"] == [
        f"the run was stopped early: {said}"
    ]


@pytest.mark.parametrize("way", ["above", "below"])
def test_a_percentile_is_compared_exactly(whole: Path, tmp_path: Path, way: str) -> None:
    exact_ms = 1000 * p95_s(whole, 1)
    value = exact_ms * (1 + 1e-6 if way == "above" else 1 - 1e-6)
    gate = {"metric": "ttft", "statistic": "p95", "operator": "<=", "value": value, "at": 15, "abort": True}
    assert simulated(tmp_path / "a", [gate], "--no-report", "-q").exit_code == 0
    marks = [r["marks"] for r in rows(tmp_path / "a", "stages.csv")]
    assert marks == (["", "", "", ""] if way == "above" else ["", "gate_abort", "not_run", "not_run"])


def test_a_gate_without_abort_or_of_another_stage_stops_nothing(whole: Path, tmp_path: Path) -> None:
    never = {"metric": "attainment", "operator": ">=", "value": 1.0, "at": 40, "abort": True}
    gates = [{**never, "at": "all", "abort": False}, never]
    assert simulated(tmp_path / "a", gates, "--no-report").exit_code == 0
    assert rows(tmp_path / "a", "requests.csv") == rows(whole, "requests.csv")
    assert [r["marks"] for r in rows(tmp_path / "a", "stages.csv")] == ["", "", "", "gate_abort"]  # the last is whole too


def test_the_stop_is_said_with_quiet_too(tmp_path: Path) -> None:
    gate = {"metric": "attainment", "operator": ">=", "value": 1.0, "at": "max", "abort": True}
    done = simulated(tmp_path / "a", [gate], "--qps", "5,40", "--no-report", "--quiet")
    assert "stopped in order: gate attainment >= 1 at max was missed in 01 chat @40" in done.stderr and done.stdout == ""
