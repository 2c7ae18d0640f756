"""Answers without usage whose tokens nobody counted, and answers whose TPOT nobody measured, are no PASS.

The ledger of a sound run is changed cell by cell, as a gateway that joins events, or a service that sends no usage,
would have written it. Shares are counted by hand from the rows.
"""
from __future__ import annotations

import csv
from pathlib import Path

import pytest

from bench.commands.analyse import verdict_lines
from bench.commands.console import meaning
from bench.records.analysis import Analysis
from reports.summary import markdown

from .synthetic import StageSpec, write_run
from .test_token_counts import QUICK, analyse, changed, reasons


def unknown(row: dict[str, str], asked: int, chunks: int, finish: str = "length") -> None:
    """An answer without usage: its tokens are its events."""
    took = float(row["last_token_s"]) - float(row["first_token_s"])
    row.update(output_tokens=str(chunks), output_tokens_source="chunks", chunks=str(chunks), max_tokens=str(asked),
               finish_reason=finish, flags="tokens_estimated",
               tpot_s=f"{took / (chunks - 1):.9f}" if chunks > 1 else "")  # fmt: skip


def said_codes(found: Analysis) -> set[str]:
    return {r.code for r in found.stages[0].reasons if r.severity == "invalid"}


@pytest.mark.parametrize(
    ("asked", "chunks", "finish", "code"),
    [
        (300, 1, "length", "INV-EVENTS.uncounted"),  # the whole answer in one event
        (300, 3, "length", "INV-EVENTS.uncounted"),  # three tokens, or a hundred in each
        (300, 4, "max_tokens", "INV-EVENTS.uncounted"),
        (300, 60, "length", "INV-EVENTS.uncounted"),  # five in each, or a fifth of the length
        (300, 269, "length", "INV-EVENTS.uncounted"),
        (300, 270, "length", None),  # one token each, some of them without text
        (300, 300, "length", None),
        (8, 6, "length", "INV-EVENTS.uncounted"),
        (8, 7, "length", None),
        (7, 1, "length", None),  # too few for a TPOT worth its name
        (300, 60, "stop", None),  # no claim of the whole length; pinned, it is short
        (300, 1, "stop", "INV-EVENTS.unmeasured"),  # one word, or the whole answer in one piece
        (7, 1, "stop", None),
    ],
)
def test_events_far_fewer_than_asked_are_no_count(
    tmp_path: Path, asked: int, chunks: int, finish: str, code: str | None
) -> None:
    found = changed(tmp_path, lambda _, row: unknown(row, asked, chunks, finish))
    assert said_codes(found) == ({code} if code else set())
    assert (found.verdict.status == "INVALID") == (code is not None)
    if code:
        told = next(r for r in found.stages[0].reasons if r.code == code)
        assert told.value == 1.0 and "include_usage" in told.next_step and "does not stream" in told.next_step
        if code.endswith("uncounted"):
            assert f"{chunks} events for {asked} tokens" in told.text and told.text in found.verdict.sentence


@pytest.mark.parametrize("every", [1, 3, 15, 30])
def test_an_unmeasured_tpot_meets_no_clause(tmp_path: Path, every: int) -> None:
    """Second path: the rows of the window are counted while they are written."""
    window, held = [], []

    def change(number: int, row: dict[str, str]) -> None:
        hidden = number % every == 0
        unknown(row, 300, 1) if hidden else unknown(row, 300, 300)
        if row["phase"] == "window":
            window.append(row)
            held.append(hidden)

    found = changed(tmp_path, change)
    stage, missed = found.stages[0], sum(held)
    assert stage.attainment_tpot.value == pytest.approx(1 - missed / stage.planned)
    assert stage.latency["tpot_s"].n == stage.planned - missed  # nothing is made up for them
    assert (said_codes(found) == {"INV-EVENTS.uncounted"}) == (missed > 0.05 * len(window))
    if every == 30:  # 3 % are no service, and still no hits
        assert found.verdict.status == "FAIL" and "attainment" in found.verdict.sentence


@pytest.mark.parametrize(
    ("usage", "chunks", "allowed", "met"),
    [
        (1, 1, 300, True),  # one token by the service's own count
        (7, 1, 300, True),
        (8, 1, 300, False),
        (300, 1, 300, False),
        (1, 40, 300, False),  # an event holds one token at least: this usage is wrong
        (1, 1, 1, True),
    ],
)
def test_a_usage_that_names_few_tokens_is_believed_unless_events_deny_it(
    tmp_path: Path, usage: int, chunks: int, allowed: int, met: bool
) -> None:
    found = changed(tmp_path, lambda _, row: row.update(
        output_tokens=str(usage), chunks=str(chunks), max_tokens=str(allowed), tpot_s="", finish_reason="stop"))  # fmt: skip
    assert found.stages[0].attainment_tpot.value == (1.0 if met else 0.0)
    assert ("INV-EVENTS" in reasons(found)) != met and (found.verdict.status == "INVALID") != met


# ------------------------------------------------------------------ what the numbers rest on stands in the last lines


def test_what_the_numbers_rest_on_is_named_with_the_verdict(tmp_path: Path) -> None:
    def change(_: int, row: dict[str, str]) -> None:
        unknown(row, 30, 30)
        row.update(prompt_tokens="100", cached_tokens="60", flags="cached;tokens_estimated")

    found = changed(tmp_path, change)
    assert found.verdict.status == "PASS"
    lines = verdict_lines(found)
    for name in ("WARN-USAGE", "WARN-CACHED"):
        assert [line for line in lines if line.startswith(f"  {name}: ")] and name in meaning(found)
    assert "passed their own checks, with WARN-CACHED, WARN-USAGE above and" in meaning(found)
    page = markdown(found)
    assert page.count("have no usage") == 1 and "60.0% of the prompt tokens" in page
    plain = changed(tmp_path / "plain", lambda _, row: None)
    assert not [r for r in plain.verdict.reasons if r.severity == "warn" and "USAGE" in r.reason_id]
    assert "passed their own checks and" in meaning(plain)


def test_hidden_tokens_are_named_with_the_verdict(tmp_path: Path) -> None:
    """150 tokens by the usage in 30 events: five tokens an event, of which nobody saw four."""

    def change(_: int, row: dict[str, str]) -> None:
        took = float(row["last_token_s"]) - float(row["first_token_s"])
        row.update(output_tokens="150", chunks="30", max_tokens="150", tpot_s=f"{took / 149:.9f}")

    found = changed(tmp_path, change)
    assert found.verdict.status == "PASS" and "WARN-EVENTS" in meaning(found)
    assert "carry 5 tokens per event" in "\n".join(verdict_lines(found)) and "carry 5 tokens" in markdown(found)


def test_a_stage_that_does_not_decide_warns_in_its_own_section_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [StageSpec(8, 30, 5), StageSpec(20, 30, 5)], QUICK)
    path = run / "requests.csv"
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    for row in rows:
        if row["stage"] == "0" and row["status"] == "ok":
            row["flags"] = "tokens_estimated"
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = analyse(run)
    assert "WARN-USAGE" in reasons(found)  # of the first stage
    assert "WARN-USAGE" not in {r.reason_id for r in found.verdict.reasons} and "WARN-USAGE" not in meaning(found)
