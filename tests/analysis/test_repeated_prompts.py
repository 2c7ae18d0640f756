"""WARN-PROMPTS: the share of a window's requests whose line the run had sent before, counted by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.analysis.synthetic import StageSpec, write_run
from tests.analysis.test_token_counts import changed, reasons
from tests.analysis.test_verdict import QUICK, analyse


def test_a_folder_without_the_column_lacks_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK)
    path = run / "requests.csv"
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    place = rows[0].index("prompt_line")
    path.write_text("".join(",".join(row[:place] + row[place + 1 :]) + "\n" for row in rows), encoding="utf-8")
    found = analyse(run)
    assert "LED-002" not in {p["problem_id"] for p in found.ledger["problems"]}
    assert "WARN-PROMPTS" not in reasons(found)


def test_no_file_no_word(tmp_path: Path) -> None:
    assert "WARN-PROMPTS" not in reasons(changed(tmp_path, lambda _, row: None))


def test_every_line_once_is_no_repeat(tmp_path: Path) -> None:
    assert "WARN-PROMPTS" not in reasons(changed(tmp_path, lambda n, row: row.update(prompt_line=str(n + 1))))


@pytest.mark.parametrize("lines", [1, 7, 50])
def test_repeats_are_counted_in_order_of_the_plan(tmp_path: Path, lines: int) -> None:
    """Second path: a set of what was sent, row by row in order of the intended time."""
    rows: list[dict[str, str]] = []
    found = changed(tmp_path, lambda n, row: (row.update(prompt_line=str(n % lines + 1)), rows.append(row)))
    seen: set[str] = set()
    hits: dict[str, list[bool]] = {}
    for row in sorted(rows, key=lambda r: float(r["intended_s"])):
        if row["status"] == "unsent":
            continue
        if row["phase"] == "window":
            hits.setdefault(row["stage"], []).append(row["prompt_line"] in seen)
        seen.add(row["prompt_line"])
    for stage in found.stages:
        said = [r for r in stage.reasons if r.reason_id == "WARN-PROMPTS"]
        share = sum(hits[str(stage.stage)]) / len(hits[str(stage.stage)])
        assert [r.value for r in said] == ([pytest.approx(share)] if share else [])
        assert all(r.severity == ("warn" if share > 0.05 else "info") for r in said)
    worst = max(sum(h) / len(h) for h in hits.values())
    assert [r.value for r in found.verdict.reasons if r.reason_id == "WARN-PROMPTS"] == [pytest.approx(worst)]


def test_a_prompt_that_was_never_sent_warms_nothing(tmp_path: Path) -> None:
    """The first half of each pair is not sent, so its line is new for the second half."""

    def pairs(n: int, row: dict[str, str]) -> None:
        row.update(prompt_line=str(n // 2 + 1))
        if n % 2 == 0:
            row.update(status="unsent", code="CL-STOP", error_kind="unsent")

    assert "WARN-PROMPTS" not in reasons(changed(tmp_path, pairs))
