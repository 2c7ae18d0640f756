"""The analysis in a process of its own says what the analysis in this one says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.analyse import analyse_run, write_analysis
from analysis.load import LedgerError
from bench.commands.analysis_apart import AnalysisRefused, analysed
from bench.records.analysis import to_json
from benchmarks.analysis import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path, 2_000)
    return tmp_path


def test_the_file_and_the_result_are_those_of_this_process(run_dir: Path) -> None:
    here = to_json(write_analysis(run_dir))
    (run_dir / "analysis.json").unlink()
    found = analysed(run_dir)
    assert to_json(found) == here
    assert (run_dir / "analysis.json").read_text(encoding="utf-8") == here + "\n"


def test_what_the_caller_does_meanwhile_runs_before_the_result(run_dir: Path) -> None:
    seen: list[bool] = []
    analysed(run_dir, meanwhile=lambda: seen.append((run_dir / "requests.csv").exists()))
    assert seen == [True]


def test_a_refusal_has_the_same_text(run_dir: Path) -> None:
    (run_dir / "requests.csv").write_text("", encoding="utf-8")
    with pytest.raises(LedgerError) as here:
        analyse_run(run_dir)
    with pytest.raises(AnalysisRefused) as apart:
        analysed(run_dir)
    assert str(apart.value) == str(here.value)


def test_a_file_that_cannot_be_written_is_an_os_error(run_dir: Path) -> None:
    (run_dir / "analysis.json.part").mkdir()
    with pytest.raises(OSError, match="Is a directory") as caught:
        analysed(run_dir)
    assert str(caught.value.filename).endswith("analysis.json.part")


def test_a_process_that_is_killed_is_a_refusal_that_says_what_to_do(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"import os, signal; os.kill(os.getpid(), signal.{signal.SIGKILL.name})"
    stand_in = run_dir / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n', encoding="utf-8")
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with pytest.raises(AnalysisRefused, match="by signal SIGKILL; .* bench analyse"):
        analysed(run_dir)


def test_it_works_from_another_folder(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(run_dir.parent)
    assert analysed(Path(run_dir.name)).ledger["rows"] == 2_000


def test_nothing_of_it_is_left_when_the_caller_leaves(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[str]] = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: made.append(start(*a, **k)) or made[-1])

    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analysed(run_dir, meanwhile=leave)
    assert [process.returncode for process in made] == [-signal.SIGKILL]
    assert not (run_dir / "analysis.json").exists()
