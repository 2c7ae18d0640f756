"""A real engine, a real Locust, short stages: what the tests of the load share."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.commands.engine_process import EngineProcess, start_engine
from bench.commands.job_options import PROJECT
from bench.commands.locust_process import free_port

# Short answers of about ten tokens: a stage of three seconds drains in a tenth of one.
CONFIG: dict[str, Any] = {
    "model": "embedded",
    "scheduler": {"policy": "fcfs", "max_num_seqs": 32, "batch_size_cap": 32},
    "slo": {"ttft_deadline_ms": 800, "tpot_deadline_ms": 100, "p95_target_ms": 4000, "attainment_target": 0.9},
    "loadgen": {"target_qps": 20, "duration_sec": 3, "input_len_range": [20, 200], "output_len_mu": 2.3},
    "sweep": {"qps": [10, 20], "warmup_sec": 0.5, "drain_limit_sec": 10},
    "engine": {"embedded": True},
}


def config_with(**sections: Any) -> dict[str, Any]:
    """The config above with some sections changed, key by key."""
    out = json.loads(json.dumps(CONFIG))
    for name, value in sections.items():
        if isinstance(value, dict) and isinstance(out.get(name), dict):
            out[name].update(value)
        else:
            out[name] = value
    return out


@dataclass
class Ran:
    """A finished run: exit code, console, folder."""

    code: int
    out: str
    err: str
    run_dir: Path

    def rows(self, name: str = "requests.csv") -> list[dict[str, str]]:
        with (self.run_dir / name).open(encoding="utf-8", newline="") as handle:
            return list(csv.DictReader(handle))

    def run(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "test.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def engine(config_file: Path) -> Iterator[EngineProcess]:
    with start_engine(config_file) as process:
        yield process


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without any of our own variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("BENCH_", "TAOTOKEN_", "LOCUST_"))}
    return {**kept, "NO_COLOR": "1", **more}


def locust_command(*arguments: str, files: str = "chat.py", shape: str | None = "sweep") -> list[str]:
    """A Locust command line with our locustfile and shape."""
    parts = [str(PROJECT / "locustfiles" / files)] + ([str(PROJECT / "shapes" / f"{shape}.py")] if shape else [])
    return [sys.executable, "-m", "locust", "-f", ",".join(parts), "--only-summary", *arguments]


def start_locust(log: Path, environment: dict[str, str], *arguments: str, shape: str | None = "sweep") -> subprocess.Popen[str]:
    """A Locust process in the log's folder; `end` stops it."""
    with log.open("w") as handle:
        return subprocess.Popen(
            locust_command(*arguments, shape=shape), env=environment, cwd=log.parent, stdout=handle, stderr=handle,
            text=True, start_new_session=True,
        )  # fmt: skip


def own_port() -> tuple[str, ...]:
    """Arguments that keep master and workers on a free loopback port."""
    port = str(free_port())
    return (
        "--master-bind-host",
        "127.0.0.1",
        "--master-bind-port",
        port,
        "--master-host",
        "127.0.0.1",
        "--master-port",
        port,
    )


@pytest.fixture
def run_locust(engine: EngineProcess, config_file: Path, tmp_path: Path) -> Any:
    """Run a plain Locust command to its end."""

    def run(
        *arguments: str,
        files: str = "chat.py",
        shape: str | None = "sweep",
        url: str | None = None,
        timeout: float = 60,
    ) -> Ran:
        run_dir = tmp_path / "run"
        command = locust_command(
            "--headless",
            "--bench-config",
            str(config_file),
            "--run-dir",
            str(run_dir),
            *arguments,
            files=files,
            shape=shape,
        )
        done = subprocess.run(
            command, env=clean_environment(BENCH_TARGET_URL=engine.base_url if url is None else url), capture_output=True, text=True,
            timeout=timeout, check=False, cwd=tmp_path,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr, run_dir)

    return run


@pytest.fixture
def run_bench(tmp_path: Path) -> Any:
    """Run `bench ...` to its end with a config of the test."""

    def run(*arguments: str, config: dict[str, Any] | None = None, environment: dict[str, str] | None = None,
            timeout: float = 90) -> Ran:  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config or CONFIG), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "bench", "run", "-c", str(path), "--run-dir", str(tmp_path / "run"), *arguments],
            env=clean_environment(**(environment or {})), capture_output=True, text=True, timeout=timeout, check=False,
            cwd=tmp_path,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr, tmp_path / "run")

    return run


def end(process: subprocess.Popen[Any]) -> None:
    """Stop a process of ours and all it started."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    process.wait(10)
