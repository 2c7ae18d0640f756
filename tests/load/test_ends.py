"""Every way a job can end: rows for all that was planned, the right exit code, no traceback, nothing left."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.commands.salvage import is_unfinished

from .conftest import Ran, clean_environment, config_with, end
from .listed import check_listed
from .test_run import nothing_left, wait_for_rows

# Answers of 400 tokens: 3 s each, so that something is always in flight.
LONG = {"loadgen": {"duration_sec": 20, "output_len_dist": "fixed", "output_len_fixed": 400}, "sweep": {"qps": [10, 5]}}


def start(tmp_path: Path, config: dict[str, Any], *arguments: str) -> subprocess.Popen[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-m", "bench", "run", "-c", str(path), "--run-dir", str(tmp_path / "run"), *arguments],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip


def finished(process: subprocess.Popen[str], tmp_path: Path, timeout: float = 80) -> Ran:
    out, err = process.communicate(timeout=timeout)
    assert "Traceback" not in err, err
    return Ran(process.returncode, out, err, tmp_path / "run")


def whole(ran: Ran) -> tuple[dict[str, str], dict[str, str]]:
    """The two stages' rows; the first has one row for each planned arrival, the second was never begun."""
    first, second = ran.rows("stages.csv")
    arrivals = sorted(int(row["arrival"]) for row in ran.rows() if row["stage"] == "0")
    assert arrivals == list(range(int(first["planned"]))) and "not_run" in second["marks"]
    assert not is_unfinished(ran.run_dir) and (ran.run_dir / "report.html").exists()
    return first, second


def locust_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(p for p in psutil.Process(process.pid).children() if "locust" in p.cmdline())


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_killed_locust_leaves_a_whole_ledger_and_an_invalid_run(tmp_path: Path, processes: str) -> None:
    process = start(tmp_path, config_with(**LONG), "--processes", processes)
    try:
        wait_for_rows(tmp_path / "run", 5)
        locust_of(process).kill()
        ran = finished(process, tmp_path)
    finally:
        end(process)
    first, _ = whole(ran)
    assert ran.code == 4 and "INVALID" in ran.out and "master_lost" in first["marks"]
    lost = [row for row in ran.rows() if row["code"] == "CL-LOST"]
    assert {row["status"] for row in lost} <= {"error", "unsent"} and len(lost) > 50
    assert any("Locust ended with code -9" in problem for problem in ran.run()["problems"])
    nothing_left(ran.run_dir)


def test_the_third_ctrl_c_ends_at_once_and_keeps_every_arrival(tmp_path: Path) -> None:
    process = start(tmp_path, config_with(**LONG))
    try:
        wait_for_rows(tmp_path / "run", 5)
        for _ in range(3):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.05)
        ran = finished(process, tmp_path)
    finally:
        end(process)
    whole(ran)
    assert ran.code == 130 and ran.run()["interrupted"]
    nothing_left(ran.run_dir)


def test_the_second_ctrl_c_gives_up_what_is_open(tmp_path: Path) -> None:
    """Answers of half a minute: only the second press can end the run soon; the open ones are cut off, none is lost."""
    config = config_with(sweep=LONG["sweep"], loadgen={**LONG["loadgen"], "output_len_fixed": 4000})
    process = start(tmp_path, config)
    try:
        wait_for_streams(tmp_path / "run", 5)
        os.kill(process.pid, signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "Ctrl-C again gives them up" in line:
                break
        time.sleep(0.2)  # one press must not be taken for two
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        ran = finished(process, tmp_path, timeout=40)
    finally:
        end(process)
    first, _ = whole(ran)
    assert ran.code == 130 and "interrupted" in first["marks"] and ran.run()["interrupted"]
    cut = [row for row in ran.rows() if row["code"] == "CL-CANCEL" and row["sent_s"]]
    assert len(cut) >= 5 and {row["status"] for row in cut} <= {"truncated", "timeout"}
    nothing_left(ran.run_dir)


def test_sigterm_in_the_middle_is_the_first_ctrl_c(tmp_path: Path) -> None:
    process = start(tmp_path, config_with(**LONG))
    try:
        wait_for_streams(tmp_path / "run", 5)
        process.terminate()
        ran = finished(process, tmp_path)
    finally:
        end(process)
    first, _ = whole(ran)
    assert ran.code == 130 and "interrupted" in first["marks"]
    assert {row["status"] for row in ran.rows()} == {"ok", "unsent"}  # what was open was waited for
    nothing_left(ran.run_dir)


def test_an_embedded_engine_that_dies_is_in_the_rows_and_the_run_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, config_with(sweep={"qps": [10, 5]}, loadgen={"duration_sec": 2}))
    try:
        wait_for_streams(tmp_path / "run", 5)
        next(p for p in psutil.Process(process.pid).children() if "engine.serve" in p.cmdline()).kill()
        ran = finished(process, tmp_path)
    finally:
        end(process)
    assert ran.code in (1, 3, 4) and (ran.run_dir / "report.html").exists()
    second = [row for row in ran.rows() if row["stage"] == "1"]
    assert second and {row["code"] for row in second} == {"CH-REFUSED"}
    assert not (ran.run_dir / "engine_requests.ndjson").exists()  # its record went with it; the ledger stands alone
    nothing_left(ran.run_dir)


def wait_for_streams(run_dir: Path, count: int) -> None:
    """Wait until the gauge has seen so many answers open at once, or the ledger as many rows."""
    limit = time.monotonic() + 40
    while time.monotonic() < limit:
        for name, enough in (("inflight.csv", lambda row: int(row["in_flight"]) >= count), ("requests.csv", None)):
            try:
                with (run_dir / name).open(encoding="utf-8", newline="") as handle:
                    rows = list(csv.DictReader(handle))
            except OSError:
                continue
            if (len(rows) > count) if enough is None else any(enough(row) for row in rows if row["in_flight"]):
                return
        time.sleep(0.1)
    raise AssertionError("the run did not begin")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", ["starting the embedded engine", "plan:"])
def test_a_stop_before_the_first_arrival_is_130(tmp_path: Path, number: signal.Signals, words: str) -> None:
    process = start(tmp_path, config_with(**LONG))
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if words in line:
                break
        os.kill(process.pid, number)
        ran = finished(process, tmp_path)
    finally:
        end(process)
    assert ran.code == 130 and "interrupted" in ran.err
    nothing_left(ran.run_dir)


def test_a_stop_after_the_load_still_writes_the_report(tmp_path: Path) -> None:
    config = config_with(sweep={"qps": [20]}, loadgen={"duration_sec": 2})
    process = start(tmp_path, config)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "drained in" in line:
                break
        os.kill(process.pid, signal.SIGINT)
        ran = finished(process, tmp_path)
    finally:
        end(process)
    assert ran.code == 130 and (ran.run_dir / "report.html").exists() and ran.run()["interrupted"]
    assert {row["status"] for row in ran.rows()} == {"ok"}


def test_a_disk_that_is_full_at_the_report_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "analysis.json.part").symlink_to("/dev/full")
    process = start(tmp_path, config_with(sweep={"qps": [20]}, loadgen={"duration_sec": 2}))
    try:
        ran = finished(process, tmp_path)
    finally:
        end(process)
    assert ran.code == 4 and "No space left on device" in ran.err and "bench analyse" in ran.err
    assert {row["status"] for row in ran.rows()} == {"ok"}  # nothing of the load is lost


@pytest.mark.parametrize("cut", [0, 7])
def test_salvage_by_hand_count(tmp_path: Path, cut: int) -> None:
    """Second path: a folder is cut by hand, and what is filled in is counted by hand."""
    from bench.commands.salvage import salvage
    from bench.config import load_config
    from bench.records import ledger
    from bench.records.request import RequestRow
    from bench.records.stage import RunInfo
    from bench.workload.plan import build_plan
    from bench.workload.schedule import build_schedule

    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_with()), encoding="utf-8")
    plan = build_plan(load_config(path, env={}).config, "sweep")
    schedule = build_schedule(plan, plan.stages[0])
    rows = [
        RequestRow(0, i, 0, 0, 10.0, "window", "", "", f"x-0-{i}", "ok", intended_s=2.0 + float(schedule.intended_s[i]))
        for i in (0, 1, 4)
    ]
    ledger.write_requests(tmp_path / "requests.csv", rows)
    if cut:
        data = (tmp_path / "requests.csv").read_bytes()
        (tmp_path / "requests.csv").write_bytes(data[:-cut])  # the last line was not written to its end
    ledger.write_stages(tmp_path / "stages.csv", [])
    ledger.write_inflight(tmp_path / "inflight.csv", [])
    ledger.write_run(
        tmp_path / "run.json",
        RunInfo("x", "", None, "0", {}, {}, 1, "", [], {}, {}, "open", "sweep", 1),
    )
    added = salvage(tmp_path, plan, "Locust died", interrupted=False)
    assert added == len(schedule) - (2 if cut else 3)
    check_listed(tmp_path)
    ran = Ran(0, "", "", tmp_path)
    assert sorted(int(row["arrival"]) for row in ran.rows()) == list(range(len(schedule)))
    assert all(
        float(row["intended_s"]) == pytest.approx(2.0 + float(schedule.intended_s[int(row["arrival"])]), abs=1e-6)
        for row in ran.rows()
    )


def test_a_stop_while_locust_is_being_started_loses_no_process() -> None:
    """The signal comes after the fork and before anybody knows the process: it must end all the same."""
    from bench.commands.locust_process import Stops

    class Quiet:
        interrupted = False

    say = Quiet()
    with Stops(say) as stops:  # type: ignore[arg-type]

        def make() -> subprocess.Popen[str]:
            made = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], text=True,
                                    start_new_session=True)  # fmt: skip
            os.kill(os.getpid(), signal.SIGINT)
            return made

        process = stops.start(make)
        assert process.wait(timeout=10) == -signal.SIGKILL
    assert say.interrupted and stops.hits == 1
