"""What a person sees of a job: notes and progress on standard error, the result on standard output.

Input: progress events of Locust's master, the analysis of the run. Output: lines; on a terminal a bar.
Does not: decide anything; the exit code comes from the verdict.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bench.commands.job_options import JobOptions
from bench.records.analysis import TRUST

# `stage 12/40: 11 chat @100, draining  attainment 97.10 to 99.40 %, 1310 in flight` with ` 100 %  0:12:34` behind it
# needs 97 columns; with a bar and the time gone by, 10 and 8 more.
NARROW_COLUMNS, BAR_COLUMNS = 97, 116


@dataclass
class Compared:
    """What a baseline says: text, plain data for --json, an exit code of its own."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, Any] | None = None
    exit_code: int = 0


class Console:
    """What a person sees: notes and progress on standard error, the result on standard output."""

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        self._progress: Any = None
        self._task: Any = None
        self._seconds = 0.0
        self._stage = ""
        self._ticker: threading.Timer | None = None
        self._narrow = False
        self.interrupted = False  # from then on no attainment: what was never due counts in none

    def note(self, text: str) -> None:
        if not self.options.quiet:
            self._print(text)

    def warn(self, text: str) -> None:
        """Say what must be known to read the result, with --quiet too."""
        self._print(text)

    def error(self, text: str, exit_code: int) -> None:
        """Say why the job ends here; with --json on standard output too, so that a script always reads one line."""
        self._print("error: " + text)
        if self.options.as_json:
            click.echo(json.dumps({"verdict": None, "exit_code": exit_code, "error": text}, ensure_ascii=False))

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

        console = Console(stderr=True)
        # The words are the point: where they would not fit, the bar goes first, then the percentage.
        self._narrow = console.width < NARROW_COLUMNS
        columns = [TextColumn("{task.description}"), TimeRemainingColumn()]
        if not self._narrow:
            columns.insert(1, TextColumn("{task.percentage:3.0f} %"))
        if console.width >= BAR_COLUMNS:
            columns[1:-1] = [BarColumn(), columns[1], TimeElapsedColumn()]
        self._progress = Progress(*columns, console=console, transient=True)  # the lines of the stages stay
        self._task = self._progress.add_task("starting", total=total)
        self._progress.start()

    def progress(self, event: dict[str, Any]) -> None:
        """Show one progress event of Locust's master."""
        kind = event["event"]
        if kind == "stage":
            self._begin_stage(event)
        elif kind == "live":
            if self._progress is not None:
                live = live_text(event, short=self._narrow, interrupted=self.interrupted)
                self._progress.update(self._task, description=f"{self._stage}  {live}")
        elif kind == "drain":
            self._stop_ticker()
            self._stage += ", drain" if self._narrow else ", draining"
            if self._progress is not None:
                self._progress.update(self._task, description=self._stage)
        elif kind == "staged":
            self._stop_ticker()
            counts = ", ".join(f"{n} {status}" for status, n in sorted(event["statuses"].items()))
            marks = f" [{', '.join(event['marks'])}]" if event["marks"] else ""
            known = event.get("attainment") and not self.interrupted
            share = f", attainment {share_text(event['attainment'])}" if known else ""
            text = f"  {event['name']:<18} {counts or 'no arrivals'}{share}; drained in {event['drain_s']:.1f} s{marks}"
            self.note(text)

    def _begin_stage(self, event: dict[str, Any]) -> None:
        self._stage = f"{'' if self._narrow else 'stage '}{event['number']}/{event['of']}: {event['name']}"
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


def live_text(event: dict[str, Any], *, short: bool = False, interrupted: bool = False) -> str:
    """What a stage looks like now: attainment so far, streams in flight."""
    if interrupted:
        return f"interrupted, {event['in_flight']} in flight"
    word = "" if short else "attainment "
    share = f"{word}{share_text(event['attainment'])}" if event["attainment"] else "warm-up"
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
    named = sorted({r.reason_id for r in verdict.reasons if r.reason_id in TRUST})
    if named:
        text = text.replace("passed their own checks", f"passed their own checks, with {', '.join(named)} above")
    if verdict.interrupted:
        text += " The run was interrupted: it shows what was measured until then."
    return text


MEANING = {
    "PASS": "Open the report: the numbers passed their own checks and the SLO holds where the first line says.",
    "FAIL": "Open the report: the numbers passed their own checks; the SLO does not hold where the first line says.",
    "INVALID": "Open the report for the reasons: these numbers must not be used; mend the cause and run again.",
}
