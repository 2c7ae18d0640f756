"""The Locust process of a job: its command line, its progress lines, its signals, its end.

Input: options, environment, run folder. Output: Locust's exit code; its console in log.txt.
Does not: read the run folder or judge it.

1. Ctrl-C and SIGTERM reach Locust once per press, through `Stops`: the terminal signals us alone.
2. Nothing of its process group outlives it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from bench.commands.console import Console
from bench.commands.job_options import EXIT_INTERRUPTED, EXIT_INVALID, PROJECT, JobError, JobOptions

# Locust gets this long after its last stage to write its files; it needs about a second.
LOCUST_END_S = 60.0
# A master ends after its workers; what lives this long after it has lost it.
ORPHAN_S = 3.0


class Stops:
    """Ctrl-C and SIGTERM over the whole job: before the load they end it, during the load Locust hears of
    them, while the report is written the first ones only set the exit code."""

    def __init__(self, say: Console) -> None:
        self.say = say
        self.hits = 0
        self.process: subprocess.Popen[str] | None = None
        self.starting = False  # a process is being made: what comes now is handled once we know it
        self.loading = False  # Locust has said that the run began: it handles the signal in order
        self.writing = False

    def __enter__(self) -> Stops:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(self, make: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
        """Make the Locust process; a signal in the middle of that must not lose it."""
        self.starting = True
        before = self.hits
        try:
            self.process = make()
        finally:
            self.starting = False
        if self.hits > before:
            kill_group(self.process)
        return self.process

    def _handle(self, _signum: int, _frame: Any) -> None:
        self.hits += 1
        self.say.interrupted = True
        if self.starting:
            return
        process = self.process
        if process is not None and process.poll() is None:
            if not self.loading or self.hits > 2:
                kill_group(process)
                return
            if self.hits == 1:
                self.say.note("interrupted: no more arrivals; waiting for open answers (Ctrl-C again gives them up)")
            os.kill(process.pid, signal.SIGINT)
        elif self.writing and self.hits < 3:
            self.say.note("interrupted: the load has ended; writing the report (twice more to leave it)")
        elif process is None or self.writing:
            raise JobError("interrupted; nothing more is done", EXIT_INTERRUPTED)


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
    elif hasattr(os, "fork"):  # one worker, too, is a process of its own: it sends and reads, and does nothing else
        port = str(free_port())
        command += ["--processes", str(processes), "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        command += ["--master-host", "127.0.0.1", "--master-port", port]
    return command


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_locust(
    options: JobOptions,
    resolved: Any,
    plan: Any,
    run_dir: Path,
    environment: dict[str, str],
    say: Console,
    stops: Stops,
) -> int:
    """Locust's exit code; its console goes to log.txt, its progress to ours."""
    processes = options.processes or resolved.config.sweep.processes
    command = locust_command(options, processes)
    say.note("running: " + " ".join(shown(part) for part in command))
    say.plan(plan)
    with (run_dir / "log.txt").open("a", encoding="utf-8") as log:
        process = stops.start(
            lambda: subprocess.Popen(
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
        )
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
                kill_group(process)


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


def kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    threading.Thread(target=process.wait, daemon=True).start()


def shown(part: str) -> str:
    """A part of the command line with the project's own folder left out."""
    return part.replace(str(PROJECT) + os.sep, "") if part != sys.executable else "python"
