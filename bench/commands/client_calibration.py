"""Brings the client's calibration into a run: finds the file, checks that it speaks for the run, notes it in run.json.

Input: a run folder whose load has ended; the file of `bench calibrate-client`. Output: `target.calibration` of
run.json. Does not: measure anything, or fail a run because a calibration is missing or does not fit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.records.client_calibration import FILE, differences, read_calibration
from bench.records.ledger import RUN, read_run, write_run

VARIABLE = "BENCH_CLIENT_CALIBRATION"


def default_file() -> Path:
    """Where a calibration lies unless told otherwise: beside the runs."""
    return Path(os.environ.get(VARIABLE) or Path(os.environ.get("BENCH_RUNS") or "runs") / FILE)


def keep_calibration(run_dir: Path, given: Path | None = None) -> str:
    """Write what the calibration says into run.json; a sentence for the console, empty when there is none to find.

    `given`: a file the user named; it must exist. Raises OSError and ValueError for that file alone.
    """
    path = given or default_file()
    if given is None and not path.is_file():
        return ""
    try:
        made = read_calibration(path)
    except (OSError, ValueError) as error:
        if given is not None:
            raise
        return f"client calibration not used: {error}"
    info = read_run(run_dir / RUN)
    why = differences(made, info.host, info.workers, str(_section(info.config, "client").get("read", "auto")),
                      mean_output_tokens(run_dir))  # fmt: skip
    info.target = {**info.target, "calibration": {"differs": why} if why else made.as_target(path)}
    write_run(run_dir / RUN, info)
    if why:
        return f"client calibration {path} not used: {'; '.join(why)}"
    if made.ceiling_qps is None:
        return f"client calibration {path}: the client held no rate; stages are not judged by it"
    return f"client calibration {path}: ceiling {made.ceiling_qps:g} requests/s ({made.ceiling_kind}), {made.made_utc}"


def mean_output_tokens(run_dir: Path) -> float | None:
    """Mean asked output length of the ledger, tokens."""
    import csv

    from bench.records.ledger import REQUESTS, find_requests, open_rows

    total = count = 0
    try:
        with open_rows(find_requests(run_dir) or run_dir / REQUESTS) as stream:
            for row in csv.DictReader(stream):
                if row.get("max_tokens"):
                    total, count = total + int(float(row["max_tokens"])), count + 1
    except (OSError, ValueError):
        return None
    return total / count if count else None


def _section(data: Any, name: str) -> dict[str, Any]:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, dict) else {}
