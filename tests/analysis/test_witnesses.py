"""A run without the records that could contradict its ledger says so; one that never had them is left alone."""
from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from analysis.analyse import analyse_run
from analysis.witnesses import missing_witnesses
from bench.commands.analyse import verdict_lines
from bench.records.analysis import Analysis
from tests.analysis.synthetic import Service, StageSpec, default_config, write_run

QUICK = Service(mu=4.4)
CSV_MISSING = "; locust_stats.csv is missing, so the ledger is not checked by it."
GAUGE_MISSING = "; inflight.csv is missing, so the ledger is not checked by it."


def judged(folder: Path) -> Analysis:
    return analyse_run(folder, models=False)


def ids(found: Analysis) -> set[str]:
    return {r.reason_id for r in found.verdict.reasons}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK)


def test_one_missing_witness_is_named_in_the_first_line(folder: Path) -> None:
    assert judged(folder).verdict.sentence == "The SLO holds at 20 requests/s."
    (folder / "locust_stats.csv").rename(folder / "kept.csv")
    found = judged(folder)
    assert found.verdict.status == "PASS" and "WARN-WITNESS" in ids(found)
    assert found.verdict.sentence == "The SLO holds at 20 requests/s" + CSV_MISSING
    assert any("WARN-WITNESS" in line for line in verdict_lines(found))
    (folder / "kept.csv").rename(folder / "locust_stats.csv")
    (folder / "inflight.csv").unlink()
    found = judged(folder)
    assert found.verdict.status == "PASS" and "LED-015" in ids(found) and "WARN-WITNESS" not in ids(found)
    assert found.verdict.sentence == "The SLO holds at 20 requests/s" + GAUGE_MISSING


def test_a_gauge_without_a_sample_is_no_gauge(folder: Path) -> None:
    lines = (folder / "inflight.csv").read_text().splitlines(keepends=True)
    (folder / "inflight.csv").write_text(lines[0])
    found = judged(folder)
    assert "LED-015" in ids(found) and found.verdict.sentence.endswith(GAUGE_MISSING)
    assert any("holds no sample" in r.text for r in found.verdict.reasons)


def test_without_both_only_the_ledger_speaks_for_itself(folder: Path) -> None:
    for name in ("locust_stats.csv", "inflight.csv"):
        (folder / name).unlink()
    found = judged(folder)
    assert (found.verdict.status, found.verdict.exit_code) == ("INVALID", 4)
    assert found.verdict.sentence.startswith(
        "The measurement is not to be trusted: locust_stats.csv and inflight.csv are missing"
    )
    assert found.capacity.knee_low_qps is None


def test_a_miss_names_the_missing_witness_too(tmp_path: Path) -> None:
    config = default_config(20)
    config["slo"] = config["slo"] | {"p95_target_ms": 1}
    found = judged(write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, config=config, locust_csv=False))
    assert found.verdict.status == "FAIL" and found.verdict.sentence.endswith(CSV_MISSING)


@pytest.mark.parametrize(
    "over",
    [
        {"simulated": True},
        {"problems": ["put together by `bench recover` from 3 shards: the master was lost"]},
        {"worker_info": [{"worker": 0, "part": "1/2", "bound_s": 0.0, "shared": True}]},
    ],
)
def test_a_run_that_never_had_them_is_not_hurt(folder: Path, over: dict) -> None:
    for name in ("locust_stats.csv", "inflight.csv"):
        (folder / name).unlink()
    document = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(document | over))
    found = judged(folder)
    assert found.verdict.status == "PASS" and found.verdict.sentence == "The SLO holds at 20 requests/s."


def test_what_recover_writes_is_what_is_looked_for() -> None:
    """The words of `bench recover`, taken from its source: a change there must reach `witnesses.py`."""
    from bench.commands import recovery

    assert "put together by `bench recover`" in Path(recovery.__file__).read_text()
    assert missing_witnesses({}, locust_stats=False, gauge=False) == ()


def test_a_gauge_that_skips_the_deciding_stage_is_said(folder: Path) -> None:
    """The samples of the only window taken out, those of warm-up and drain left."""
    with (folder / "stages.csv").open(newline="") as stream:
        (stage,) = csv.DictReader(stream)
    lines = (folder / "inflight.csv").read_text().splitlines(keepends=True)
    start, end = float(stage["window_start_s"]), float(stage["window_end_s"])
    kept = [line for line in lines[1:] if not start <= float(line.split(",")[0]) <= end]
    assert 10 < len(kept) < len(lines) - 100
    (folder / "inflight.csv").write_text("".join([lines[0], *kept]))
    found = judged(folder)
    assert "WARN-GAUGE" in ids(found) and "there is no independent gauge" in "\n".join(verdict_lines(found))
