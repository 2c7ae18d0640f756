"""One whole job: checks, engine, preflight, Locust, analysis, report, verdict.

Input: options of `bench run` or `bench demo`. Output: an exit code; the run folder.
Does not: send load (Locust does, as a process of its own: `locust_process`) or judge (the analysis does).

1. Nothing that this starts outlives it: engine and Locust are ended on every way out.
2. Ctrl-C reaches Locust once per press; the report is written all the same.
3. Only the run folder holds output files; the last line on the console names the report.

Its parts: `prepare` (before anything starts), this file (engine, preflight), `locust_process` (the load),
`finish` (the steps after it), `console` (what a person sees).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.client.codes import CODES
from bench.commands import prepare
from bench.commands.console import Console
from bench.commands.finish import finish
from bench.commands.job_options import EXIT_CHANNEL, EXIT_USAGE, JobError, JobOptions
from bench.commands.locust_process import Stops, run_locust
from bench.commands.part import check_part

if TYPE_CHECKING:
    from bench.client.preflight import PreflightReport

# Faults that are the same after a wait: the service is there, or cannot be asked at all.
STAY_KINDS = ("auth", "bad_request", "redirect")
STAYS = ("CH-404", "CH-TLS-CERT", "SV-QUOTA")


def run_job(options: JobOptions) -> int:
    """The exit code of one job, after everything it made is in its run folder."""
    say = Console(options)
    try:
        with Stops(say) as stops:
            return _run(options, say, stops)
    except JobError as error:
        say.error(str(error), error.exit_code)
        return error.exit_code


def _run(options: JobOptions, say: Console, stops: Stops) -> int:
    prepare.check_address("--bind", options.bind, "127.0.0.1:5557 or 0.0.0.0:5557")
    resolved = prepare.load(options, say)
    prepare.refuse_unfilled(resolved)
    prepare.check_key(resolved.config)
    check_part(options, resolved)
    plan = prepare.plan_of(options, resolved.config)
    prepare.note_target(options, resolved.config.loadgen.target_qps, plan, say)
    prepare.check_baseline(options, plan)
    prepare.refuse_over_limits(resolved, plan)
    prepare.note_prompts(plan, say)
    with prepare.run_dir_of(options) as run_dir:
        with _engine(options, resolved, run_dir, say) as base_url:
            environment = _environment(options, base_url, run_dir, resolved)
            if base_url:
                resolved = prepare.load(options, say, base_url=base_url, quiet=True)
            if options.preflight:
                _preflight(resolved, run_dir, environment, say, options.wait_s)
            code = run_locust(options, resolved, plan, run_dir, environment, say, stops)
            stops.writing = True
        return finish(options, plan, run_dir, code, say, stops)


@contextmanager
def _engine(options: JobOptions, resolved: Any, run_dir: Path, say: Console) -> Iterator[str]:
    """The embedded engine's address while it lives; empty when the config names a service."""
    if not resolved.config.engine.embedded or options.base_url:
        yield ""
        return
    from bench.commands.engine_process import start_engine

    say.note("starting the embedded engine (a simulated GPU behind a real HTTP server)")
    try:
        engine = start_engine(options.config, log_path=run_dir / "engine.log")
    except (OSError, RuntimeError, TimeoutError) as error:
        text = f"the embedded engine did not start: {error}; see {run_dir / 'engine.log'}"
        raise JobError(text, EXIT_CHANNEL) from None
    try:
        yield engine.base_url
    finally:
        _keep_truth(engine.base_url, run_dir)
        engine.stop()


def _keep_truth(base_url: str, run_dir: Path) -> None:
    """Keep the engine's own record of every request, and of every decision, beside the ledger."""
    import urllib.error
    import urllib.request

    from bench.commands.decisions import DECISIONS

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(base_url + "/debug/requests", timeout=10) as answer:
            (run_dir / "engine_requests.ndjson").write_bytes(answer.read())
        with opener.open(base_url + "/debug/state", timeout=10) as answer:
            (run_dir / "engine_state.json").write_bytes(answer.read())
        with opener.open(base_url + "/debug/decisions", timeout=10) as answer:
            (run_dir / DECISIONS).write_bytes(answer.read())
    except (OSError, urllib.error.URLError):
        return  # the engine died or was never whole; the ledger stands on its own


def _environment(options: JobOptions, base_url: str, run_dir: Path, resolved: Any) -> dict[str, str]:
    environment = dict(os.environ)
    environment.update(
        BENCH_CONFIG=str(options.config),
        BENCH_RUN_DIR=str(run_dir),
        BENCH_RUN_ID=run_dir.name,
        BENCH_PROGRESS="1",
        BENCH_PARENT_PID=str(os.getpid()),
        BENCH_COMMAND=json.dumps(options.command or ["bench", *sys.argv[1:]]),
        PYTHONUNBUFFERED="1",
        BENCH_PART=options.part,
        BENCH_MEET=options.meet,
    )
    if base_url or options.base_url:
        environment["BENCH_TARGET_URL"] = base_url or options.base_url
    if options.model:
        environment["BENCH_TARGET_MODEL"] = options.model
    return environment


def _may_come_up(report: PreflightReport) -> bool:
    """Waiting mends a service that is not up, still loads or is full; it mends no address, key, quota or request."""
    code = report.failed.code if report.failed else None
    return code in CODES and code not in STAYS and CODES[code].error_kind not in STAY_KINDS


def _preflight(resolved: Any, run_dir: Path, environment: dict[str, str], say: Console, wait_s: float = 0.0) -> None:
    from bench.client.preflight import run_preflight
    from bench.config import api_key

    until = time.monotonic() + wait_s
    report = run_preflight(resolved, api_key(resolved.config))
    while not report.ok and _may_come_up(report) and time.monotonic() < until:
        time.sleep(1.0)
        report = run_preflight(resolved, api_key(resolved.config))
    record = run_dir / "preflight.json"
    try:
        record.write_text(json.dumps(report.to_dict(), ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise JobError(f"{record}: cannot be written: {error.strerror}; free space", EXIT_USAGE) from None
    environment["BENCH_PREFLIGHT"] = str(record)
    if not report.ok:
        raise JobError(f"preflight: {report.sentence}\nnext: {report.next_step}", EXIT_CHANNEL)
    say.note(f"preflight: {report.sentence}")
