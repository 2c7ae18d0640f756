"""`bench run` from start to exit code: what a user sees when all is well, and for each thing that goes wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from .conftest import CONFIG, Ran, clean_environment, config_with, end
from .listed import check_listed

FILES = (
    "run.json", "requests.csv", "stages.csv", "inflight.csv", "locust_stats.csv", "locust_stats_history.csv",
    "locust_failures.csv", "locust_exceptions.csv", "analysis.json", "summary.json", "summary.md", "junit.xml",
    "report.html", "log.txt", "preflight.json",
)  # fmt: skip


def nothing_left(run_dir: Path) -> None:
    """No process still names this run folder (workers, master or engine)."""
    limit = time.monotonic() + 10
    while True:
        mine = []
        for process in psutil.process_iter(["cmdline", "pid"]):
            try:
                words = " ".join(process.info["cmdline"] or []) + " ".join(
                    f"{k}={v}" for k, v in process.environ().items() if k == "BENCH_RUN_DIR"
                )
            except (psutil.Error, OSError):
                continue
            if str(run_dir) in words and process.info["pid"] != os.getpid():
                mine.append(process.info)
        if not mine or time.monotonic() > limit:
            break
        time.sleep(0.1)
    assert not mine


def test_a_good_run_leaves_every_file_and_exit_0(run_bench: Any) -> None:
    ran = run_bench("--json", config=config_with(sweep={"qps": [20]}, loadgen={"duration_sec": 4, "target_qps": 20}))
    assert ran.code == 0, ran.out + ran.err
    said = json.loads(ran.out.strip().splitlines()[-1])
    assert said["verdict"] == "PASS" and said["exit_code"] == 0
    assert {name for name in FILES if not (ran.run_dir / name).exists()} == set()
    assert len(ran.out.strip().splitlines()) == 1  # one line of JSON and nothing else on standard output
    nothing_left(ran.run_dir)
    again = subprocess.run(
        [sys.executable, "-m", "bench", "run", "-c", str(ran.run_dir.parent / "config.json"), "--run-dir", str(ran.run_dir)],
        env=clean_environment(), capture_output=True, text=True, check=False, cwd=ran.run_dir.parent,
    )  # fmt: skip
    assert again.returncode == 2 and "holds a run already" in again.stderr  # an old run is never written over


def test_an_slo_that_does_not_hold_is_exit_1(run_bench: Any) -> None:
    # one step of the engine takes 7 ms or more, so no token can follow another within 1 ms
    ran = run_bench(config=config_with(sweep={"qps": [20]}, slo={"tpot_deadline_ms": 1}))
    assert ran.code == 1, ran.out + ran.err
    assert "FAIL:" in ran.out and "report.html" in ran.out


def test_one_token_answers(run_bench: Any) -> None:
    """No TPOT exists; TTFT decides, and nothing divides by zero."""
    load = {"output_len_dist": "fixed", "output_len_fixed": 1, "duration_sec": 4}
    ran = run_bench(config=config_with(sweep={"qps": [20]}, loadgen={**load}))
    assert ran.code == 0, ran.out + ran.err
    assert {row["tpot_s"] for row in ran.rows()} == {""} and {row["output_tokens"] for row in ran.rows()} == {"1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slo": {"ttft_deadline": 800}}, ["CFG-004", "ttft_deadline_ms"]),
        ({"scheduler": {"batch_size_cap": 48}}, ["CFG-020", "48", "32"]),
        ({"limits": {"max_requests": 3}}, ["CFG-041", "max_requests"]),
    ],
)
def test_a_bad_config_is_exit_2_before_anything_starts(
    run_bench: Any, change: dict[str, Any], words: list[str]
) -> None:
    ran = run_bench(config=config_with(**change))
    assert ran.code == 2 and all(word in ran.err for word in words), ran.err
    assert "Traceback" not in ran.err and not (ran.run_dir / "requests.csv").exists()


def test_a_dead_port_is_exit_3_and_names_it(run_bench: Any) -> None:
    ran = run_bench(config=config_with(engine={"embedded": False}, base_url="http://127.0.0.1:9"))
    assert ran.code == 3 and "CH-REFUSED" in ran.err + ran.out and "Traceback" not in ran.err


def test_a_wrong_key_is_exit_3_and_shows_no_part_of_it(tmp_path: Path, run_bench: Any, config_file: Path) -> None:
    from bench.commands.engine_process import start_engine

    right, wrong = "sk-right-Vx9qLr2Kp4Zt", "sk-wrong-Hm3wTn8Qd6Yb"
    (tmp_path / "right").write_text(right)
    with start_engine(config_file, api_key_file=tmp_path / "right") as engine:
        url = {"engine": {"embedded": False}, "base_url": engine.base_url}
        ran = run_bench(config=config_with(**url), environment={"BENCH_API_KEY": wrong})
        assert ran.code == 3 and "CH-401" in ran.err + ran.out
        good = run_bench(
            "--run-dir", str(tmp_path / "good"), config=config_with(**url, sweep={"qps": [20]}, loadgen={"duration_sec": 4}),
            environment={"BENCH_API_KEY_FILE": str(tmp_path / "right")},
        )  # fmt: skip
        assert good.code == 0, good.out + good.err
    for path in [p for folder in (ran.run_dir, tmp_path / "good") for p in folder.rglob("*") if p.is_file()]:
        text = path.read_bytes()
        assert wrong[-8:].encode() not in text and right[-8:].encode() not in text, path
    assert not any(key[-8:] in text for key in (right, wrong) for text in (ran.out, ran.err, good.out, good.err))


def test_a_service_that_dies_in_the_middle_still_gives_a_report(tmp_path: Path, config_file: Path) -> None:
    """The engine is killed while the sweep runs: errors, whole rows, a report, no traceback."""
    from bench.commands.engine_process import start_engine

    path = tmp_path / "config.json"
    with start_engine(config_file) as engine:
        path.write_text(json.dumps(config_with(engine={"embedded": False}, base_url=engine.base_url)))
        process = subprocess.Popen(
            [sys.executable, "-m", "bench", "run", "-c", str(path), "--run-dir", str(tmp_path / "run")],
            env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_for_rows(tmp_path / "run", 5)
            engine.stop()
            out, err = process.communicate(timeout=60)
        finally:
            end(process)
    ran = Ran(process.returncode, out, err, tmp_path / "run")
    assert ran.code in (1, 4) and "Traceback" not in err
    assert (ran.run_dir / "report.html").exists()
    for stage in ran.rows("stages.csv"):
        mine = [row for row in ran.rows() if row["stage"] == stage["stage"]]
        assert len(mine) == int(stage["planned"])
    assert {row["status"] for row in ran.rows() if row["stage"] == "1"} <= {"error", "truncated"}


def wait_for_rows(run_dir: Path, count: int) -> None:
    limit = time.monotonic() + 40
    ledger = run_dir / "requests.csv"
    while time.monotonic() < limit:
        if ledger.exists() and ledger.read_text().count("\n") > count:
            return
        time.sleep(0.1)
    raise AssertionError("the run did not begin")


def listening(process: subprocess.Popen[Any]) -> set[str]:
    """The addresses on which a process and all it started listen."""
    family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
    return {
        c.laddr.ip
        for pid in family
        for c in psutil.Process(pid).net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN and c.family in (socket.AF_INET, socket.AF_INET6)
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_in_the_middle_drains_and_reports(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_with(loadgen={"duration_sec": 30})))
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "run", "-c", str(path), "--run-dir", str(tmp_path / "run"),
         "--processes", str(processes)],
        env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_rows(tmp_path / "run", 10)
        listens_on = listening(process)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=40)
    finally:
        end(process)
    ran = Ran(process.returncode, out, err, tmp_path / "run")
    assert listens_on == {"127.0.0.1"}  # engine, master and workers: nothing is reachable from another machine
    assert ran.code == 130 and "Traceback" not in err, err
    assert "INTERRUPTED" in (ran.run_dir / "report.html").read_text(encoding="utf-8").upper()
    first, second = ran.rows("stages.csv")
    rows = ran.rows()
    assert "interrupted" in first["marks"] and len(rows) == int(first["planned"]) and "not_run" in second["marks"]
    kinds = {row["status"] for row in rows}
    assert kinds == {"ok", "unsent"}, kinds
    # the stage ended with the stop: what was planned for later was never due and is in no window
    assert float(first["end_s"]) == float(first["window_end_s"]) <= float(first["drained_s"])
    unsent = [float(row["intended_s"]) for row in rows if row["status"] == "unsent"]
    lag_s = max(float(row["sent_s"]) - float(row["intended_s"]) for row in rows if row["status"] == "ok")
    assert min(unsent) > float(first["end_s"]) - 0.5 - lag_s  # a busy machine sends late, and stops as late
    assert "drained in -" not in err
    check_listed(ran.run_dir)
    last_ok = max(int(r["arrival"]) for r in rows if r["status"] == "ok")
    first_unsent = min(int(r["arrival"]) for r in rows if r["status"] == "unsent")
    assert last_ok < first_unsent + processes  # what was sent was followed to its end, the rest was not sent
    nothing_left(ran.run_dir)


def test_the_starter_killed_hard_leaves_nothing_running(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_with(loadgen={"duration_sec": 60})))
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "run", "-c", str(path), "--run-dir", str(tmp_path / "run")],
        env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    try:
        wait_for_rows(tmp_path / "run", 5)
        process.kill()
        process.wait(10)
        nothing_left(tmp_path / "run")
    finally:
        end(process)


def test_a_part_of_the_path_that_is_a_file_is_named(run_bench: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    ran = run_bench("--run-dir", str(tmp_path / "runs" / "today" / "one"))
    assert ran.code == 2 and f"{tmp_path / 'runs'} is a file, not a folder" in ran.err and "--run-dir" in ran.err


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (config_with(slo={"ttft_deadline": 800}), 2, ["CFG-004"]),
        (config_with(engine={"embedded": False}, base_url="http://127.0.0.1:9"), 3, ["CH-REFUSED", "port 9", "docs/troubleshooting.md"]),
    ],
)
def test_json_is_one_line_of_json_also_when_the_job_cannot_run(
    run_bench: Any, config: dict[str, Any], code: int, words: list[str]
) -> None:
    ran = run_bench("--json", config=config)
    said = json.loads(ran.out)
    assert ran.code == code == said["exit_code"] and said["verdict"] is None and all(word in said["error"] for word in words)
    assert "error: " in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("extra", [(), ("--no-preflight",)])
@pytest.mark.parametrize(
    ("environment", "words"),
    [({"BENCH_API_KEY_FILE": "/nowhere"}, "CFG-014"), ({"BENCH_API_KEY": "one two"}, "CFG-013")],
)
def test_a_key_that_cannot_be_one_ends_the_job_before_it_begins(
    run_bench: Any, environment: dict[str, str], words: str, extra: tuple[str, ...]
) -> None:
    config = config_with(engine={"embedded": False}, base_url="http://127.0.0.1:9")
    ran = run_bench(*extra, config=config, environment=environment)
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err and not ran.run_dir.exists()
    assert "one two" not in ran.err  # no part of a key is shown


def test_the_shape_single_is_one_stage_at_the_asked_rate(run_bench: Any) -> None:
    ran = run_bench("--shape", "single", "--qps", "20", "--stage-duration", "2")
    assert ran.code in (0, 1), ran.out + ran.err  # two seconds carry no claim about an SLO
    (stage,) = ran.rows("stages.csv")
    assert float(stage["offered_qps"]) == 20 and {row["status"] for row in ran.rows()} == {"ok"}


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/sys").exists(), reason="needs a folder that cannot be written"
)
def test_an_unwritable_folder_is_exit_2(run_bench: Any) -> None:
    ran = run_bench("--run-dir", "/proc/sys/never")  # not even root can make a folder there
    assert ran.code == 2 and "cannot be written" in ran.err and "Traceback" not in ran.err


def test_a_disk_that_fills_up_ends_in_a_named_invalid_run(tmp_path: Path) -> None:
    """The ledger is on a device that is always full; the rest of the folder is not."""
    from bench.commands.engine_process import start_engine

    from .conftest import locust_command

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    (run_dir / "inflight.csv").symlink_to("/dev/full")
    with start_engine(path) as engine:
        done = subprocess.run(
            locust_command("--headless", "--bench-config", str(path), "--run-dir", str(run_dir)),
            env=clean_environment(BENCH_TARGET_URL=engine.base_url), capture_output=True, text=True, cwd=tmp_path, check=False,
            timeout=60,
        )  # fmt: skip
    assert done.returncode in (2, 4)
    assert "No space left on device" in done.stderr
