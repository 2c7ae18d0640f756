"""One run folder, one job: a second one is refused, and a job that was killed leaves nothing in the way."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.commands import finish
from bench.commands.job_options import JobError, JobOptions
from bench.commands.prepare import run_dir_of

from .listed import check_listed

pytest.importorskip("fcntl")
PROJECT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from bench.commands.job_options import JobOptions
from bench.commands.prepare import run_dir_of
with run_dir_of(JobOptions(config=Path("x.json"), run_dir=Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def options(folder: Path) -> JobOptions:
    return JobOptions(config=Path("x.json"), run_dir=folder)


def test_a_second_job_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    with run_dir_of(options(folder)) as path:
        assert path == folder
        with pytest.raises(JobError, match="another run is writing here; give --run-dir another folder") as caught, \
             run_dir_of(options(folder)):  # fmt: skip
            pass
        assert caught.value.exit_code == 2
    with run_dir_of(options(folder)):
        (folder / "requests.csv").write_text("x\n")
    with pytest.raises(JobError, match="holds a run already"), run_dir_of(options(folder)):
        pass


def test_a_killed_job_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    job = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    try:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        with pytest.raises(JobError, match="another run is writing here"), run_dir_of(options(folder)):
            pass
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.communicate()
    with run_dir_of(options(folder)) as path:
        assert path == folder


def test_of_two_simulations_into_one_folder_one_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "simulate", "--config", "configs/demo.json", "--qps", "5",
               "--stage-duration", "5", "--no-report", "--run-dir", str(tmp_path / "r")]  # fmt: skip
    jobs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=PROJECT) for _ in range(2)]
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 2], said
    refused = said[0] if jobs[0].returncode == 2 else said[1]
    assert "another run is writing here" in refused or "holds a run already" in refused

    check_listed(tmp_path / "r")


@pytest.mark.parametrize(("free", "said"), [(0, "the disk is full (0 bytes are free)"), (1 << 30, "No such file")])
def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, said: str) -> None:
    """The ledger's header fitted, run.json did not."""
    (tmp_path / "requests.csv").write_text("stage,arrival\n")
    monkeypatch.setattr(finish.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    stops = SimpleNamespace(hits=0, loading=True)
    with pytest.raises(JobError, match="cannot be closed") as caught:
        finish.finish(options(tmp_path), None, tmp_path, 1, None, stops)  # type: ignore[arg-type]
    assert said in str(caught.value)
