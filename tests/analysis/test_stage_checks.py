"""A stages.csv that was changed after the run: each field on its own, and the stops and loads that are no change."""
from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.analyse import analyse_run
from bench.records.analysis import Analysis
from tests.analysis.synthetic import Service, StageSpec, write_run

QUICK = Service(mu=4.4)
Rows = list[dict[str, str]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, 10 and 20 requests/s, 4 s of warm-up and 16 s of window each."""
    return write_run(tmp_path_factory.mktemp("stages") / "run", [StageSpec(q, 20, 4) for q in (10, 20)], QUICK)


def copy_of(original: Path, folder: Path, change: Callable[[Rows, Rows], None] | None = None) -> Path:
    """A copy of the run, its stages.csv and requests.csv changed by `change(stages, rows)`."""
    folder.mkdir()
    for path in original.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tables = {name: list(csv.DictReader((original / name).open(newline=""))) for name in ("stages.csv", "requests.csv")}
    if change:
        change(tables["stages.csv"], tables["requests.csv"])
    for name, table in tables.items():
        with (folder / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, table[0])
            writer.writeheader()
            writer.writerows(table)
    return folder


def stages_reasons(found: Analysis) -> list[str]:
    return [r.text for r in found.verdict.reasons if r.reason_id == "INV-STAGES"]


def set_field(field: str, value: Callable[[dict[str, str]], object]) -> Callable[[Rows, Rows], None]:
    def change(stages: Rows, rows: Rows) -> None:
        stages[1][field] = str(value(stages[1]))

    return change


def shifted(field: str, by_s: float) -> Callable[[Rows, Rows], None]:
    return set_field(field, lambda row: repr(float(row[field]) + by_s))


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (set_field("offered_qps", lambda _: 24), "LED-022", "stage 1: offered_qps is 24 in stages.csv and 20 in its"),
        (set_field("offered_qps", lambda _: 20.01), "LED-022", "stage 1: offered_qps is 20.01"),
        (shifted("window_start_s", 3), "LED-023", "of phase window are due before window_start_s"),
        (shifted("window_start_s", -2), "LED-023", "of phase warmup are due after window_start_s"),
        (shifted("window_end_s", -3), "LED-023", "of phase window are due after window_end_s"),
        (shifted("window_end_s", 3), "LED-023", "are not in order"),
        (shifted("start_s", 5), "LED-023", "are not in order"),
        (set_field("planned", lambda row: int(row["planned"]) - 2), "LED-024", "stage 1: planned is"),
        (set_field("rows", lambda row: int(row["rows"]) + 1), "LED-024", "stage 1: rows is"),
        (set_field("rows", lambda row: int(row["rows"]) - 1), "LED-024", "stage 1: rows is"),
        (lambda stages, rows: stages.append(dict(stages[1])), "LED-024", "stage 1: it stands in stages.csv twice"),
        # the mark alone would leave a bad stage out
        (set_field("marks", lambda _: "not_run"), "LED-026", "stage 1: it is marked not_run and has"),
        (set_field("marks", lambda _: "ramp"), "LED-026", "stage 1: marks is ramp; it can be interrupted, drain_limit,"),
        (set_field("loop", lambda _: "Open"), "LED-026", "stage 1: loop is Open; it can be open, closed"),
        (set_field("loop", lambda _: "closed"), "LED-026", "stage 1: loop is closed in stages.csv and open in run.json"),
        (set_field("process", lambda _: "unknown"), "LED-026", "stage 1: process is unknown; it can be constant,"),
    ],
)  # fmt: skip
def test_a_changed_field_is_named(
    original: Path, tmp_path: Path, change: Callable[[Rows, Rows], None], code: str, said: str
) -> None:
    found = analyse_run(copy_of(original, tmp_path / "r", change), models=False)
    assert (found.verdict.status, found.verdict.exit_code) == ("INVALID", 4)
    assert any(text.startswith(code) and said in text for text in stages_reasons(found)), found.verdict.reasons
    assert found.verdict.sentence.startswith("The measurement is not to be trusted: LED-02")
    assert found.capacity.knee_low_qps is None


@pytest.mark.parametrize(
    ("run", "process", "said"),
    [
        ({}, "trace", "process is trace in stages.csv; run.json says poisson"),
        ({}, "closed", "process is closed in stages.csv; run.json says poisson"),
        ({"shape": "replay"}, "poisson", "process is poisson in stages.csv; run.json says trace"),
        ({"shape": "replay"}, "trace", ""),
        ({"shape": "rerun"}, "trace", ""),
        ({}, "poisson", ""),
    ],
)
def test_the_process_is_the_one_of_the_config(
    original: Path, tmp_path: Path, run: dict[str, str], process: str, said: str
) -> None:
    def change(stages: Rows, rows: Rows) -> None:
        for stage in stages:
            stage["process"] = process

    folder = copy_of(original, tmp_path / "r", change)
    told = json.loads((folder / "run.json").read_text()) | run
    told["config"]["loadgen"]["arrival_process"] = "poisson"
    (folder / "run.json").write_text(json.dumps(told))
    found = stages_reasons(analyse_run(folder, models=False))
    assert (said in found[0]) if said else not found


def test_the_unchanged_run_passes(original: Path, tmp_path: Path) -> None:
    found = analyse_run(copy_of(original, tmp_path / "r"), models=False)
    assert (found.verdict.status, stages_reasons(found)) == ("PASS", [])


def test_rows_taken_out_with_their_count_leave_a_gap_in_the_numbers(original: Path, tmp_path: Path) -> None:
    """Ten late arrivals deleted, `planned` and `rows` made to fit, Locust's table taken away."""

    def change(stages: Rows, rows: Rows) -> None:
        gone = [r for r in rows if r["stage"] == "1"][20:30]
        rows[:] = [r for r in rows if r not in gone]
        stages[1]["planned"] = stages[1]["rows"] = str(int(stages[1]["rows"]) - 10)

    folder = copy_of(original, tmp_path / "r", change)
    (folder / "locust_stats.csv").unlink()
    (said,) = stages_reasons(analyse_run(folder, models=False))
    assert said.startswith("LED-024") and "10 rows have an arrival number of" in said


def test_bad_arrivals_do_not_fall_out_of_a_narrowed_window(original: Path, tmp_path: Path) -> None:
    """The last 3 s of the target's stage miss the deadline; a window that ends before them would hold the SLO."""

    def spoil(stages: Rows, rows: Rows) -> None:
        end = float(stages[1]["window_end_s"])
        for r in rows:
            if r["stage"] == "1" and float(r["intended_s"]) >= end - 3:
                r.update({k: "" for k in ("tpot_s", "e2e_s", "ttft_s", "ttfo_s", "first_token_s", "first_content_s",
                                          "last_token_s", "headers_s")}, status="error", code="SV-500")  # fmt: skip
        stages[1]["window_end_s"] = repr(end - 3)

    folder = copy_of(original, tmp_path / "r", spoil)
    (folder / "locust_stats.csv").unlink()
    found = analyse_run(folder, models=False)
    assert found.stages[1].attainment_joint.value == 1.0  # what the edit was for
    assert found.verdict.status == "INVALID" and stages_reasons(found)[0].startswith("LED-023")


def test_a_stop_is_no_contradiction_unless_rows_were_sent_long_after_it(original: Path, tmp_path: Path) -> None:
    """Stopped 6 s before the end: later arrivals are unsent, but for those that a worker sent before it heard."""

    def stop(sent_after_s: float) -> Callable[[Rows, Rows], None]:
        def change(stages: Rows, rows: Rows) -> None:
            end = float(stages[1]["end_s"]) - 6
            stages[1].update(window_end_s=repr(end), end_s=repr(end), marks="interrupted")
            for r in rows:
                if r["stage"] == "1" and float(r["intended_s"]) >= end + sent_after_s:
                    gone = ("status", "code", "offered_qps", "phase", "stage", "arrival", "worker", "repeat", "intended_s")
                    r.update({k: "" for k in r if k not in gone}, status="unsent", code="CL-STOP")

        return change

    for sent_after_s, contradicts in ((0.0, False), (0.3, False), (6.5, True)):
        folder = copy_of(original, tmp_path / f"r{sent_after_s}", stop(sent_after_s))
        (folder / "locust_stats.csv").unlink()
        assert bool(stages_reasons(analyse_run(folder, models=False))) == contradicts


@pytest.mark.parametrize(("loop", "after_s", "contradicts"), [("closed", 0.2, False), ("closed", 2.0, True), ("open", 0.2, True)])
def test_the_last_turn_of_a_closed_loop(
    original: Path, tmp_path: Path, loop: str, after_s: float, contradicts: bool
) -> None:
    """A user begins while the loop is too busy to hear that the stage is over; an open loop has its times from the plan."""

    def late(stages: Rows, rows: Rows) -> None:
        for stage in stages:
            stage["loop"] = loop
            stage["process"] = "closed" if loop == "closed" else stage["process"]
        last = [r for r in rows if r["stage"] == "1" and r["status"] == "ok"][-1]
        by_s = float(stages[1]["end_s"]) + after_s - float(last["intended_s"])
        for name in ("intended_s", "sent_s", "headers_s", "first_token_s", "first_content_s", "last_token_s", "done_s"):
            last[name] = repr(round(float(last[name]) + by_s, 9))

    folder = copy_of(original, tmp_path / "r", late)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"loop": loop}))
    assert bool(stages_reasons(analyse_run(folder, models=False))) == contradicts


def test_loads_whose_rate_changes_have_no_one_rate(original: Path, tmp_path: Path) -> None:
    """A ramp's stage names its start; each row the rate of its moment."""

    def ramp(stages: Rows, rows: Rows) -> None:
        for r in rows:
            r["offered_qps"] = repr(float(r["offered_qps"]) + float(r["intended_s"]) / 10)

    found = analyse_run(copy_of(original, tmp_path / "r", ramp), models=False)
    assert not stages_reasons(found) and all("ramp" in s.marks for s in found.stages)
