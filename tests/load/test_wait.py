"""`bench run --wait`: a service that comes up is waited for, one that says no for good is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.client.codes import CODES
from bench.client.preflight import Check, PreflightReport
from bench.commands import job
from bench.commands.console import Console
from bench.commands.job_options import EXIT_CHANNEL, JobError, JobOptions
from bench.config import load_config

# Written by hand, not from the rule: what another try a minute later may find mended.
COMES_UP = {
    "CH-DNS", "CH-REFUSED", "CH-UNREACHABLE", "CH-RESET", "CH-CLOSED", "CH-CUT", "CH-TLS", "CH-PROXY", "CH-MODEL",
    "CH-502", "CH-504", "CH-TO-CONNECT", "CH-TO-FIRST", "CH-TO-IDLE", "CH-TO-TOTAL", "SC-CHOICES", "SC-ERROR-BODY",
    "SC-JSON", "SC-SSE", "SC-SIZE", "SC-HTTP", "SC-HEADERS", "SC-ENCODING", "SC-TRUNCATED", "SC-EMPTY", "SV-429",
    "SV-503", "SV-529", "SV-500", "SV-STREAM", "SV-STREAM-BUSY",
}  # fmt: skip


def failed(code: str) -> PreflightReport:
    return PreflightReport(
        "http://h/v1", "m", sentence=f"NOT READY [{code}]", checks=[Check("request", "failed", "x", code)]
    )


def preflight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reports: list[PreflightReport]) -> tuple[int, Any]:
    """Number of tries with up to 60 s to wait, and the error; the clock is ours."""
    now, tries = [0.0], [0]

    def ask(*_: Any, **__: Any) -> PreflightReport:
        tries[0] += 1
        return reports[min(tries[0], len(reports)) - 1]

    monkeypatch.setattr("bench.client.preflight.run_preflight", ask)
    monkeypatch.setattr(job.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(job.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    resolved = load_config(None, env={}, overrides={"base_url": "http://127.0.0.1:1", "model": "m"})
    try:
        job._preflight(resolved, tmp_path, {}, Console(JobOptions(tmp_path / "c.json", quiet=True)), 60.0)
    except JobError as error:
        return tries[0], error
    return tries[0], None


@pytest.mark.parametrize("code", sorted(code for code in CODES if not code.startswith("CL-")))
def test_only_what_may_come_up_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    tries, error = preflight(monkeypatch, tmp_path, [failed(code)])
    assert error is not None and error.exit_code == EXIT_CHANNEL
    assert tries == (61 if code in COMES_UP else 1)  # once, and once after each of 60 s


def test_a_model_that_is_loaded_meanwhile_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ready = PreflightReport("http://h/v1", "m", ok=True, sentence="READY")
    assert preflight(monkeypatch, tmp_path, [failed("SV-503"), failed("SV-503"), ready]) == (3, None)
    assert json.loads((tmp_path / "preflight.json").read_text("utf-8"))["ok"] is True
