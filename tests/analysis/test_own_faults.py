"""INV-FAULT and INV-PROMPTS: what our own side did wrong is never the service's miss, and is the first reason given."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.records.analysis import Analysis
from tests.analysis.synthetic import StageSpec, write_run
from tests.analysis.test_verdict import QUICK, analyse

STAMPS = ("first_token_s", "first_content_s", "last_token_s", "ttft_s", "ttfo_s", "tpot_s", "e2e_s", "output_tokens",
          "chunks", "http_status", "finish_reason")  # fmt: skip
UNSENT = ("sent_s", "done_s", "send_lag_s", "residence_s")


def faulty(tmp_path: Path, every: int, *, sent: bool, marks: str = "") -> tuple[Analysis, int]:
    """A stage in which each `every`th row is CL-BUG with the status `error`; and how many of the window are."""
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK)
    path = run / "requests.csv"
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    count = 0
    for number, row in enumerate(rows):
        if number % every == 0:
            count += row["phase"] == "window"
            row.update(dict.fromkeys(STAMPS if sent else STAMPS + UNSENT, ""))
            row.update(status="error", error_kind="client", code="CL-BUG")
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if marks:
        text = (run / "stages.csv").read_text(encoding="utf-8").rstrip("\n")
        (run / "stages.csv").write_text(text + marks + "\n", encoding="utf-8")
    for name in run.glob("locust_*.csv"):
        name.unlink()
    return analyse(run), count


@pytest.mark.parametrize("every", [1, 2, 10])
def test_what_our_own_fault_did_not_send_is_unsent_and_no_miss(tmp_path: Path, every: int) -> None:
    found, count = faulty(tmp_path, every, sent=False)
    stage = found.stages[0]
    said = [r.reason_id for r in stage.reasons if r.severity == "invalid"]
    assert found.verdict.status == "INVALID" and stage.verdict == "INVALID"
    assert said[0] == "INV-FAULT" and "INV-RATE" in said and found.verdict.reasons[0].reason_id == "INV-FAULT"
    assert stage.counts["unsent"] == count and stage.counts["error"] == 0
    assert stage.stimulus.sent == stage.planned - count  # by hand
    assert stage.attainment_high > 0.98  # nobody knows what they would have got


def test_a_fault_after_the_send_makes_the_stage_invalid_too(tmp_path: Path) -> None:
    found, count = faulty(tmp_path, 50, sent=True)
    assert found.verdict.status == "INVALID" and found.stages[0].counts["error"] == count > 0
    assert [r.reason_id for r in found.stages[0].reasons if r.severity == "invalid"] == ["INV-FAULT"]


def test_without_a_fault_nothing_is_said(tmp_path: Path) -> None:
    found, _ = faulty(tmp_path, 10**9 + 1, sent=True, marks="")
    assert found.stages[0].verdict == "INVALID"  # row 0 alone, which lies in the warm-up: the stage is not the plan
    clean = analyse(write_run(tmp_path / "clean", [StageSpec(20, 30, 5)], QUICK))
    assert not [r for r in clean.stages[0].reasons if r.reason_id in ("INV-FAULT", "INV-PROMPTS")]


@pytest.mark.parametrize(
    ("marks", "code", "gone"),
    [
        ("prompts_changed", "INV-PROMPTS.prompts_changed", {"INV-FAULT"}),
        ("not_prepared;prompts_differ", "INV-PROMPTS.prompts_differ", {"INV-RATE", "INV-PLAN"}),
    ],
)
def test_a_changed_file_of_prompts_is_the_first_cause(tmp_path: Path, marks: str, code: str, gone: set[str]) -> None:
    found, _ = faulty(tmp_path, 2, sent=False, marks=marks)
    said = [r for r in found.stages[0].reasons if r.severity == "invalid"]
    assert said[0].code == code and "loadgen.prompts_file" in said[0].text
    assert not gone & {r.reason_id for r in said}
