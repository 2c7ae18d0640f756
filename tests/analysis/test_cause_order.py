"""A cause stands before what follows from it, and what our own side lost is not put down to the service."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.reasons import OWN_CAUSES, causes_first, reason
from bench.records.analysis import Analysis
from tests.analysis.synthetic import Faults, Service, StageSpec, default_config, write_run
from tests.analysis.test_verdict import QUICK, analyse

EMPTY = ("first_token_s", "first_content_s", "last_token_s", "ttft_s", "ttfo_s", "tpot_s", "e2e_s", "output_tokens",
         "prompt_tokens", "chunks", "http_status", "finish_reason", "sent_s", "done_s", "send_lag_s", "residence_s")  # fmt: skip


def lose(run: Path, gone: Callable[[dict[str, str]], bool], marks: str = "") -> int:
    """Rows of `run` that are CL-LOST from now on; how many of the window they are. `marks`: of the last stage."""
    path, count = run / "requests.csv", 0
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    for row in rows:
        if gone(row):
            count += row["phase"] == "window"
            row.update(dict.fromkeys(EMPTY, ""), status="unsent", code="CL-LOST", error_kind="lost")
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    text = (run / "stages.csv").read_text(encoding="utf-8").rstrip("\n")
    (run / "stages.csv").write_text(text + marks + "\n", encoding="utf-8")
    for name in run.glob("locust_*.csv"):
        name.unlink()
    return count


def killed(tmp_path: Path, marks: str) -> tuple[Analysis, int]:
    """One of two workers dies 15 s into a stage of 30 s."""
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, workers=2)
    count = lose(run, lambda row: row["worker"] == "1" and float(row["intended_s"]) > 16, marks)
    return analyse(run), count


def invalid(found: Analysis) -> list[str]:
    return [r.code for r in found.verdict.reasons if r.severity == "invalid"]


@pytest.mark.parametrize(("marks", "code"), [("worker_lost", "worker_lost"), ("master_lost", "master_lost"),
                                             ("part_lost", "lost_arrivals"), ("", "lost_arrivals")])  # fmt: skip
def test_a_killed_worker_is_the_first_reason_and_blames_no_clause(tmp_path: Path, marks: str, code: str) -> None:
    found, count = killed(tmp_path, marks)
    said = invalid(found)
    assert said[0] == f"INV-WORKER.{code}" and "INV-RATE" in said and found.stages[0].counts["unsent"] == count > 100
    assert found.verdict.params["reason"]["code"] == said[0]  # the first line of the verdict names it
    assert [r.code for r in found.stages[0].reasons][0] == said[0]
    blamed = [r.code for r in found.diagnosis if r.reason_id in ("DIA-CLAUSE", "DIA-FLOOR", "DIA-CLIENT")]
    assert blamed == []


def test_a_few_lost_arrivals_are_no_miss_of_the_service(tmp_path: Path) -> None:
    """Two of 500: below every limit of rate and gaps, and ours all the same."""
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, workers=2)
    count = lose(run, lambda row: row["arrival"] in ("300", "401"))
    found = analyse(run)
    assert count == 2 and invalid(found) == ["INV-WORKER.lost_arrivals"]
    assert found.verdict.reasons[0].text.startswith("2 of ")


def test_an_edited_file_still_speaks_before_a_lost_worker(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, workers=2)
    listed = {"stages.csv": {"bytes": 1, "sha256": "0"}}
    lose(run, lambda row: row["worker"] == "1" and float(row["intended_s"]) > 16, "worker_lost")
    text = (run / "run.json").read_text().replace('"files": {}', f'"files": {listed}'.replace("'", '"'))
    (run / "run.json").write_text(text)
    said = invalid(analyse(run))
    assert said[0] == "INV-LEDGER" and said.index("INV-WORKER.worker_lost") < said.index("INV-RATE")


def test_a_late_sender_is_no_deadline_below_the_idle_floor(tmp_path: Path) -> None:
    """A sender that is a second late misses the TTFT deadline of .8 s in an idle service; the service did nothing."""
    for name, lag_s, ids in (("late", 1.5, {"DIA-CLIENT"}), ("slow", 0.0, {"DIA-FLOOR", "DIA-CLAUSE"})):
        # 159 ms for half of the first tokens of a service with 1.3 requests in flight, and a deadline of 100 ms
        slow = QUICK if lag_s else Service(mu=4.4, gamma=QUICK.gamma * 20)
        slo = {**default_config()["slo"], "p95_target_ms": 1e6} | ({} if lag_s else {"ttft_deadline_ms": 100})
        run = write_run(tmp_path / name, [StageSpec(3, 60, 10)], slow, target_qps=3, faults=Faults(send_lag_s=lag_s, cpu_ratio=0.8),
                        config=default_config(3) | {"slo": slo})  # fmt: skip
        found = analyse(run)
        known = {r.reason_id for r in found.diagnosis} & {"DIA-CLAUSE", "DIA-FLOOR", "DIA-CLIENT"}
        assert known == ids, (name, [r.text for r in found.diagnosis])


def test_never_sent_arrivals_are_not_counted_as_refused(tmp_path: Path) -> None:
    """About 25 errors, and a few that came due too late to be sent, in a valid stage: the sentence counts the errors."""
    run = write_run(tmp_path / "r", [StageSpec(20, 60, 5)], QUICK, faults=Faults(error=0.02, unsent=0.003))
    text = (run / "requests.csv").read_text()
    (run / "requests.csv").write_text(text.replace("CL-CAP", "CL-LATE"))
    found = analyse(run)
    counts = found.stages[0].counts
    said = next(r for r in found.diagnosis if r.code == "DIA-CLAUSE.failures")
    assert counts["unsent"] > 0 and f"{counts['error']} of {found.stages[0].planned} arrivals failed" in said.text


def test_the_order_is_a_rule_and_keeps_the_rest() -> None:
    """Whatever order the pieces come in: the run's files, our faults by their table, then the others as they were."""
    first = reason("INV-LEDGER", "invalid", params={"problem_id": "LED-025", "message": "m", "rows": 0, "examples": ""})
    ours = [reason("INV-FAULT", "invalid", stage=1, params={"count": 1}), reason("INV-WORKER.worker_lost", "invalid", stage=1)]
    rest = [reason("INV-CSV", "invalid", params={"listed": "x"}), reason("INV-CLOCK", "invalid", stage=1, params={"count": 2}),
            reason("WARN-GAUGE", "warn", stage=1, params={"note": ""})]  # fmt: skip
    for seed in range(50):
        mixed = [first, *ours, *rest]
        random.Random(seed).shuffle(mixed)
        got = causes_first(mixed)
        assert got[:3] == [first, *ours] and got[3:] == [r for r in mixed if r in rest]
    assert [r.reason_id for r in ours] == [c for c in OWN_CAUSES if c in ("INV-FAULT", "INV-WORKER")]


@pytest.mark.parametrize(("marks", "known"), [("worker_lost", True), ("not_prepared", True), ("", False)])
def test_a_late_send_blames_the_machine_only_where_nothing_else_explains_it(
    tmp_path: Path, marks: str, known: bool
) -> None:
    """The others send a lost worker's arrivals late: their idle CPU is no sign of something else on the machine."""
    run = write_run(tmp_path / "r", [StageSpec(20, 30, 5)], QUICK, faults=Faults(send_lag_s=0.02, cpu_ratio=0.1))
    lose(run, lambda row: False, marks)
    lag = next(r for r in analyse(run).stages[0].reasons if r.reason_id == "INV-LAG")
    assert ("something else used the machine" in lag.text) is not known
    assert ("that follows from the other reason" in lag.text) is known
    assert lag.params["cause"]["code"] == ("cause.known" if known else "cause.other")
    steps = {"worker_lost": "next.fixed_workers", "not_prepared": "next.same_version", "": "next.quiet_machine"}
    assert lag.next_code == steps[marks]  # closing other programs helps against neither
