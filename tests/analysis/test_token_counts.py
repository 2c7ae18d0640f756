"""Answers whose token counts or events cannot carry a TPOT are named, and edited latencies do not pass.

The ledger of a sound run is changed cell by cell, as a service with a wrong usage or few events would have written it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.records.analysis import Analysis

from .synthetic import StageSpec, default_config, write_run
from .test_verdict import QUICK, analyse


def changed(tmp_path: Path, change: Callable[[int, dict[str, str]], None], **config: Any) -> Analysis:
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, config={**default_config(), **config})
    path = run / "requests.csv"
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    for number, row in enumerate(rows):
        if row["status"] == "ok":
            change(number, row)
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for name in run.glob("locust_*.csv"):  # the other witness is not there to help
        name.unlink()
    return analyse(run)


def reasons(found: Analysis) -> dict[str, Any]:
    return {r.reason_id: r for r in found.stages[0].reasons}


def pinned(row: dict[str, str], tokens: int, chunks: int, allowed: int) -> None:
    """An answer of so many tokens in so many events, its TPOT by the definition."""
    row["output_tokens"], row["chunks"], row["max_tokens"] = str(tokens), str(chunks), str(allowed)
    took = float(row["last_token_s"]) - float(row["first_token_s"])
    row["tpot_s"] = f"{took / (tokens - 1):.9f}" if chunks > 1 else ""


@pytest.mark.parametrize(
    ("tokens", "chunks", "allowed", "reason", "severity"),
    [
        (1500, 30, 30, "INV-TOKENS", "invalid"),
        (30, 1, 30, "INV-EVENTS", "invalid"),
        (30, 4, 30, "INV-EVENTS", "invalid"),
        (30, 5, 30, "WARN-EVENTS", "warn"),
        (30, 10, 30, "WARN-EVENTS", "info"),
        (30, 26, 30, "WARN-EVENTS", "info"),
        (30, 27, 30, None, None),  # a tenth fewer: tokens without text, characters of several tokens
        (9, 8, 30, None, None),
        (30, 30, 30, None, None),
        (7, 1, 30, "WARN-EVENTS", "warn"),
    ],
)
def test_counts_that_carry_no_tpot_are_named(
    tmp_path: Path, tokens: int, chunks: int, allowed: int, reason: str | None, severity: str | None
) -> None:
    found = changed(tmp_path, lambda _, row: pinned(row, tokens, chunks, allowed))
    said = {k: r.severity for k, r in reasons(found).items() if k in ("INV-TOKENS", "INV-EVENTS", "WARN-EVENTS")}
    if reason is None:
        assert said == {}
    else:
        assert said[reason] == severity
        assert (found.verdict.status == "INVALID") == (severity == "invalid")


def inflated(row: dict[str, str], factor: int) -> None:
    """As many events as the answer had tokens; the service says that the tokens were `factor` times as many."""
    events = int(row["output_tokens"])
    pinned(row, factor * events, events, 10_000)


def test_an_inflated_usage_that_turns_misses_into_hits_is_said_with_both_shares(tmp_path: Path) -> None:
    paces: list[float] = []
    changed(tmp_path / "a", lambda _, row: paces.append(float(row["tpot_s"] or 0)))
    deadline_ms = 1e3 * 0.8 * sorted(paces)[len(paces) // 2]
    slo = default_config()["slo"] | {"tpot_deadline_ms": deadline_ms, "attainment_target": 0.9}
    honest = changed(tmp_path / "b", lambda _, row: inflated(row, 1), slo=slo)
    share = honest.stages[0].attainment_joint.value
    assert share is not None and share < 0.5 and "WARN-EVENTS" not in reasons(honest)
    found = changed(tmp_path / "c", lambda _, row: inflated(row, 2), slo=slo)
    said = reasons(found)["WARN-EVENTS"]
    assert said.severity == "warn" and said.params["ratio"] == 2.0 and said.params["share"] == 1.0
    # the share by events is that of the service which told the truth; an event alone has no TPOT in either
    assert said.params["by_events"] == pytest.approx(share) and said.params["joint"] > 0.95
    assert found.verdict.status == "PASS"
    assert [r.code for r in found.verdict.reasons if r.reason_id == "WARN-EVENTS"] == ["WARN-EVENTS.several"]


def test_what_varies_is_said_with_its_range(tmp_path: Path) -> None:
    """One to three tokens an event, as under speculative decoding; the TPOT holds either way, so it is information."""
    found = changed(tmp_path, lambda k, row: inflated(row, 1 + k % 3))
    said = reasons(found)["WARN-EVENTS"]
    assert said.severity == "info" and (said.params["low"], said.params["high"]) == (1.0, 3.0)
    assert said.params["by_events"] == pytest.approx(said.params["joint"])
    assert said.params["share"] == pytest.approx(2 / 3, abs=0.03) and said.params["ratio"] == 2.0
    assert "2 tokens per event at the median, 1 to 3 in nine of ten" in said.text


def test_a_few_answers_with_fewer_events_are_not_a_finding(tmp_path: Path) -> None:
    few = changed(tmp_path, lambda k, row: inflated(row, 2 if k % 25 == 0 else 1))
    assert "WARN-EVENTS" not in reasons(few)


def hidden(row: dict[str, str]) -> None:
    """30 tokens came in 30 events, 270 more were reasoning that did not come."""
    pinned(row, 30, 30, 300)
    row.update(output_tokens="300", reasoning_tokens="270", flags="hidden_reasoning")


def test_hidden_reasoning_is_no_token_of_the_tpot(tmp_path: Path) -> None:
    plain = changed(tmp_path / "a", lambda _, row: pinned(row, 30, 30, 300))
    found = changed(tmp_path / "b", lambda _, row: hidden(row))
    assert "WARN-EVENTS" not in reasons(found)  # 30 / 30, not 300 / 30
    assert "LED-011" not in {p["problem_id"] for p in found.ledger["problems"]}
    assert found.stages[0].flags == {"hidden_reasoning": 1.0}
    assert found.stages[0].latency["tpot_s"].p95 == plain.stages[0].latency["tpot_s"].p95
    # Not flagged, the same cells contradict each other: the TPOT is not that of 300 tokens.
    other = changed(tmp_path / "c", lambda _, row: (hidden(row), row.update(flags="")))
    assert "LED-011" in {p["problem_id"] for p in other.ledger["problems"]} and "WARN-EVENTS" in reasons(other)


def test_one_answer_in_a_hundred_is_not_the_service(tmp_path: Path) -> None:
    found = changed(tmp_path, lambda n, row: pinned(row, 1500 if n % 150 == 0 else 30, 30, 30))
    assert "INV-TOKENS" not in reasons(found)


@pytest.mark.parametrize("text", ["0.000100000", "9.000000000"])
def test_an_edited_tpot_is_found_without_any_other_file(tmp_path: Path, text: str) -> None:
    found = changed(tmp_path, lambda _, row: row.update(tpot_s=text))
    assert found.verdict.status == "INVALID" and "LED-011" in {p["problem_id"] for p in found.ledger["problems"]}


def test_a_blanked_tpot_is_told_from_the_times(tmp_path: Path) -> None:
    whole = changed(tmp_path / "a", lambda _, row: None)
    blank = changed(tmp_path / "b", lambda _, row: row.update(tpot_s=""))
    assert blank.stages[0].latency["tpot_s"].n == whole.stages[0].latency["tpot_s"].n > 0
    assert blank.stages[0].attainment_tpot.value == whole.stages[0].attainment_tpot.value


def test_answers_without_usage_are_said(tmp_path: Path) -> None:
    found = changed(tmp_path, lambda _, row: row.update(flags="tokens_estimated"))
    assert reasons(found)["WARN-USAGE"].value == 1.0


@pytest.mark.parametrize(
    ("taken", "every", "share"),
    [
        (4, 1, None),  # 4 of 100 tokens in each answer, as the start of a chat template: no warm cache
        (6, 1, 0.06),
        (100, 1, 1.0),
        (500, 1, 1.0),  # more than the prompt had is a prompt at most
        (99, 9, 0.11),  # about every ninth answer: 99 / 900
        (40, 9, None),  # 40 / 900 = 4.4 %
        (0, 1, None),
    ],
)
def test_a_warm_cache_is_the_share_of_tokens_not_of_answers(
    tmp_path: Path, taken: int, every: int, share: float | None
) -> None:
    inside: list[bool] = []

    def change(number: int, row: dict[str, str]) -> None:
        warm = number % every == 0
        if row["phase"] == "window":
            inside.append(warm)
        row.update(prompt_tokens="100", cached_tokens=str(taken) if warm else "", flags="cached" if warm and taken else "")

    said = reasons(changed(tmp_path, change)).get("WARN-CACHED")
    answers = sum(inside) / len(inside)  # second path: counted while the rows were written
    if share is None:
        assert said is None
    else:
        assert said.value == pytest.approx(min(taken, 100) / 100 * answers, rel=1e-6) == pytest.approx(share, abs=0.01)
        assert said.params["answers"] == pytest.approx(answers) and f"in {answers:.1%} of the answers" in said.text


@pytest.mark.parametrize(
    ("every", "bursts", "share"),
    [
        (20, 1, 1.0),  # 5 % are read promptly and all of them are bursts: the others' gaps are not known
        (20, 3, None),  # a third of them: chance
        (1000, 1, None),  # fewer than 5 promptly read streams
        (1, 1, 1.0),
    ],
)
def test_the_promptly_read_streams_speak_for_all_when_most_are_bursts(
    tmp_path: Path, every: int, bursts: int, share: float | None
) -> None:
    def change(number: int, row: dict[str, str]) -> None:
        seen = number % every == 0
        row.update(read_mode="prompt" if seen else "lazy", itl_p99_s="0.05" if seen else "",
                   flags="burst" if seen and number // every % bursts == 0 else "")  # fmt: skip

    said = reasons(changed(tmp_path, change)).get("INV-BURST")
    assert (said is None) if share is None else said is not None and said.value == share
