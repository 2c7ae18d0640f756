"""WARN-GONE: a service that died in the middle of a stage is named, with the moment, and not taken for an overload."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.records.analysis import Analysis
from tests.analysis.synthetic import StageSpec, write_run
from tests.analysis.test_verdict import QUICK, analyse

DIED_S = 20.0


def died(tmp_path: Path, codes: tuple[str, ...], *, back_s: float = 1e9) -> tuple[Analysis, list[float]]:
    """A stage whose requests due after DIED_S fail with `codes` in turn, until `back_s`; and when these were due."""
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK)
    path = run / "requests.csv"
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    due = []
    for number, row in enumerate(rows):
        at = float(row["intended_s"])
        if row["status"] == "ok" and DIED_S <= at < back_s:
            due += [at] if row["phase"] == "window" else []
            for name in ("first_token_s", "first_content_s", "last_token_s", "ttft_s", "ttfo_s", "tpot_s", "e2e_s",
                         "output_tokens", "chunks", "http_status", "finish_reason"):  # fmt: skip
                row[name] = ""
            row.update(status="error", error_kind="connection", code=codes[number % len(codes)])
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for name in run.glob("locust_*.csv"):
        name.unlink()
    return analyse(run), sorted(due)


@pytest.mark.parametrize("codes", [("CH-REFUSED",), ("CH-REFUSED", "CH-RESET", "CH-REFUSED"), ("CH-502",)])
def test_a_service_that_died_is_named_with_the_moment(tmp_path: Path, codes: tuple[str, ...]) -> None:
    found, due = died(tmp_path, codes)
    said = {r.reason_id: r for r in found.verdict.reasons}["WARN-GONE"]
    assert said.params["since_s"] == pytest.approx(due[0]) and said.params["count"] == len(due) > 100
    assert said.params["code"] == codes[0] and said.severity == "warn"
    assert f"from {due[0]:.1f} s of the run on no request got an answer" in said.text
    assert found.verdict.status == "FAIL"  # its users got no answer; that is no fault of the measurement


@pytest.mark.parametrize(
    ("codes", "back_s"),
    [
        (("CH-REFUSED",), 25.0),  # it came back: the misses are in the numbers, and the stage goes on
        (("SV-503",), 1e9),  # refusals under load are the service's own
        (("CH-TO-FIRST",), 1e9),  # so is a queue
        (("SC-TRUNCATED",), 1e9),
    ],
)
def test_other_failures_are_not_taken_for_it(tmp_path: Path, codes: tuple[str, ...], back_s: float) -> None:
    found, due = died(tmp_path, codes, back_s=back_s)
    assert due and not [r for s in found.stages for r in s.reasons if r.reason_id == "WARN-GONE"]
