"""`bench run` with gates that abort, a baseline, and what its console shows meanwhile."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.commands.console import Console, live_text
from bench.commands.job_options import JobOptions
from bench.commands.prepare import note_target, say_remarks
from bench.config import load_config
from tests.load.conftest import Ran, clean_environment, config_with

ABORT = {"metric": "tpot", "statistic": "p50", "operator": "<=", "value": 1, "at": 60, "abort": True}
HOLDS = {"metric": "error_ratio", "operator": "<=", "value": 0, "at": "all", "abort": True}
SLOW = {"embedded": True, "overhead_ms": 12}


def config(**more: Any) -> dict[str, Any]:
    return config_with(sweep={"qps": [10, 60, 70]}, loadgen={"duration_sec": 3, "target_qps": 60}, **more)


def on_a_terminal(command: list[str], cwd: Path, **environment: str) -> tuple[int, str]:
    """Exit code of a command and what it writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command, env={**clean_environment(), "COLUMNS": "140", "TERM": "xterm-256color", **environment},
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, cwd=cwd, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    out, end = b"", time.monotonic() + 80
    try:
        while time.monotonic() < end:
            if not select.select([leader], [], [], 0.2)[0]:
                continue
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            out += piece
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(10)
        os.close(leader)
    return process.returncode, out.decode("utf-8", "replace")


@pytest.fixture(scope="module")
def aborted(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run on a terminal: a gate holds everywhere, the other is missed in the second of three stages."""
    home = tmp_path_factory.mktemp("aborted")
    # one step of the engine takes 7 ms or more, so no TPOT is within 1 ms
    (home / "config.json").write_text(json.dumps(config(gates=[HOLDS, ABORT])), encoding="utf-8")
    command = [sys.executable, "-m", "bench", "run", "-c", "config.json", "--run-dir", str(home / "run"), "--no-preflight"]
    code, out = on_a_terminal(command, home)
    return Ran(code, out, "", home / "run")


def test_an_abort_gate_ends_the_sweep_in_order_and_is_named(aborted: Ran) -> None:
    ran = aborted
    assert ran.code == 1, ran.out[-3000:]
    stages = ran.rows("stages.csv")
    assert [s["marks"] for s in stages] == ["", "gate_abort", "not_run;gate_abort"]
    assert int(stages[0]["planned"]) + int(stages[1]["planned"]) == len(ran.rows())  # both stages are whole
    assert {row["status"] for row in ran.rows()} == {"ok"}
    run = ran.run()
    assert run["stopped_by"].startswith("gate tpot p50 <= 1 at 60 was missed in 01 chat @60")
    assert not run["interrupted"] and run["problems"] == []
    analysis = json.loads((ran.run_dir / "analysis.json").read_text(encoding="utf-8"))
    reasons = {r["reason_id"]: r["text"] for r in analysis["verdict"]["reasons"]}
    assert analysis["verdict"]["status"] == "FAIL" and "gate tpot p50 <= 1 at 60" in reasons["WARN-ABORT"]


def test_a_terminal_shows_attainment_and_in_flight_while_it_runs(aborted: Ran) -> None:
    assert "stage 2/3: 01 chat @60" in aborted.out
    assert re.search(r"attainment \d+\.\d\d (to \d+\.\d\d )?%, \d+ in flight", aborted.out), aborted.out[-3000:]
    assert re.search(r"00 chat @10 +\d+ ok, attainment \d+\.\d\d %; drained", aborted.out)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", aborted.out)  # NO_COLOR is set


@pytest.mark.timeout(120)
def test_a_baseline_decides_the_exit_code(run_bench: Any, aborted: Ran) -> None:
    """A slower engine under the same load is exit 5, although the SLO holds; other loads are refused before they run."""
    against = ("--baseline", str(aborted.run_dir), "--qps", "60", "--no-preflight")
    slow = config(engine=SLOW)
    worse = run_bench(*against, "--json", config=slow)
    said = json.loads(worse.out.strip().splitlines()[-1])
    assert worse.code == 5, worse.out + worse.err
    assert said["exit_code"] == 5 and said["verdict"] == "PASS" and said["baseline"]["outcome"] == "worse"
    changes = json.loads((worse.run_dir / "compare.json").read_text(encoding="utf-8"))["changes"]
    tpot = next(c for c in changes if (c["metric"], c["statistic"]) == ("tpot", "p50"))
    # each step takes 12 ms more, and every token one step
    assert tpot["outcome"] == "worse" and 0.008 < tpot["new"] - tpot["base"] < 0.03

    no = worse.run_dir.parent / "no"
    other = run_bench("--run-dir", str(no), *against, "--seed", "99", config=slow)
    assert other.code == 2 and "no stage of it has the schedule" in other.err
    nothing = run_bench("--run-dir", str(no), "--baseline", str(no / "nothing"), config=slow)
    assert nothing.code == 2 and "holds no run" in nothing.err and not no.exists()


def test_the_ledger_of_an_aborted_run_has_every_planned_arrival(aborted: Ran) -> None:
    with (aborted.run_dir / "stages.csv").open(encoding="utf-8", newline="") as handle:
        planned = {row["stage"]: int(row["planned"]) for row in csv.DictReader(handle)}
    counted = {stage: sum(row["stage"] == stage for row in aborted.rows()) for stage in planned}
    assert counted == planned


# -- the console alone ---------------------------------------------------------------------------

SCRIPT = """
    from pathlib import Path
    from types import SimpleNamespace
    from bench.commands.console import Console
    from bench.commands.job_options import JobOptions
    say = Console(JobOptions(config=Path("c.json")))
    say.plan(SimpleNamespace(stages=[SimpleNamespace(duration_s=3.0, expected_arrivals=9.0)]))
    say.progress({"event": "stage", "number": 1, "of": 1, "name": "00 chat @5", "planned": 9, "duration_s": 3.0})
    say.progress({"event": "live", "number": 1, "attainment": [0.5, 1.0], "in_flight": 3, "verdict": "open"})
    say.progress({"event": "drain", "number": 1, "in_flight": None})
    say.close()
"""


def test_a_dumb_terminal_gets_lines_and_no_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    code, dumb = on_a_terminal(command, tmp_path, TERM="dumb")
    assert code == 0 and "plan: 1 stage, " in dumb and "in flight" not in dumb and "\x1b[" not in dumb


@pytest.mark.parametrize(("columns", "shown", "left_out"), [
    (140, ["stage 1/1: 00 chat @5  attainment 50.00 to 100.00 %, 3 in flight", "0 %", "━"], []),
    (100, ["stage 1/1: 00 chat @5  attainment 50.00 to 100.00 %, 3 in flight", "0 %"], ["━"]),
    (60, ["1/1: 00 chat @5  50.00 to 100.00 %, 3 in flight"], ["━", "attainment"]),
])  # fmt: skip
def test_a_narrow_terminal_keeps_the_words(tmp_path: Path, columns: int, shown: list[str], left_out: list[str]) -> None:
    script = re.sub(r"say.progress\(.*drain.*", "say._progress.refresh()", textwrap.dedent(SCRIPT))  # draw now, do not wait
    code, out = on_a_terminal([sys.executable, "-c", script], tmp_path, COLUMNS=str(columns))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out)
    assert code == 0 and all(words in lines for words in shown) and not any(words in lines for words in left_out), lines
    assert "…" not in lines


@pytest.mark.parametrize(("qps", "shape", "said"), [("10,20", "sweep", True), ("10,15", "sweep", False), ("10", "single", False)])
def test_rates_without_the_target_are_named_before_the_load(
    qps: str, shape: str, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options = JobOptions(config=Path("c.json"), qps=qps, shape=shape)
    plan = SimpleNamespace(stages=[SimpleNamespace(offered_qps=float(rate)) for rate in qps.split(",")])
    note_target(options, 15.0, plan, Console(options))
    assert ("add 15 to --qps" in capsys.readouterr().err) is said


def test_remarks_on_the_config_are_one_line_and_those_on_the_command_line_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(config() | {"sweep": {"qps": [5, 10]}}), encoding="utf-8")
    options = JobOptions(config=path)
    warnings = load_config(path, env={}, overrides={"slo.p95_target_ms": 5.0}).warnings
    assert {problem.id for problem in warnings} >= {"CFG-034", "CFG-026"}
    say_remarks(options, warnings, Console(options))
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "slo.p95_target_ms is 5, below" in line]  # CFG-026 is on what --set said
    assert lines[-1].startswith("config: ") and "CFG-034" in lines[-1] and "CFG-026" not in lines[-1]


def test_after_a_stop_no_attainment_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """What was planned for later was never due: a share of all planned arrivals would be a false alarm."""
    say = Console(JobOptions(config=Path("c.json")))
    say.interrupted = True
    staged = {"name": "00 chat @5", "rows": 9, "statuses": {"ok": 3, "unsent": 6}, "drain_s": 0.4, "marks": ["interrupted"]}
    say.progress({"event": "staged", "number": 1, **staged, "attainment": [3 / 9, 3 / 9]})
    err = capsys.readouterr().err
    assert "3 ok, 6 unsent" in err and "attainment" not in err
    assert live_text({"attainment": [0.3, 0.3], "in_flight": 2}, interrupted=True) == "interrupted, 2 in flight"


def test_progress_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say = Console(JobOptions(config=Path("c.json")))
    say.progress({"event": "stage", "number": 1, "of": 2, "name": "00 chat @5", "planned": 9, "duration_s": 3.0})
    say.progress({"event": "live", "number": 1, "attainment": [0.5, 1.0], "in_flight": 3, "verdict": "open"})
    say.progress({"event": "drain", "number": 1, "in_flight": None})
    staged = {"name": "00 chat @5", "rows": 9, "statuses": {"ok": 8, "error": 1}, "drain_s": 0.4, "marks": []}
    say.progress({"event": "staged", "number": 1, **staged, "attainment": [8 / 9, 8 / 9]})
    err = capsys.readouterr().err
    assert err == "  00 chat @5         1 error, 8 ok, attainment 88.89 %; drained in 0.4 s\n"
