"""`bench run --part`: checks before the load, the last words after it.

Input: the options. Output: `JobError` for what cannot be shared; the exit code of a part.
Does not: judge: the numbers of a part are not those of the service under the whole load.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.commands.console import Console
from bench.commands.job_options import EXIT_INVALID, EXIT_USAGE, JobError, JobOptions
from bench.commands.prepare import check_address
from bench.records.part import WHOLE, parse_part

LOAD_ENDED = (0, 130)


def check_part(options: JobOptions, resolved: Any) -> None:
    """Refuse what several masters cannot share. Raises JobError."""
    try:
        part = parse_part(options.part)
    except ValueError as error:
        raise JobError(str(error), EXIT_USAGE) from None
    if part == WHOLE:
        return
    check_address("--meet", options.meet, "10.0.0.5:5560")
    if options.users or options.shape == "knee_search":
        what = "a closed loop" if options.users else "a knee search"
        raise JobError(f"--part is {part}: {what} has no plan that parts could share; leave --part out", EXIT_USAGE)
    if options.baseline is not None:
        raise JobError(f"--part is {part}: compare after the merge, with `bench compare BASE MERGED`", EXIT_USAGE)
    if resolved.config.engine.embedded and not options.base_url:
        raise JobError(
            f"--part is {part}: each part would start an engine of its own; start one with `bench serve-engine` and "
            "give its address with --base-url",
            EXIT_USAGE,
        )


def finish_part(options: JobOptions, run_dir: Path, locust_code: int, say: Console) -> int:
    """The exit code of a part whose load has ended, and what to do with its folder."""
    say.note(f"part {options.part} is in {run_dir}; it has no verdict of its own")
    say.note("next, with the folders of all parts: bench recover PART1 PART2 ... --into MERGED && bench analyse MERGED")
    return locust_code if locust_code in (*LOAD_ENDED, EXIT_USAGE) else EXIT_INVALID
