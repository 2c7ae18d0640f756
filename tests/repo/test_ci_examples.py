"""The CI examples: they parse, their shell is shell, and every `bench` command in them is one, with options that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from bench.__main__ import COMMANDS
from bench.commands.job_options import PROJECT
from tests.repo.write_cli_doc import load

CI = PROJECT / "deploy" / "ci"


def document(name: str) -> dict[str, Any]:
    return yaml.safe_load((CI / name).read_text(encoding="utf-8"))


def github_scripts() -> list[str]:
    steps = document("github-actions.yml")["jobs"]["load"]["steps"]
    return [step["run"] for step in steps if "run" in step]


def gitlab_scripts() -> list[str]:
    job = document("gitlab-ci.yml")["load-test"]
    return ["\n".join(job[key]) for key in ("before_script", "script", "after_script")]


SCRIPTS = [("github", s) for s in github_scripts()] + [("gitlab", s) for s in gitlab_scripts()]


@pytest.mark.parametrize(("where", "script"), SCRIPTS)
def test_the_shell_of_the_examples_is_shell(where: str, script: str) -> None:
    for shell in ("bash", "sh"):
        done = subprocess.run([shell, "-n", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{where}: {done.stderr}"


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml", "docs/ci.md"])
def test_every_bench_command_exists_with_its_options(name: str) -> None:
    text = (PROJECT / name if "/" in name else CI / name).read_text(encoding="utf-8")
    calls = re.findall(r"(?:^|[;`\n]|- )\s*(bench [a-z-]+[^;`\n#]*)", text)
    assert calls
    for call in calls:
        words = shlex.split(call.replace('"$@"', "").replace('"$CONFIG"', "c.json"))
        assert words[1] in COMMANDS, call
        known = {o for p in load(words[1]).params if isinstance(p, click.Option) for o in (*p.opts, *p.secondary_opts)}
        assert {w for w in words[2:] if w.startswith("-")} <= known | {"--help"}, call
    options = {o for p in load("run").params if isinstance(p, click.Option) for o in p.opts}
    for extra in re.findall(r"set -- (?:\"\$@\" )?(--[a-z-]+)", text):
        assert extra in options


def test_what_the_github_example_keeps_and_asks_for() -> None:
    data = document("github-actions.yml")
    assert data["permissions"] == {"contents": "read"} and data["concurrency"]["cancel-in-progress"] is False
    job = data["jobs"]["load"]
    assert job["env"]["BENCH_API_KEY"] == "${{ secrets.BENCH_API_KEY }}"
    upload = next(s for s in job["steps"] if "upload-artifact" in s.get("uses", ""))
    assert upload["if"] == "always()" and upload["with"]["path"] == "run/"
    assert all("@v" in s["uses"] for s in job["steps"] if "uses" in s)


def test_what_the_gitlab_example_keeps() -> None:
    job = document("gitlab-ci.yml")["load-test"]
    assert job["artifacts"]["when"] == "always" and job["artifacts"]["reports"]["junit"] == "run/junit.xml"
    assert job["artifacts"]["paths"] == ["run/"] and job["resource_group"]
    lists = [options["envvar"] for _, options in __import__("bench.commands.options", fromlist=["LOAD"]).LOAD if "envvar" in options]
    assert "BENCH_QPS_STAGES" in lists  # the variable of the merge request rule


@pytest.mark.parametrize("event", ["pull_request", "schedule"])
@pytest.mark.parametrize("baseline", [False, True])
def test_the_load_step_calls_bench_with_the_right_words(tmp_path: Path, event: str, baseline: bool) -> None:
    """The step as it stands, with a `bench` that writes its words down and a verdict of its own."""
    (step,) = [s for s in github_scripts() if "bench run" in s]
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "bench"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\nexit 5\n', encoding="utf-8")
    fake.chmod(0o755)
    if baseline:
        (tmp_path / "baseline").mkdir()
        (tmp_path / "baseline" / "requests.csv").touch()
    done = subprocess.run(["bash", "-e", "-c", step], cwd=tmp_path, check=False, env={
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "GITHUB_EVENT_NAME": event, "CONFIG": "c.json"})  # fmt: skip
    assert done.returncode == 5  # the verdict is the step's exit code
    words = (tmp_path / "words").read_text(encoding="utf-8").split()
    assert words[:5] == ["run", "--config", "c.json", "--run-dir", "run"]
    assert words[5:] == (["--baseline", "baseline"] if baseline else []) + (["--qps", "10,20"] if event == "pull_request" else [])


def test_the_gates_of_the_page_are_a_good_config(tmp_path: Path) -> None:
    from bench.config import load_config

    (block,) = re.findall(r"```json\n(.*?)```", (PROJECT / "docs" / "ci.md").read_text(encoding="utf-8"), re.DOTALL)
    config = {"model": "m", "base_url": "http://127.0.0.1:9", **json.loads(block)}
    (tmp_path / "c.json").write_text(json.dumps(config), encoding="utf-8")
    gates = load_config(tmp_path / "c.json", env={}).config.gates
    assert [g.abort for g in gates] == [False, False, True] and gates[0].severity == "fail"
