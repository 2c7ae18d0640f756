"""What a job settles before it starts anything: config, plan, limits, baseline, run folder.

Input: the options. Output: the resolved config, the plan, a new folder; or `JobError`, before a request is sent.
Does not: open a connection or start a process.
"""

from __future__ import annotations

import csv
import datetime
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.commands.console import Console
from bench.commands.job_options import EXIT_USAGE, JobError, JobOptions
from bench.commands.starting import unfilled


def check_address(option: str, address: str, examples: str) -> None:
    """Refuse what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise JobError(f"{option} is {address!r}; an address and a port, such as {examples}", EXIT_USAGE)


def load(options: JobOptions, say: Console, *, base_url: str = "", quiet: bool = False) -> Any:
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
    if not quiet:
        say_remarks(options, resolved.warnings, say)
    return resolved


def say_remarks(options: JobOptions, warnings: list[Any], say: Console) -> None:
    """One line on the remarks that the checks have on the config, and where to read them; those on the command line,
    which nothing else shows, in full."""
    if not options.remarks:
        return
    for problem in warnings:
        if problem.where.startswith("command line"):
            say.note(problem.text())
    rest = [problem for problem in warnings if not problem.where.startswith("command line")]
    if rest:
        ids = ", ".join(problem.id for problem in rest)
        count = "1 remark" if len(rest) == 1 else f"{len(rest)} remarks"
        say.note(f"config: {count} ({ids}); read them with: bench validate {options.config}")


def refuse_unfilled(resolved: Any) -> None:
    """Refuse an address or a model that nobody filled in, as `bench validate` does: there is nothing to send to."""
    problems = resolved.placeholders()
    if problems:
        raise JobError("\n".join([*(problem.text() for problem in problems), unfilled(problems)]), EXIT_USAGE)


def check_key(config: Any) -> None:
    """Refuse a key that cannot be one before anything is started; that there is none may be right."""
    from bench.config import ConfigError, api_key

    try:
        api_key(config)
    except ConfigError as error:
        raise JobError(str(error), EXIT_USAGE) from None


def plan_of(options: JobOptions, config: Any) -> Any:
    from bench.workload.labels import fault_code
    from bench.workload.plan import PlanError, build_plan

    try:
        rates = [float(part) for part in options.qps.split(",") if part.strip()] or None
    except ValueError:
        raise JobError(f"--qps is {options.qps!r}; positive numbers with commas, such as 5,10,15", EXIT_USAGE) from None
    try:
        return build_plan(
            config,
            "single" if options.users else options.shape,
            qps=rates,
            duration_s=options.stage_duration_s or None,
            repeats=options.repeats or None,
            seed=options.seed or None,
        )
    except (PlanError, ValueError) as error:
        own = config.loadgen.prompts_file
        named = [fault_code(line) if own and line.startswith(own) else "" for line in str(error).splitlines()]
        lines = [f"{code} {line}".lstrip() for code, line in zip(named, str(error).splitlines(), strict=True)]
        raise JobError("\n".join(lines), EXIT_USAGE) from None


def note_prompts(plan: Any, say: Console) -> None:
    """Say before the load which lengths of the user's files are cut, and how many arrivals repeat a prompt of one."""
    for cut in plan.cuts:
        say.note(f"CFG-049 {cut.text()}")
    if plan.lines is None:
        return
    from bench.workload.expect import expect_stages, repeat_sentence

    text = repeat_sentence(plan, expect_stages(plan))
    if text:
        say.note(f"CFG-048 {text}")


def note_target(options: JobOptions, target_qps: float, plan: Any, say: Console) -> None:
    """Say before the load that --qps leaves out the rate of the verdict (of the config's rates CFG-034 says it)."""
    rates = {stage.offered_qps for stage in plan.stages}
    if options.qps and options.shape == "sweep" and not options.users and target_qps not in rates:
        say.note(
            f"--qps has no stage at loadgen.target_qps ({target_qps:g} requests/s), the rate of the verdict: "
            f"INVALID unless the rates around it decide it; add {target_qps:g} to --qps"
        )


def refuse_over_limits(resolved: Any, plan: Any) -> None:
    from bench.config.limits import limit_problems
    from bench.workload.expect import expect_plan

    problems = limit_problems(resolved.config, expect_plan(plan))
    if problems:
        raise JobError("\n".join(problem.text() for problem in problems), EXIT_USAGE)


def check_baseline(options: JobOptions, plan: Any) -> None:
    """Refuse before the load what could not be compared after it."""
    if options.baseline is None:
        return
    from bench.records.ledger import RUN, find_requests, read_run
    from bench.workload.schedule import build_schedule

    path = options.baseline
    if find_requests(path) is None:
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
    try:
        with (run_dir / "stages.csv").open(encoding="utf-8", newline="") as handle:
            return {row.get("schedule_hash") or "" for row in csv.DictReader(handle)} - {""}
    except OSError:
        return set()


@contextmanager
def run_dir_of(options: JobOptions) -> Iterator[Path]:
    """`make_run_dir`, and the folder is this job's alone until the end: a second job is refused with JobError.

    The lock is on log.txt, and the system lifts it when the process ends, however it ends. Where there are no such
    locks (some network folders), two jobs that start in the same second are not told apart.
    """
    path = make_run_dir(options)
    with (path / "log.txt").open("a", encoding="utf-8") as held:
        try:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{path}: another run is writing here; give --run-dir another folder, or wait until it has ended"
            raise JobError(text, EXIT_USAGE) from None
        except (ImportError, OSError):
            pass
        _refuse_full(path)  # the one that held it may have ended a moment ago
        yield path


def make_run_dir(options: JobOptions) -> Path:
    """A new folder for the run; raises JobError when it cannot be written or holds another run."""
    started = datetime.datetime.now(datetime.UTC)
    home = Path(os.environ.get("BENCH_RUNS") or "runs")
    path = options.run_dir or home / f"{started:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_full(path)
        probe = path / "log.txt"
        with probe.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise JobError(
            f"{path}: cannot be written: {_why(path, error)}; give --run-dir a folder that can", EXIT_USAGE
        ) from None
    return path


def _refuse_full(path: Path) -> None:
    from bench.records.ledger import find_requests

    if find_requests(path) is not None:
        raise JobError(f"{path}: holds a run already; give --run-dir another folder", EXIT_USAGE)


def _why(path: Path, error: OSError) -> str:
    """What stands in the way of a folder: the first part of its path that is a file, else the system's word."""
    for part in (*reversed(path.parents), path):
        if part.exists() and not part.is_dir():
            return f"{part} is a file, not a folder"
    return error.strerror or str(error)
