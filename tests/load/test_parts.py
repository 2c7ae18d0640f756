"""Several masters with a part of one plan each: together they send the load of one run, and their runs merge into it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.commands.locust_process import free_port

from .conftest import Ran, clean_environment, end, own_port, start_locust
from .listed import check_listed

PLAN = ("--qps-stages", "20,30", "--stage-duration", "3")


class Masters:
    """Masters of the parts of one plan, each with workers of its own."""

    def __init__(self, folder: Path, url: str, config_file: Path) -> None:
        self.folder, self.meet, self.config_file = folder, f"127.0.0.1:{free_port()}", config_file
        self.environment = clean_environment(BENCH_TARGET_URL=url)
        self.processes: list[subprocess.Popen[str]] = []
        self.masters: dict[int, subprocess.Popen[str]] = {}

    def start(self, part: int, of: int, workers: int = 1, plan: tuple[str, ...] = PLAN) -> None:
        ports = own_port()
        self.masters[part] = self._start(
            f"master-{part}", "--headless", "--master", "--expect-workers", str(workers), "--bench-config",
            str(self.config_file), "--run-dir", str(self.run_dir(part)), "--part", f"{part}/{of}", "--meet", self.meet,
            *plan, *ports,
        )  # fmt: skip
        for w in range(workers):
            self._start(f"worker-{part}-{w}", "--worker", "--shard-dir", str(self.folder / f"shards-{part}"), *ports)

    def _start(self, name: str, *options: str) -> subprocess.Popen[str]:
        process = start_locust(self.folder / f"{name}.log", self.environment, *options)
        self.processes.append(process)
        return process

    def run_dir(self, part: int) -> Path:
        return self.folder / f"run-{part}"

    def finish(self, limit_s: float = 90) -> list[Ran]:
        return [
            Ran(process.wait(limit_s), "", self.logs(), self.run_dir(part)) for part, process in sorted(self.masters.items())
        ]

    def logs(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in self.processes:
            end(process)


@pytest.fixture
def masters(engine: Any, config_file: Path, tmp_path: Path) -> Iterator[Masters]:
    there = Masters(tmp_path, engine.base_url, config_file)
    try:
        yield there
    finally:
        there.end()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], env=clean_environment(), capture_output=True, text=True, check=False, timeout=60
    )


def load_of(ran: Ran) -> dict[tuple[str, str], tuple[str, ...]]:
    """What each arrival is, whoever sent it: when it is due in its stage, its lengths, its phase."""
    starts = {row["stage"]: float(row["start_s"]) for row in ran.rows("stages.csv")}
    out = {}
    for row in ran.rows():
        due = f"{float(row['intended_s']) - starts[row['stage']]:.6f}"
        out[row["stage"], row["arrival"]] = (due, row["input_tokens"], row["max_tokens"], row["phase"], row["offered_qps"])
    return out


def test_two_masters_send_the_arrivals_of_one(masters: Masters, run_locust: Any, tmp_path: Path) -> None:
    masters.start(1, 2)
    masters.start(2, 2)
    ran = masters.finish()
    assert [r.code for r in ran] == [0, 0], masters.logs()
    for number, part in enumerate(ran):  # each has every second arrival, and says which
        assert {int(r["arrival"]) % 2 for r in part.rows()} == {number}
        assert part.run()["part"]["part"] == number + 1 and part.run()["part"]["load"] == ran[0].run()["part"]["load"]
    into = tmp_path / "merged"
    done = bench("recover", str(ran[0].run_dir), str(ran[1].run_dir), "--into", str(into))
    assert done.returncode == 0, done.stderr
    merged, one = Ran(0, done.stdout, "", into), run_locust(*PLAN)
    assert load_of(merged) == load_of(one) and len(merged.rows()) == len(one.rows())
    assert [s["schedule_hash"] for s in merged.rows("stages.csv")] == [s["schedule_hash"] for s in one.rows("stages.csv")]
    for stage in merged.rows("stages.csv"):
        rows = [r for r in merged.rows() if r["stage"] == stage["stage"]]
        assert len(rows) == int(stage["planned"]) == int(stage["rows"]) and stage["workers"] == "2" and stage["marks"] == ""
        assert {r["status"] for r in rows} == {"ok"} and {r["worker"] for r in rows} == {"0", "1"}
        # both began at one moment: no part was late for its own arrivals (0.5 s is for a machine that is busy)
        for worker in ("0", "1"):
            lags = sorted(float(r["send_lag_s"]) for r in rows if r["worker"] == worker)
            assert lags[len(lags) // 2] < 0.5
    check_listed(into)
    info = merged.run()
    assert info["problems"] == [] and info["workers"] == 2 and {w["part"] for w in info["worker_info"]} == {"1/2", "2/2"}
    assert {(w["shared"], w["bound_s"]) for w in info["worker_info"]} == {(True, 0.0)}
    # the gauge of both, and what analyses it, agree with the ledger
    assert {r["worker"] for r in merged.rows("inflight.csv")} == {"0", "1"}
    done = bench("analyse", str(into))
    analysis = json.loads((into / "analysis.json").read_text())
    wrong = {r["reason_id"] for r in analysis["verdict"]["reasons"]} | {r["reason_id"] for s in analysis["stages"] for r in s["reasons"]}
    assert not wrong & {"INV-ROWS", "INV-WORKER", "INV-OFFSET", "INV-CSV"}, done.stdout
    # what the service received, by its own stamps, is in the order and at the times of the merged ledger
    check_received(masters.environment["BENCH_TARGET_URL"], merged)
    # part folders say that they are no run of their own
    refused = bench("analyse", str(ran[0].run_dir))
    assert refused.returncode == 2 and "part 1/2" in refused.stderr and "--into" in refused.stderr, refused.stderr


def check_received(url: str, merged: Ran) -> None:
    import urllib.request

    ids = {r["request_id"]: r for r in merged.rows()}
    with urllib.request.urlopen(url + "/debug/requests", timeout=10) as answer:
        there = [json.loads(line) for line in answer.read().decode().splitlines()]
    mine = [r for r in there if r["request_id"] in ids]
    assert len(mine) == len({r["request_id"] for r in mine}) == len(ids)
    gaps = sorted(r["received_s"] - float(ids[r["request_id"]]["sent_s"]) for r in mine)
    # one clock for both parts: the distance of the engine's clock from the run's is the same for all
    assert gaps[-1] - gaps[0] < 1.0 and gaps[int(0.9 * len(gaps))] - gaps[len(gaps) // 10] < 0.1


def test_a_part_whose_master_is_lost(masters: Masters, tmp_path: Path) -> None:
    masters.start(1, 2, plan=("--qps-stages", "20,10", "--stage-duration", "5"))
    masters.start(2, 2, plan=("--qps-stages", "20,10", "--stage-duration", "5"))
    wait_for_rows(masters.run_dir(2), 10)
    end(masters.masters.pop(2))
    (first,) = masters.finish()
    assert first.code == 0 and "part_lost" in first.rows("stages.csv")[1]["marks"], masters.logs()
    into = tmp_path / "merged"
    done = bench("recover", str(first.run_dir), str(masters.run_dir(2)), str(tmp_path / "shards-2"), "--into", str(into))
    assert done.returncode == 0, done.stderr
    merged = Ran(0, done.stdout, "", into)
    for stage in merged.rows("stages.csv"):
        rows = [r for r in merged.rows() if r["stage"] == stage["stage"]]
        assert sorted(int(r["arrival"]) for r in rows) == list(range(int(stage["planned"])))
        gone = [r for r in rows if r["code"] == "CL-LOST"]
        assert gone and {int(r["arrival"]) % 2 for r in gone} == {1}  # only of the part that was lost
        assert {"part_lost", "master_lost"} & set(stage["marks"].split(";"))
    kept = [r for r in merged.rows() if r["stage"] == "0" and r["worker"] == "1" and r["status"] == "ok"]
    assert len(kept) >= 10  # the lost master's rows and its worker's shard are in it
    assert any("part 2/2" in problem for problem in merged.run()["problems"])
    assert bench("analyse", str(into)).returncode == 4


def wait_for_rows(run_dir: Path, count: int, limit_s: float = 60) -> None:
    import time

    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        path = run_dir / "requests.csv"
        if path.exists() and path.read_text(encoding="utf-8").count("\n") > count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} rows in {run_dir}")


def test_parts_of_two_plans_do_not_meet(masters: Masters) -> None:
    masters.start(1, 2)
    masters.start(2, 2, plan=("--qps-stages", "20,30", "--stage-duration", "3", "--plan-seed", "7"))
    second = masters.masters.pop(2)
    assert second.wait(60) == 2, masters.logs()
    problems = Ran(2, "", "", masters.run_dir(2)).run()["problems"]
    assert any("refuses" in text and "schedule" in text and "seed" in text for text in problems)
    end(masters.masters.pop(1))


def test_what_does_not_fit_is_not_merged(tmp_path: Path) -> None:
    base = part_folder(tmp_path / "a", 1, 2)
    cases = [
        (part_folder(tmp_path / "b", 1, 2, run_id="b"), "there twice"),
        (part_folder(tmp_path / "c", 3, 3, run_id="c"), "in 3 and 2 parts"),
        (part_folder(tmp_path / "d", 2, 2, run_id="d", schedule_hash="f" * 64), "two plans"),
        (part_folder(tmp_path / "e", 2, 2, run_id="e", load="other"), "one load"),
        (part_folder(tmp_path / "f", 0, 0, run_id="f"), "whole run"),
        (part_folder(tmp_path / "g", 1, 2), "both folders of run a"),
        (base, "nobody has the plan"),
        (part_folder(tmp_path / "h", 2, 2), "nobody has the plan"),  # the same run id on another machine: it is another part
    ]
    for other, why in cases:
        done = bench("recover", str(base), str(other), "--into", str(tmp_path / "into"))
        assert done.returncode == 2 and why in done.stderr, (why, done.stderr)
    assert not (tmp_path / "into").exists()
    assert bench("recover", str(base), "--into", str(tmp_path / "x"), "-o", str(tmp_path / "y")).returncode == 2


def part_folder(path: Path, part: int, of: int, **more: Any) -> Path:
    """A folder with just the run.json of a part; part 0: of a whole run."""
    from bench.records.ledger import RUN, write_run
    from bench.records.stage import RunInfo

    path.mkdir()
    load = more.pop("load", "a")
    info = RunInfo("a", "", None, "0", {}, {}, 1, "0" * 64, [], {}, {}, "open", "sweep", 1)
    info.part = {"part": part, "of": of, "load": load, "t0_s": 0.0, "lead_t0_s": 0.0, "stages": {}} if part else {}
    for name, value in more.items():
        setattr(info, name, value)
    write_run(path / RUN, info)
    return path


def test_a_faked_offset_moves_the_times_and_widens_the_bound(masters: Masters, tmp_path: Path) -> None:
    """The second part's clock is 1000 s ahead of the first's: the merged times do not show it, the bound does."""
    masters.start(1, 2, plan=("--qps-stages", "20", "--stage-duration", "3"))
    masters.start(2, 2, plan=("--qps-stages", "20", "--stage-duration", "3"))
    one, two = masters.finish()
    assert bench("recover", str(one.run_dir), str(two.run_dir), "--into", str(tmp_path / "true")).returncode == 0
    check_listed(two.run_dir)
    moved = tmp_path / "moved"
    shutil.copytree(two.run_dir, moved)
    info = two.run()
    (moved / "run.json").write_text(json.dumps(info | {"seed": info["seed"] + 1}))
    done = bench("recover", str(one.run_dir), str(moved), "--into", str(tmp_path / "edited"))
    assert done.returncode == 2 and "run.json was changed after the run ended" in done.stderr, done.stderr
    info["files"] = {}  # a folder that lists nothing has nothing to differ from
    info["part"]["t0_s"] += 1000.0  # its own clock at its start ...
    info["part"]["stages"]["0"] = {"offset_s": -1000.0, "bound_s": 0.25, "shared": False}  # ... and how far it is off
    (moved / "run.json").write_text(json.dumps(info))
    done = bench("recover", str(one.run_dir), str(moved), "--into", str(tmp_path / "faked"))
    assert done.returncode == 0, done.stderr
    true, faked = Ran(0, "", "", tmp_path / "true"), Ran(0, "", "", tmp_path / "faked")
    for name in ("intended_s", "sent_s", "done_s"):
        a, b = ({r["arrival"]: float(r[name]) for r in ran.rows()} for ran in (true, faked))
        assert max(abs(a[i] - b[i]) for i in a) < 1e-6
    bounds = {w["part"]: (w["bound_s"], w["shared"]) for w in faked.run()["worker_info"]}
    assert bounds == {"1/2": (0.0, True), "2/2": (0.25, False)}
    assert bench("analyse", str(tmp_path / "faked")).returncode == 4  # above a tenth of the deadline of 0.8 s
    assert "INV-OFFSET" in (tmp_path / "faked" / "analysis.json").read_text()
