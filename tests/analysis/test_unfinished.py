"""A run whose master died is INVALID whatever its rows say; a refused connection is no fault of the sender."""
from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from analysis.analyse import analyse_run
from tests.analysis.synthetic import Service, StageSpec, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", [StageSpec(20, 60, 5)], Service(), seed=3, target_qps=20)
    return tmp_path / "run"


def test_a_run_without_an_end_is_invalid(folder: Path) -> None:
    assert analyse_run(folder, models=False).verdict.status == "PASS"
    info = json.loads((folder / "run.json").read_text())
    info["finished_utc"] = None
    (folder / "run.json").write_text(json.dumps(info))
    judged = analyse_run(folder, models=False).verdict
    assert (judged.status, judged.exit_code) == ("INVALID", 4)
    assert "INV-UNFINISHED" in {reason.reason_id for reason in judged.reasons}


def test_a_refused_connection_is_an_arrival_that_was_sent(folder: Path) -> None:
    """Half of the arrivals find no connection: attainment falls, the proof of the arrivals stays good."""
    path = folder / "requests.csv"
    with path.open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    keep = ("stage", "arrival", "worker", "repeat", "offered_qps", "phase", "tenant", "request_class", "request_id",
            "intended_s", "input_tokens", "max_tokens")  # fmt: skip
    for row in rows[::2]:
        row.update({name: "" for name in row if name not in keep})
        row.update(status="error", code="CH-REFUSED", error_kind="connection", done_s=row["intended_s"])
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    stage = analyse_run(folder, models=False).stages[0]
    assert stage.stimulus.rate_error_ratio == pytest.approx(0, abs=0.01)
    assert {"INV-RATE", "INV-GAPS"}.isdisjoint(reason.reason_id for reason in stage.reasons)
    assert stage.attainment_joint.value == pytest.approx(0.5, abs=0.02)
