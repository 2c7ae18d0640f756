"""The image and the compose file on a real engine: a whole run, a worker container that dies, one that is cut off."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import secrets
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .engine import PROJECT, build, compose_command, engine_name, no_base, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(REASON), reason=f"no container engine: {REASON}"),
]


class Project:
    """One compose project of this test run; removed with its volumes at the end."""

    def __init__(self, image: str) -> None:
        self.name = f"benchtest{secrets.token_hex(3)}"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "TAOTOKEN_"))},
            "COMPOSE_PROJECT_NAME": self.name, "BENCH_IMAGE": image, "WORKERS": "2", "WORKER_CPUS": "2", "BENCH_QPS": "10,20",
            "NOFILE": "8192", "METRICS_PORT": "0",
        }  # fmt: skip

    def compose(self, *arguments: str, timeout: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
        command = compose_command()
        assert command is not None
        return subprocess.run(
            [*command, "-f", str(PROJECT / "docker-compose.yml"), "--profile", "demo", *arguments],
            env={**self.environment, **more}, capture_output=True, text=True, check=False, timeout=timeout, cwd=PROJECT,
        )  # fmt: skip

    def container(self, service: str) -> list[str]:
        return self.compose("ps", "-q", service).stdout.split()

    def engine(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run([engine_name(), *arguments], capture_output=True, text=True, check=False, timeout=timeout)

    def files(self, folder: Path) -> Path:
        """The run folder, copied out of the master's container."""
        (master,) = self.engine("ps", "-aq", "--filter", f"name={self.name}.master").stdout.split()
        assert self.engine("cp", f"{master}:/runs", str(folder)).returncode == 0
        (run,) = [p.parent for p in folder.rglob("run.json")]
        return run

    def received(self, engine: str, limit_s: float = 60) -> list[dict[str, Any]]:
        """The engine container's own record of every request; asked again while a busy machine refuses the `exec`."""
        ask = (
            "import sys, urllib.request as u; "
            "sys.stdout.write(u.urlopen('http://127.0.0.1:8000/debug/requests', timeout=20).read().decode())"
        )
        limit, said = time.monotonic() + limit_s, ""
        while time.monotonic() < limit:
            done = self.engine("exec", engine, "python", "-c", ask)
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            if done.returncode == 0 and lines:
                return [json.loads(line) for line in lines]
            said = f"code {done.returncode}, {len(lines)} lines, {done.stderr.strip()[-500:]}"
            time.sleep(0.5)
        state = self.engine("inspect", "-f", "{{json .State}}", engine).stdout
        raise AssertionError(f"the engine's record cannot be had: {said}; container: {state}; "
                             f"{self.engine('logs', '--tail', '20', engine)}")  # fmt: skip

    def wait_for_rows(self, count: int, limit_s: float = 120) -> None:
        (master,) = self.container("master")
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit:
            said = self.engine("exec", master, "sh", "-c", "cat /runs/*/requests.csv | wc -l").stdout.strip()
            if said.isdigit() and int(said) > count:
                return
            time.sleep(0.5)
        raise AssertionError(self.compose("logs", "--tail", "40").stdout)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    if reason := no_base():
        pytest.skip(f"no base image: {reason}")
    return build(tmp_path_factory.mktemp("image"))


@pytest.fixture
def project(image: str) -> Iterator[Project]:
    there = Project(image)
    try:
        yield there
    finally:
        there.compose("down", "-v", "--timeout", "2", timeout=120)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def check_whole(run: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    rows, stages = read(run / "requests.csv"), read(run / "stages.csv")
    for stage in stages:
        mine = sorted(int(r["arrival"]) for r in rows if r["stage"] == stage["stage"])
        assert mine == list(range(int(stage["planned"])))
    return rows, stages


def test_the_demo_profile_runs_to_its_report(project: Project, tmp_path: Path) -> None:
    done = project.compose("up", "--no-build", "--exit-code-from", "master", BENCH_STAGE_DURATION="8")
    run = project.files(tmp_path / "runs")
    rows, stages = check_whole(run)
    assert {"report.html", "summary.json", "junit.xml", "analysis.json"} <= {p.name for p in run.iterdir()}
    verdict = json.loads((run / "analysis.json").read_text())["verdict"]
    # a busy machine may make the run FAIL or INVALID; what matters here is that its code came out
    assert done.returncode == verdict["exit_code"] and verdict["exit_code"] in (0, 1, 4), done.stdout[-2000:]
    assert {r["status"] for r in rows} == {"ok"} and {r["worker"] for r in rows} == {"0", "1"}
    assert all(stage["workers"] == "2" for stage in stages)
    # nothing of ours runs as root, and the key is in no file of the run and in no log
    user = project.engine("inspect", "-f", "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}}", project.engine(
        "ps", "-aq", "--filter", f"name={project.name}.master").stdout.strip()).stdout.split()
    assert user == ["10001:10001", "true"]
    key = (PROJECT / "deploy" / "demo.key").read_bytes().strip()
    assert key not in project.compose("logs").stdout.encode()
    assert all(key not in path.read_bytes() for path in run.rglob("*") if path.is_file())
    # the one-shot report: of the newest run, with the run's code
    again = project.compose("run", "--rm", "report")
    assert again.returncode == verdict["exit_code"] and f"/runs/{run.name}/report.html" in again.stdout, again.stderr[-2000:]
    nothing = project.compose("run", "--rm", "report", RUN="/runs/nothing")
    assert nothing.returncode == 2 and "no run folder '/runs/nothing'" in nothing.stdout + nothing.stderr


def test_a_master_that_is_told_to_stop_drains_and_reports(project: Project, tmp_path: Path) -> None:
    assert project.compose("up", "-d", "--no-build", BENCH_STAGE_DURATION="60").returncode == 0
    project.wait_for_rows(20)
    (master,) = project.container("master")
    began = time.monotonic()
    assert project.compose("stop", "master").returncode == 0  # SIGTERM, then stop_grace_period, then SIGKILL
    assert time.monotonic() - began < 100  # of 120 s: it ended by itself
    assert project.engine("inspect", "-f", "{{.State.ExitCode}}", master).stdout.strip() == "130"
    run = project.files(tmp_path / "runs")
    rows, stages = check_whole(run)
    assert "interrupted" in stages[0]["marks"] and {r["status"] for r in rows} == {"ok", "unsent"}
    assert (run / "report.html").exists()


def test_the_web_page_is_on_loopback_alone(project: Project) -> None:
    ui = ("-f", str(PROJECT / "deploy" / "compose.ui.yml"))
    up = project.compose(*ui, "up", "-d", "--no-build", WEB_PORT="0")
    assert up.returncode == 0, up.stderr
    (master,) = project.container("master")
    (place,) = set(project.engine("port", master, "8089").stdout.split())
    assert place.startswith("127.0.0.1:")
    limit, page = time.monotonic() + 60, ""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while "Locust" not in page and time.monotonic() < limit:
        with contextlib.suppress(OSError), opener.open(f"http://{place}/", timeout=5) as answer:
            page = answer.read().decode()
        time.sleep(0.2)
    assert "Locust" in page


def test_a_worker_container_that_is_killed(project: Project, tmp_path: Path) -> None:
    assert project.compose("up", "-d", "--no-build", BENCH_STAGE_DURATION="15").returncode == 0
    project.wait_for_rows(20)
    workers = project.container("worker")
    assert project.engine("kill", workers[1]).returncode == 0
    (master,) = project.container("master")
    code = project.engine("wait", master).stdout.strip()
    rows, stages = check_whole(project.files(tmp_path / "runs"))
    assert code in ("1", "4")  # said to be INVALID, at least in the stage that lost it
    assert any("worker_lost" in stage["marks"] for stage in stages)
    lost = next(s for s in stages if "worker_lost" in s["marks"])
    moved = [r for r in rows if r["stage"] == lost["stage"] and int(r["arrival"]) % 2 != int(r["worker"])]
    assert moved and {r["status"] for r in moved} == {"ok"}
    if "worker_lost" not in stages[-1]["marks"]:  # a slow machine may kill it in the last stage
        assert stages[-1]["workers"] == "1"


def test_a_worker_container_that_is_cut_off(project: Project, tmp_path: Path) -> None:
    """It still reaches the service, but not its master: it must stop sending by itself."""
    assert project.compose("up", "-d", "--no-build", BENCH_STAGE_DURATION="15").returncode == 0
    project.wait_for_rows(20)
    workers = project.container("worker")
    assert project.engine("network", "disconnect", f"{project.name}_inner", workers[1]).returncode == 0
    (master,), (engine,) = project.container("master"), project.container("engine")
    project.engine("wait", master)
    there = [request["request_id"] for request in project.received(engine)]
    run = project.files(tmp_path / "runs")
    _, stages = check_whole(run)
    assert any("worker_lost" in stage["marks"] for stage in stages)
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    received = [request_id for request_id in there if request_id.startswith(run_id)]
    assert len(received) > 50 and len(received) == len(set(received))  # no arrival was sent twice
