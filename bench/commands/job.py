"""One whole job: checks, engine, preflight, Locust, analysis, report, verdict.

Input: options of `bench run` or `bench demo`. Output: an exit code; the run folder.
Does not: send load (Locust does, as a process of its own) or judge (the analysis does).

1. Nothing that this starts outlives it: engine and Locust are ended on every way out.
2. Ctrl-C reaches Locust once per press; the report is written all the same.
3. Only the run folder holds output files; the last line on the console names the report.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import click

PROJECT = Path(__file__).resolve().parents[2]
EXIT_USAGE, EXIT_CHANNEL, EXIT_INVALID, EXIT_INTERRUPTED = 2, 3, 4, 130
# Locust gets this long after its last stage to write its files; it needs about a second.
LOCUST_END_S = 60.0
# A master ends after its workers; what lives this long after it has lost it.
ORPHAN_S = 3.0


@dataclass
class JobOptions:
    """What the command line said."""

    config: Path
    shape: str = "sweep"
    run_dir: Path | None = None
    qps: str = ""
    stage_duration_s: float = 0.0
    repeats: int = 0
    seed: int = 0
    processes: int = 0
    base_url: str = ""
    model: str = ""
    users: int = 0  # closed loop with this concurrency; 0 = open loop
    workers: int = 0  # on other machines; 0 = none
    bind: str = "127.0.0.1:5557"  # where these connect to
    wait_s: float = 0.0  # for a service that is not up yet
    lang: str = "en"
    preflight: bool = True
    quiet: bool = False
    as_json: bool = False
    baseline: Path | None = None  # run folder that the new run is compared with
    command: list[str] = field(default_factory=list)


class JobError(Exception):
    """The job cannot go on; `exit_code` says whose fault it is."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_job(options: JobOptions) -> int:
    """The exit code of one job, after everything it made is in its run folder."""
    say = _Console(options)
    try:
        with _Stops(say) as stops:
            return _run(options, say, stops)
    except JobError as error:
        say.error(str(error))
        return error.exit_code


class _Stops:
    """Ctrl-C and SIGTERM over the whole job: before the load they end it, during the load Locust hears of
    them, while the report is written the first ones only set the exit code."""

    def __init__(self, say: _Console) -> None:
        self.say = say
        self.hits = 0
        self.process: subprocess.Popen[str] | None = None
        self.loading = False  # Locust has said that the run began: it handles the signal in order
        self.writing = False

    def __enter__(self) -> _Stops:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _signum: int, _frame: Any) -> None:
        self.hits += 1
        process = self.process
        if process is not None and process.poll() is None:
            if not self.loading or self.hits > 2:
                _kill_group(process)
                return
            if self.hits == 1:
                self.say.note("interrupted: no more arrivals; waiting for open answers (Ctrl-C again gives them up)")
            os.kill(process.pid, signal.SIGINT)
        elif self.writing and self.hits < 3:
            self.say.note("interrupted: the load has ended; writing the report (twice more to leave it)")
        elif process is None or self.writing:
            raise JobError("interrupted; nothing more is done", EXIT_INTERRUPTED)


def _run(options: JobOptions, say: _Console, stops: _Stops) -> int:
    _check_bind(options.bind)
    resolved = _load(options, say)
    plan = _plan(options, resolved)
    _check_baseline(options, plan)
    _refuse_over_limits(resolved, plan)
    run_dir = _make_run_dir(options)
    with _engine(options, resolved, run_dir, say) as base_url:
        environment = _environment(options, base_url, run_dir, resolved)
        if base_url:
            resolved = _load(options, say, base_url=base_url, quiet=True)
        if options.preflight:
            _preflight(resolved, run_dir, environment, say, options.wait_s)
        code = _locust(options, resolved, plan, run_dir, environment, say, stops)
        stops.writing = True
    return _finish(options, plan, run_dir, code, say, stops)


def _check_bind(bind: str) -> None:
    host, _, port = bind.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise JobError(f"--bind is {bind!r}; an address and a port, such as 127.0.0.1:5557 or 0.0.0.0:5557", EXIT_USAGE)


# -- before the load ------------------------------------------------------------------


def _load(options: JobOptions, say: _Console, *, base_url: str = "", quiet: bool = False) -> Any:
    from bench.config import ConfigError, load_config

    overrides: dict[str, Any] = {}
    if base_url or options.base_url:
        overrides["base_url"] = base_url or options.base_url
    if options.model:
        overrides["model"] = options.model
    try:
        resolved = load_config(options.config, overrides=overrides)
    except ConfigError as error:
        raise JobError(str(error), EXIT_USAGE) from None
    if not quiet and resolved.warnings:
        ids = ", ".join(problem.id for problem in resolved.warnings)
        say.note(f"config: {len(resolved.warnings)} remarks ({ids}); read them with: bench validate {options.config}")
    return resolved


def _plan(options: JobOptions, resolved: Any) -> Any:
    from bench.workload.plan import PlanError, build_plan

    try:
        rates = [float(part) for part in options.qps.split(",") if part.strip()] or None
    except ValueError:
        raise JobError(f"--qps is {options.qps!r}; positive numbers with commas, such as 5,10,15", EXIT_USAGE) from None
    try:
        return build_plan(
            resolved.config,
            "single" if options.users else options.shape,
            qps=rates,
            duration_s=options.stage_duration_s or None,
            repeats=options.repeats or None,
            seed=options.seed or None,
        )
    except (PlanError, ValueError) as error:
        raise JobError(str(error), EXIT_USAGE) from None


def _refuse_over_limits(resolved: Any, plan: Any) -> None:
    from bench.config.limits import limit_problems
    from bench.workload.expect import expect_plan

    problems = limit_problems(resolved.config, expect_plan(plan))
    if problems:
        raise JobError("\n".join(problem.text() for problem in problems), EXIT_USAGE)


def _check_baseline(options: JobOptions, plan: Any) -> None:
    """Refuse before the load what could not be compared after it."""
    if options.baseline is None:
        return
    from bench.records.ledger import RUN, read_run
    from bench.workload.schedule import build_schedule

    path = options.baseline
    if not any((path / name).is_file() for name in ("requests.csv", "requests.csv.gz")):
        raise JobError(f"{path}: holds no run (no requests.csv); give --baseline a run folder", EXIT_USAGE)
    try:
        base = read_run(path / RUN)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobError(f"{path / RUN}: cannot be read ({error}); give --baseline a run folder", EXIT_USAGE) from None
    if options.users or base.loop == "closed":
        return
    known = stage_hashes(path)
    if known.isdisjoint(build_schedule(plan, stage).hash for stage in plan.stages):
        raise JobError(
            f"{path}: no stage of it has the schedule of a stage of this run; use its config, rates, stage length and "
            f"seed ({base.seed}), or compare afterwards with: bench compare {path} RUN --force",
            EXIT_USAGE,
        )


def stage_hashes(run_dir: Path) -> set[str]:
    """The schedule hashes in a run's stages.csv; empty when there is none."""
    import csv

    try:
        with (run_dir / "stages.csv").open(encoding="utf-8", newline="") as handle:
            return {row.get("schedule_hash") or "" for row in csv.DictReader(handle)} - {""}
    except OSError:
        return set()


def _make_run_dir(options: JobOptions) -> Path:
    """A new folder for the run; raises JobError when it cannot be written or holds another run."""
    started = datetime.datetime.now(datetime.UTC)
    home = Path(os.environ.get("BENCH_RUNS") or "runs")
    path = options.run_dir or home / f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / "requests.csv").exists():
            raise JobError(f"{path}: holds a run already; give --run-dir another folder", EXIT_USAGE)
        probe = path / "log.txt"
        with probe.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise JobError(
            f"{path}: cannot be written: {error.strerror}; give --run-dir a folder that can", EXIT_USAGE
        ) from None
    return path


@contextmanager
def _engine(options: JobOptions, resolved: Any, run_dir: Path, say: _Console) -> Iterator[str]:
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
    """Keep the engine's own record of every request beside the ledger."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(base_url + "/debug/requests", timeout=10) as answer:
            (run_dir / "engine_requests.ndjson").write_bytes(answer.read())
        with opener.open(base_url + "/debug/state", timeout=10) as answer:
            (run_dir / "engine_state.json").write_bytes(answer.read())
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
    )
    if base_url or options.base_url:
        environment["BENCH_TARGET_URL"] = base_url or options.base_url
    if options.model:
        environment["BENCH_TARGET_MODEL"] = options.model
    return environment


def _preflight(resolved: Any, run_dir: Path, environment: dict[str, str], say: _Console, wait_s: float = 0.0) -> None:
    from bench.client.preflight import run_preflight
    from bench.config import api_key

    until = time.monotonic() + wait_s
    report = run_preflight(resolved, api_key(resolved.config))
    # A service that refuses (4xx) is there; waiting mends only one that is not.
    while not report.ok and "[CH-4" not in report.sentence and time.monotonic() < until:
        time.sleep(1.0)
        report = run_preflight(resolved, api_key(resolved.config))
    record = run_dir / "preflight.json"
    try:
        record.write_text(json.dumps(report.to_dict(), ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise JobError(f"{record}: cannot be written: {error.strerror}; free space", EXIT_USAGE) from None
    environment["BENCH_PREFLIGHT"] = str(record)
    say.note(f"preflight: {report.sentence}")
    if not report.ok:
        raise JobError(report.next_step, EXIT_CHANNEL)


# -- the load -----------------------------------------------------------------------------


def locust_command(options: JobOptions, processes: int) -> list[str]:
    """The Locust command of this job; it works by hand too."""
    files = PROJECT / "locustfiles" / ("closed_loop.py" if options.users else "chat.py")
    parts = [str(files)]
    if not options.users:
        parts.append(str(PROJECT / "shapes" / f"{options.shape}.py"))
    command = [sys.executable, "-m", "locust", "-f", ",".join(parts), "--headless", "--only-summary"]
    if options.qps:
        command += ["--offered-qps" if options.shape == "single" else "--qps-stages", options.qps]
    if options.stage_duration_s:
        command += ["--stage-duration", f"{options.stage_duration_s:g}"]
    if options.repeats:
        command += ["--stage-repeats", str(options.repeats)]
    if options.seed:
        command += ["--plan-seed", str(options.seed)]
    if options.users:
        command += ["-u", str(options.users), "-r", str(options.users)]
    if options.workers:
        host, _, number = options.bind.rpartition(":")
        command += ["--master", "--expect-workers", str(options.workers), "--expect-workers-max-wait", "300"]
        command += ["--master-bind-host", host or "127.0.0.1", "--master-bind-port", number]
    elif processes > 1:
        port = str(_free_port())
        command += ["--processes", str(processes), "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        command += ["--master-host", "127.0.0.1", "--master-port", port]
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _locust(
    options: JobOptions,
    resolved: Any,
    plan: Any,
    run_dir: Path,
    environment: dict[str, str],
    say: _Console,
    stops: _Stops,
) -> int:
    """Locust's exit code; its console goes to log.txt, its progress to ours."""
    processes = options.processes or resolved.config.sweep.processes
    command = locust_command(options, processes)
    say.note("running: " + " ".join(_shown(part) for part in command))
    say.plan(plan)
    with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=Path.cwd(),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to us alone; we pass it on
        )
        stops.process = process
        threading.Thread(target=_end_orphans, args=(process,), daemon=True).start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("@bench "):
                    stops.loading = True
                    say.progress(json.loads(line[7:]))
                else:
                    _keep(log, line)
            return process.wait(timeout=LOCUST_END_S)
        except subprocess.TimeoutExpired:
            return EXIT_INVALID
        finally:
            say.close()
            if process.poll() is None:
                _kill_group(process)


def _keep(log: TextIO, line: str) -> None:
    """Write a line of Locust's console to the log; a full disk must not end the run."""
    try:
        log.write(line)
    except OSError:
        return


def _end_orphans(process: subprocess.Popen[str]) -> None:
    """End workers that outlive their master: they would hold our pipe open until they miss it themselves."""
    process.wait()
    time.sleep(ORPHAN_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    threading.Thread(target=process.wait, daemon=True).start()


# -- after the load --------------------------------------------------------------------------


def _finish(options: JobOptions, plan: Any, run_dir: Path, locust_code: int, say: _Console, stops: _Stops) -> int:
    if stops.hits and not stops.loading:
        raise JobError("interrupted before the first arrival; nothing was sent", EXIT_INTERRUPTED)
    if not (run_dir / "requests.csv").exists():
        log = run_dir / "log.txt"
        text = f"Locust ended with code {locust_code} before the run began; {log} says:\n{_tail(log)}"
        raise JobError(text, EXIT_USAGE if locust_code == EXIT_USAGE else EXIT_INVALID)
    _close_folder(options, plan, run_dir, locust_code, say, stops)
    return finish_run(run_dir, lang=options.lang, say=say, baseline=options.baseline)


def _close_folder(
    options: JobOptions, plan: Any, run_dir: Path, locust_code: int, say: _Console, stops: _Stops
) -> None:
    """Make the folder of a Locust that died a whole one, and say that the user stopped it when so."""
    from bench.commands.salvage import is_unfinished, mark_interrupted, salvage

    try:
        if is_unfinished(run_dir) and not options.users:
            cause = f"Locust ended with code {locust_code} before the run was complete"
            added = salvage(run_dir, plan, cause, interrupted=bool(stops.hits))
            say.note(f"{cause}: {added} arrivals have no outcome and count as misses; see {run_dir / 'log.txt'}")
            say.note("workers keep rows of their own: `bench recover` may know more (docs/scaling.md)")
        elif stops.hits:
            mark_interrupted(run_dir)
    except (OSError, ValueError) as error:
        raise JobError(f"{run_dir}: the run cannot be closed: {error}", EXIT_INVALID) from None


def finish_run(run_dir: Path, *, lang: str, say: _Console, baseline: Path | None = None) -> int:
    """Analyse a run folder, write the report, compare with a baseline, print the verdict; the exit code."""
    from analysis.analyse import write_analysis
    from analysis.load import LedgerError
    from analysis.verdict import exit_code
    from reports.write import write_all

    try:
        analysis = write_analysis(run_dir)
        files = write_all(run_dir, analysis, lang=lang)
    except LedgerError as error:
        raise JobError(str(error), EXIT_INVALID) from None
    except OSError as error:
        again = f"bench analyse {run_dir} && bench report {run_dir}"
        text = f"{run_dir}: the report cannot be written: {error.strerror}; free space, then: {again}"
        raise JobError(text, EXIT_INVALID) from None
    compared = _against(baseline, run_dir, lang) if baseline is not None else Compared()
    code = exit_code({analysis.verdict.exit_code, compared.exit_code})
    say.verdict(analysis, run_dir, files, code, compared)
    return code


@dataclass
class Compared:
    """What a baseline says: text, plain data for --json, an exit code of its own."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] | None = None
    exit_code: int = 0


def _against(baseline: Path, run_dir: Path, lang: str) -> Compared:
    from analysis.compare_runs import CompareError
    from analysis.load import LedgerError
    from bench.commands.compare import compare, lines

    try:
        found = compare(baseline, run_dir, lang=lang)
    except CompareError as error:
        return Compared([f"no comparison: {error}"], None, EXIT_INVALID if error.invalid else EXIT_USAGE)
    except (LedgerError, OSError) as error:
        return Compared([f"no comparison: {error}"], None, EXIT_USAGE)
    said = ["", f"against {baseline}: {found.sentence}", *lines(found)[1:], f"comparison: {run_dir / 'compare.html'}"]
    return Compared(said, {"outcome": found.outcome, "sentence": found.sentence}, found.exit_code)


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


def _shown(part: str) -> str:
    """A part of the command line with the project's own folder left out."""
    return part.replace(str(PROJECT) + os.sep, "") if part != sys.executable else "python"


class _Console:
    """What a person sees: notes and progress on standard error, the result on standard output."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self._progress: Any = None
        self._task: Any = None
        self._seconds = 0.0
        self._stage = ""
        self._ticker: threading.Timer | None = None

    def note(self, text: str) -> None:
        if not self.options.quiet:
            self._print(text)

    def error(self, text: str) -> None:
        self._print("error: " + text)

    def _print(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)

    def plan(self, plan: Any) -> None:
        """Show what is ahead; on a terminal, with a bar."""
        total = sum(stage.duration_s for stage in plan.stages)
        self.note(f"plan: {plan_text(plan, self.options.users)}")
        if self.options.quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            return  # one line per stage, no bar
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=total)
        self._progress.start()

    def progress(self, event: dict[str, Any]) -> None:
        """Show one progress event of Locust's master."""
        kind = event["event"]
        if kind == "stage":
            self._begin_stage(event)
        elif kind == "live":
            if self._progress is not None:
                self._progress.update(self._task, description=f"{self._stage}  {live_text(event)}")
        elif kind == "drain":
            self._stop_ticker()
            self._stage += ", draining"
            if self._progress is not None:
                self._progress.update(self._task, description=self._stage)
        elif kind == "staged":
            self._stop_ticker()
            counts = ", ".join(f"{n} {status}" for status, n in sorted(event["statuses"].items()))
            marks = f" [{', '.join(event['marks'])}]" if event["marks"] else ""
            share = f", attainment {share_text(event['attainment'])}" if event.get("attainment") else ""
            text = f"  {event['name']:<18} {counts or 'no arrivals'}{share}; drained in {event['drain_s']:.1f} s{marks}"
            self.note(text)

    def _begin_stage(self, event: dict[str, Any]) -> None:
        self._stage = f"stage {event['number']}/{event['of']}: {event['name']}"
        if self._progress is not None:
            self._progress.update(self._task, description=self._stage, completed=self._seconds)
            self._tick()
        self._seconds += event["duration_s"]

    def _tick(self) -> None:
        if self._progress is None:
            return
        self._progress.advance(self._task, 0.5)
        self._ticker = threading.Timer(0.5, self._tick)
        self._ticker.daemon = True
        self._ticker.start()

    def _stop_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()

    def close(self) -> None:
        """End the bar, if there is one."""
        self._stop_ticker()
        if self._progress is not None:
            progress, self._progress = self._progress, None
            progress.stop()

    def verdict(self, analysis: Any, run_dir: Path, files: list[Path], code: int, compared: Compared) -> None:
        """Print the result: a line of JSON, or a few plain sentences."""
        report = run_dir / "report.html"
        if self.options.as_json:
            data = {
                "verdict": analysis.verdict.status,
                "exit_code": code,
                "sentence": analysis.verdict.sentence,
                "knee_qps": analysis.capacity.knee_qps,
                "watermark_qps": [analysis.capacity.watermark_low_qps, analysis.capacity.watermark_high_qps],
                "run_dir": str(run_dir),
                "files": [str(path) for path in files],
            }
            if compared.lines:
                data["baseline"] = compared.data or {"outcome": "not compared", "sentence": compared.lines[0]}
            click.echo(json.dumps(data, ensure_ascii=False))
            return
        from bench.commands.analyse import verdict_lines

        click.echo("\n" + "\n".join(verdict_lines(analysis)))
        click.echo(f"report: {report}\n{meaning(analysis)}")
        if compared.lines:
            click.echo("\n".join(compared.lines))


def share_text(pair: list[float]) -> str:
    """`98.21 %`, or `97.10 to 99.40 %` while answers are open."""
    low, high = f"{100 * pair[0]:.2f}", f"{100 * pair[1]:.2f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def live_text(event: dict[str, Any]) -> str:
    """What a stage looks like now: attainment so far, streams in flight."""
    share = f"attainment {share_text(event['attainment'])}" if event["attainment"] else "warm-up"
    return f"{share}, {event['in_flight']} in flight"


def plan_text(plan: Any, users: int) -> str:
    """What is ahead: of an open loop its arrivals, of a closed one its users, since the service sets their rate."""
    n, total = len(plan.stages), sum(stage.duration_s for stage in plan.stages)
    count = "1 stage" if n == 1 else f"{n} stages"
    if users:
        return f"closed loop, {users} users, {count} in {total:.0f} s; the service sets the rate"
    arrivals = sum(stage.expected_arrivals for stage in plan.stages)
    return f"{count}, about {arrivals:.0f} arrivals in {total:.0f} s; drains come on top"


def meaning(analysis: Any) -> str:
    """What a reader may do with the numbers; claims nothing about a rate that was not sent."""
    verdict = analysis.verdict
    text = MEANING[verdict.status]
    if verdict.interrupted:
        text += " The run was interrupted: it shows what was measured until then."
    return text


MEANING = {
    "PASS": "Open the report: the numbers passed their own checks and the SLO holds where the first line says.",
    "FAIL": "Open the report: the numbers passed their own checks; the SLO does not hold where the first line says.",
    "INVALID": "Open the report for the reasons: these numbers must not be used; mend the cause and run again.",
}
