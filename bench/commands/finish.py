"""What a job does after the load: close the run folder, analyse, write the report, compare, print the verdict.

Input: the run folder as Locust left it. Output: its last files; the exit code.
Does not: statistics (the analysis does) or page text (the report does).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bench.commands.console import Compared, Console
from bench.commands.job_options import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE, JobError, JobOptions
from bench.commands.locust_process import Stops
from bench.commands.part import finish_part

FULL_BYTES = 64 << 10  # run.json alone needs a sixth of it


def finish(options: JobOptions, plan: Any, run_dir: Path, locust_code: int, say: Console, stops: Stops) -> int:
    if stops.hits and not stops.loading:
        raise JobError("interrupted before the first arrival; nothing was sent", EXIT_INTERRUPTED)
    if not (run_dir / "requests.csv").exists():
        log = run_dir / "log.txt"
        why = _disk_full(run_dir) or f"{log} says:\n{_tail(log)}"
        text = f"Locust ended with code {locust_code} before the run began; {why}"
        raise JobError(text, EXIT_USAGE if locust_code == EXIT_USAGE else EXIT_INVALID)
    _close_folder(options, plan, run_dir, locust_code, say, stops)
    if options.part:
        return finish_part(options, run_dir, locust_code, say)
    _calibrate(options, run_dir, say)
    return finish_run(run_dir, lang=options.lang, say=say, baseline=options.baseline)


def _calibrate(options: JobOptions, run_dir: Path, say: Console) -> None:
    """Note in run.json what the client's calibration says of this run, and say whether there is one."""
    from bench.commands.client_calibration import keep_calibration

    try:
        told = keep_calibration(run_dir, options.client_calibration)
    except (OSError, ValueError) as error:
        told = f"client calibration not used: {error}"
    if told:
        say.note(told)


def _close_folder(options: JobOptions, plan: Any, run_dir: Path, locust_code: int, say: Console, stops: Stops) -> None:
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
        raise JobError(f"{run_dir}: the run cannot be closed: {_disk_full(run_dir) or error}", EXIT_INVALID) from None


def finish_run(run_dir: Path, *, lang: str, say: Console, baseline: Path | None = None) -> int:
    """Analyse a run folder, write the report, compare with a baseline, print the verdict; the exit code."""
    from bench.commands.analysis_apart import AnalysisRefused, analysed

    try:
        analysis = analysed(run_dir, meanwhile=ready_to_draw)
        compared, shown = _against(baseline, run_dir, lang, analysis) if baseline is not None else (Compared(), None)
        from reports.write import write_all

        files = write_all(run_dir, analysis, lang=lang, comparison=shown)
    except AnalysisRefused as error:
        raise JobError(str(error), EXIT_INVALID) from None
    except OSError as error:
        again = f"bench analyse {run_dir} && bench report {run_dir}"
        text = f"{run_dir}: the report cannot be written: {error.strerror}; free space, then: {again}"
        raise JobError(text, EXIT_INVALID) from None
    code = _one_of(analysis.verdict.exit_code, compared.exit_code)
    say.verdict(analysis, run_dir, files, code, compared)
    return code


def ready_to_draw() -> None:
    """Load what the report needs and start its drawing engine."""
    from reports import svg

    svg.warm()
    import reports.write  # noqa: F401 - for its libraries


def _one_of(verdict: int, comparison: int) -> int:
    """The exit code of a run that has both."""
    if not comparison:
        return verdict
    from analysis.verdict import exit_code

    return exit_code({verdict, comparison})


def _against(baseline: Path, run_dir: Path, lang: str, analysis: Any) -> tuple[Compared, dict[str, Any]]:
    """The comparison for the console, and what the report shows of it."""
    from bench.commands.compare import against, lines

    shown, found, refused, code = against(baseline, run_dir, lang=lang, analysed=analysis)
    if found is None:
        return Compared([f"no comparison: {refused}"], None, code), shown
    said = ["", f"against {baseline}: {found.sentence}", *lines(found)[1:], f"comparison: {run_dir / 'compare.html'}"]
    return Compared(said, {"outcome": found.outcome, "sentence": found.sentence}, found.exit_code), shown


def _disk_full(run_dir: Path) -> str:
    """What to do when the folder's disk is full; empty when it is not."""
    try:
        free = shutil.disk_usage(run_dir).free
    except OSError:
        return ""
    return f"the disk is full ({free} bytes are free); free space and run again" if free < FULL_BYTES else ""


def _tail(path: Path, lines: int = 12) -> str:
    try:
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"
