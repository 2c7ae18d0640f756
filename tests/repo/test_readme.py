"""Every command of the README is run, as it stands but for the service's address, lengths and a run's name."""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.commands.engine_process import EngineProcess, start_engine
from bench.commands.job_options import PROJECT
from bench.commands.locust_process import free_port

README = (PROJECT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.strip()]

# How each kind of line is tried. A line of a kind that is not here fails the last test.
SHELL = ("export ", ". .venv/bin/activate")
MAKE = ("make ",)
TO_THE_END = ("bench ",)
LOCUST = ("locust ",)
LENGTHS = {"BENCH_STAGE_DURATION": "1", "BENCH_QPS_STAGES": "5,10"}  # what the README's commands do not say themselves
KEY = "sk-readme-Qz83LmVw5TbX"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder that looks like a clone, and the environment of its user, with a service that asks for a key."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("locustfiles", "shapes", "docs"):
        (folder / name).symlink_to(PROJECT / name)
    shutil.copytree(PROJECT / "configs", folder / "configs")
    reference = folder / "configs" / "scheduler_bench.json"
    asked = json.loads(reference.read_text(encoding="utf-8"))
    asked["loadgen"]["output_len_mu"] = 2.0  # answers of about seven tokens instead of 400: drains of a tenth of a second
    reference.write_text(json.dumps(asked), encoding="utf-8")
    (folder / ".bench-key").write_text(KEY, encoding="utf-8")
    config = folder / "engine.json"
    config.write_text(json.dumps({"model": "readme-7b", "engine": {"embedded": True}, "loadgen": {"output_len_mu": 2.0}}))
    with start_engine(config, api_key_file=folder / ".bench-key") as engine:
        yield folder, user(folder, engine)


def user(folder: Path, engine: EngineProcess) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "TAOTOKEN_", "LOCUST_"))}
    return {
        **kept,
        "HOME": str(folder),
        "NO_COLOR": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}",
        "BENCH_BASE_URL": engine.base_url + "/v1",
        "BENCH_MODEL": "readme-7b",
        "BENCH_API_KEY_FILE": str(folder / ".bench-key"),
        **LENGTHS,
    }


def shortened(line: str, folder: Path) -> str:
    """The line with its stages cut to a second and `runs/RUN` made the newest run."""
    line = re.sub(r"--stage-duration \d+", "--stage-duration 1", line)
    runs = sorted((folder / "runs").glob("*/analysis.json"), key=lambda p: p.stat().st_mtime)
    return line.replace("runs/RUN", str(runs[-1].parent.relative_to(folder)) if runs else "runs/RUN")


def test_the_exports_are_the_three_piece_set() -> None:
    names = re.findall(r"^export (\w+)=", "\n".join(COMMANDS), re.MULTILINE)
    assert names == ["BENCH_BASE_URL", "BENCH_MODEL", "BENCH_API_KEY_FILE"]


@pytest.mark.timeout(600)  # some ten whole jobs, on a busy machine too
def test_the_bench_commands(place: tuple[Path, dict[str, str]]) -> None:
    folder, environment = place
    for line in [line for line in COMMANDS if line.startswith(TO_THE_END)]:
        line = shortened(line, folder)
        whole = line.startswith("bench simulate")  # virtual time: nothing to shorten
        env = {k: v for k, v in environment.items() if not (whole and k in LENGTHS)}
        done = subprocess.run(
            ["bash", "-c", line], env=env, cwd=folder, capture_output=True, text=True, timeout=150, check=False
        )
        # a second of load decides nothing: a verdict of any kind will do, a refusal or a crash will not
        allowed = (0, 1, 4) if line.startswith(("bench run", "bench analyse", "bench simulate")) else (0,)
        assert done.returncode in allowed, f"{line}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr and KEY not in done.stdout + done.stderr, line
    assert len(list((folder / "runs").glob("*/report.html"))) >= 6


@pytest.mark.timeout(200)
def test_the_locust_commands(place: tuple[Path, dict[str, str]]) -> None:
    folder, environment = place
    port = str(free_port())
    environment = {
        **environment,
        "BENCH_RUNS": str(folder / "by-hand"),
        "LOCUST_MASTER_BIND_HOST": "127.0.0.1",
        "LOCUST_MASTER_BIND_PORT": port,
        "LOCUST_MASTER_NODE_PORT": port,
        "LOCUST_WEB_PORT": str(free_port()),
    }
    waiting: list[subprocess.Popen[str]] = []
    lines = [line for line in COMMANDS if line.startswith(LOCUST)]
    try:
        for line in lines:
            process = subprocess.Popen(
                ["bash", "-c", "exec " + line], env=environment, cwd=folder, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            waiting.append(process)
            if "--headless" in line and "--master" not in line:
                assert process.wait(60) == 0, f"{line}\n{process.stderr.read() if process.stderr else ''}"
            elif "--web-host" in line:
                answers("127.0.0.1", int(environment["LOCUST_WEB_PORT"]))
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(20)
        master, worker = waiting[-2:]  # the last two lines of the README belong together
        assert "--master " in lines[-2] and "--worker" in lines[-1]
        assert master.wait(60) == 0 and worker.wait(20) == 0
    finally:
        for process in waiting:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    assert len(list((folder / "by-hand").glob("*/requests.csv"))) == 3


def answers(host: str, port: int) -> None:
    import socket

    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nobody listens on {host}:{port}")


def test_make_demo(place: tuple[Path, dict[str, str]]) -> None:
    """As the README says it, with shorter stages; the environment that make would make is the one of this test."""
    folder, environment = place
    if Path(sys.prefix) != PROJECT / ".venv" or not (PROJECT / ".venv" / ".ready").exists():
        pytest.skip("the tests do not run in the .venv that make has made")
    environment = {**environment, "BENCH_RUNS": str(folder / "demo"), "BENCH_STAGE_DURATION": "4", "BENCH_QPS_STAGES": "15"}
    done = subprocess.run(
        ["make", "demo"], env=environment, cwd=PROJECT, capture_output=True, text=True, timeout=100, check=False
    )
    assert "report: " in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert len(list((folder / "demo").glob("*/report.html"))) == 1


def test_no_line_of_the_readme_is_left_out() -> None:
    known = SHELL + MAKE + TO_THE_END + LOCUST
    assert [line for line in COMMANDS if not line.startswith(known)] == []
    # `make demo` has a test of its own above; `make test` is what runs this one
    assert [line for line in COMMANDS if line.startswith(MAKE)] == ["make demo", "make test"]


def test_the_first_screen_says_how_to_begin_and_the_ways_in() -> None:
    """Before the second heading: what it is, the two commands, the picture, one row for each way to use it."""
    top = README.split("\n## ", 1)[0]
    assert re.findall(r"^make .+", top, re.MULTILINE) == ["make demo", "make test"] and "docs/images/report.png" in top
    rows = re.findall(r"^\| .+ \|$", top, re.MULTILINE)[1:]
    sections = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", README, re.MULTILINE)}
    assert len(rows) == 4 and all(set(re.findall(r"\(#([^)]+)\)", row)) & sections for row in rows)
    assert len(top.split()) < 350  # a screen, not an essay


def test_every_page_the_readme_names_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert [link for link in links if not (PROJECT / link).exists()] == []
