"""The API key is nowhere but in the request: no file, log, message, page, argument; the workers' port is on loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.commands.engine_process import start_engine
from bench.commands.locust_process import free_port

from .conftest import PROJECT, clean_environment, config_with, end, locust_command

KEY = "sk-test-0815-a-key-that-nobody-may-see"
# Prints every message that the process sends on Locust's channel, then goes on as the real module.
WITH_TAP = """
import runpy, sys
import locust
from locust.rpc import protocol
real = protocol.Message.serialize
def tapped(self):
    data = real(self)
    with open(TAP, "ab") as file:
        file.write(data)
    return data
protocol.Message.serialize = tapped
sys.argv = ["locust", *sys.argv[1:]]
runpy.run_module("locust", run_name="__main__")
"""


def tapped(command: list[str], tap: Path) -> list[str]:
    """The Locust command with a copy of all its messages in a file."""
    at = command.index("locust")
    return [command[0], "-c", f"TAP = {str(tap)!r}\n{WITH_TAP}", *command[at + 1 :]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with a key, a master and a worker, each message, page and process list of it."""
    folder = tmp_path_factory.mktemp("secrets")
    key_file = folder / "api.key"
    key_file.write_text(KEY + "\n")
    config = folder / "config.json"
    config.write_text(json.dumps(config_with(engine={"embedded": False}, sweep={"qps": [20]})), encoding="utf-8")
    port, metrics = str(free_port()), str(free_port())
    common: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "start_new_session": True}
    work = folder / "work"
    work.mkdir()
    with start_engine(config, api_key_file=key_file) as engine:
        environment = clean_environment(
            BENCH_TARGET_URL=engine.base_url, BENCH_API_KEY_FILE=str(key_file), BENCH_SHARD_DIR=str(work / "shards")
        )
        ports = ("--master-host", "127.0.0.1", "--master-port", port)
        master = subprocess.Popen(
            tapped(locust_command("--headless", "--master", "--expect-workers", "1", "--master-bind-host", "127.0.0.1",
                                  "--master-bind-port", port, "--bench-config", str(config), "--run-dir", str(work / "run"),
                                  "--metrics-port", metrics), work / "master.tap"),
            env=environment, stderr=(work / "master.log").open("w"), **common,
        )  # fmt: skip
        worker = subprocess.Popen(
            tapped(locust_command("--worker", *ports), work / "worker.tap"), env=environment,
            stderr=(work / "worker.log").open("w"), **common,
        )  # fmt: skip
        pages, lines, addresses = [], set(), set()
        try:
            limit = time.monotonic() + 60
            while master.poll() is None and time.monotonic() < limit:
                for process in psutil.process_iter(["cmdline"]):
                    lines.add(" ".join(process.info["cmdline"] or []))
                addresses |= {c.laddr.ip for c in psutil.Process(master.pid).net_connections() if c.status == "LISTEN"}
                with contextlib.suppress(OSError):  # not yet, or not any more
                    pages.append(urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=5).read())
                time.sleep(0.3)
            assert master.wait(10) == 0, (work / "master.log").read_text()[-2000:]
        except psutil.NoSuchProcess:
            assert master.wait(10) == 0
        finally:
            end(master)
            end(worker)
    for command in ("analyse", "report"):
        subprocess.run([sys.executable, "-m", "bench", command, str(work / "run")], env=environment, cwd=PROJECT,
                       capture_output=True, check=False, timeout=60)  # fmt: skip
    return work, pages, lines, addresses


def test_the_key_was_used_and_is_in_no_file(seen: Any) -> None:
    work, _, _, _ = seen
    rows = (work / "run" / "requests.csv").read_text()
    assert rows.count(",ok,") > 30 and "CH-401" not in rows  # the engine asked for the key and got it
    files = [path for path in work.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"run.json", "requests.csv", "report.html", "analysis.json", "master.log", "master.tap", "worker.tap"} <= names
    assert any(name.endswith(".shard") for name in names)
    for part in (KEY, KEY[:16], KEY[-16:]):
        assert [path.name for path in files if part.encode() in path.read_bytes()] == []


def test_the_messages_were_really_looked_at(seen: Any) -> None:
    work, _, _, _ = seen
    assert b"bench_stage" in (work / "master.tap").read_bytes() and b"bench_rows" in (work / "worker.tap").read_bytes()


def test_the_key_is_on_no_page_and_in_no_process_list(seen: Any) -> None:
    _, pages, lines, _ = seen
    assert pages and any("locust" in line for line in lines)
    assert not any(KEY.encode() in page for page in pages)
    assert not any(KEY in line for line in lines)


def test_the_master_listens_on_loopback_only(seen: Any) -> None:
    _, _, _, addresses = seen
    assert addresses == {"127.0.0.1"}


@pytest.mark.parametrize("shape", ["sweep", None])
def test_a_damaged_key_file_is_refused_before_anything_starts(engine: Any, tmp_path: Path, shape: str | None) -> None:
    (tmp_path / "api.key").write_text(f"{KEY[:10]} {KEY[10:]}\n")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_with(engine={"embedded": False})), encoding="utf-8")
    done = subprocess.run(
        locust_command("--headless", "--bench-config", str(config), "--run-dir", str(tmp_path / "run"), shape=shape),
        env=clean_environment(BENCH_TARGET_URL=engine.base_url, BENCH_API_KEY_FILE=str(tmp_path / "api.key")),
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    (said,) = [line for line in done.stderr.splitlines() if "ERROR" in line]
    assert "CFG-013" in said and "a blank inside" in said and "Traceback" not in done.stderr
    assert KEY[:10] not in done.stderr + done.stdout
