"""`bench check`: is the service reachable, and if not, whose fault is it."""
from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.client.redact import json_text
from bench.commands.options import quiet_option

if TYPE_CHECKING:
    from bench.client.preflight import PreflightReport
    from bench.config import Problem

# A bad address, model or key is what this command is for; any other fault of a config is a usage error, and so is an
# address or a model that nobody filled in: there is nothing to check yet.
OURS = {"CFG-011", "CFG-013", "CFG-014"}
UNFILLED = "CFG-012"
MARKS = {"ok": "ok    ", "note": "note  ", "failed": "FAILED", "skipped": "-     "}


@click.command(
    "check",
    help="""Preflight of a service: address, key, model, connection, one request, one stream, idle latency.

    Sends at most eight short requests. Ends with one line of verdict and the next thing to try; each fault links to
    its section of docs/troubleshooting.md.

    Exit code 0: ready; 3: not ready; 2: the config cannot be used, or its address or model is not filled in.

    \b
    Example:
      bench check --config configs/scheduler_bench.json
      BENCH_API_KEY=... bench check --base-url http://127.0.0.1:8000/v1 --model demo-7b
      BENCH_API_KEY=... bench check --base-url http://127.0.0.1:8000/v1 --model demo-7b --endpoint messages
    """,
)
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="Config to take settings from.")
@click.option("--base-url", default="", help="Address of the service, with or without /v1.")
@click.option("--model", default="", help="Model name to ask for.")
@click.option("--endpoint", type=click.Choice(["chat", "completions", "responses", "messages"]), help="What it speaks.")
@click.option("--auth", type=click.Choice(["auto", "bearer", "x-api-key"]), help="How it wants the API key.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@quiet_option("Only the verdict and the next step.")
def command(
    config_path: Path | None, base_url: str, model: str, endpoint: str | None, auth: str | None, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Run the preflight once."""
    from bench.client.preflight import run_preflight
    from bench.config import ConfigError, api_key, api_key_from_environment, load_config

    overrides: dict[str, Any] = {}
    if base_url:
        overrides |= {"base_url": base_url, "engine.embedded": False}
    if model:
        overrides["model"] = model
    if endpoint:
        overrides["target.endpoint"] = endpoint
    if auth:
        overrides["target.auth"] = auth
    try:
        resolved = load_config(config_path, overrides=overrides)
        embedded = resolved.config.engine.embedded
        key = api_key(resolved.config) if not base_url else api_key_from_environment(
            key_file=resolved.config.target.api_key_file)  # fmt: skip
        if problems := resolved.placeholders():
            raise ConfigError(problems)
    except ConfigError as error:
        _refuse(error.problems, as_json, quiet)
    with _engine(config_path) if embedded and config_path else nullcontext("") as engine_url:
        if engine_url:
            resolved = load_config(config_path, overrides={**overrides, "base_url": engine_url})
        report = run_preflight(resolved, key)
    if report.next_step == "bench run":
        report.next_step = _first_run(config_path)
    click.echo(json_text(report.to_dict()) if as_json else "\n".join(_lines(report, quiet)))
    sys.exit(0 if report.ok else 3)


def _first_run(config_path: Path | None) -> str:
    """The run to start with: 2 requests/s for half a minute, before the sweep spends its time and tokens."""
    if config_path is None:
        return "bench run --shape smoke (2 requests/s for 30 s), then bench run"
    sweep = f"bench run --config {config_path}"
    return f"{sweep} --shape smoke (2 requests/s for 30 s), then {sweep}"


class _engine:
    """The embedded engine for as long as the check takes; gives its address."""

    def __init__(self, config_path: Path) -> None:
        self._path = config_path
        self._process: Any = None

    def __enter__(self) -> str:
        from bench.commands.engine_process import start_engine

        try:
            self._process = start_engine(self._path)
        except (OSError, RuntimeError) as error:
            click.echo(f"{self._path}: {error}", err=True)
            sys.exit(3)
        return self._process.base_url

    def __exit__(self, *_: object) -> None:
        self._process.stop()


def exit_code_of(problems: list[Problem]) -> int:
    """3 when all that is wrong is base URL, model or key; 2 when it is wrong otherwise or they are not there."""
    return 3 if all(problem.id in OURS for problem in forbidding(problems)) else 2


def forbidding(problems: list[Problem]) -> list[Problem]:
    """Those that forbid a request: the errors, and what was never filled in (a warning for a simulation)."""
    return [problem for problem in problems if problem.severity == "error" or problem.id == UNFILLED]


def _refuse(problems: list[Problem], as_json: bool, quiet: bool) -> None:
    """The config was refused: a fault of the three-piece set is a failed check, any other a usage error."""
    errors = forbidding(problems)
    code = exit_code_of(problems)
    three = code == 3 or errors[0].id == UNFILLED
    page = "docs/troubleshooting.md#three-piece-set" if three else "docs/config.md"
    sentence = f"NOT READY [{errors[0].id}]: {errors[0].where} {errors[0].found}"
    next_step = f"{errors[0].fix} ({page})"
    if as_json:
        document = {"ok": False, "sentence": sentence, "next_step": next_step, "checks": [],
                    "problems": [problem.to_dict() for problem in errors]}  # fmt: skip
        click.echo(json_text(document))
    else:
        lines = [] if quiet else [*(f"FAILED  {problem.text()}" for problem in errors), ""]
        click.echo("\n".join([*lines, sentence, f"next: {next_step}"]))
    sys.exit(code)


def _lines(report: PreflightReport, quiet: bool) -> list[str]:
    """The report for people: one line per check, then verdict and next step."""
    if quiet:
        return [report.sentence, f"next: {report.next_step}"]
    lines = []
    for check in report.checks:
        lines.append(f"{MARKS[check.status]}  {check.name:<13} {check.found}")
        if check.status in ("failed", "note") and check.fix:
            lines.append(f"{'':23}-> {check.fix}")
        if check.link:
            lines.append(f"{'':23}   {check.link}")
    stamps = "kernel receive stamps" if report.kernel_stamps else "no kernel receive stamps: stamped when we read"
    off_s = report.clock_offset_s
    offset = "" if off_s is None else f", service's wall clock {off_s:+z.1f} s from ours"
    lines.append(f"{MARKS['ok']}  {'clock':<13} {stamps}{offset}")
    return [*lines, "", report.sentence, f"next: {report.next_step}"]
