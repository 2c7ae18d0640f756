"""Ends a run folder whose Locust died: the rows that are missing, the stages' rows, an end in run.json.

Input: the run folder as Locust left it, the plan, what ended it.
Output: the same folder with one row for each planned arrival of every stage that had begun.
Does not: invent an answer. A missing arrival is `unsent` with code CL-LOST, its stage is marked `master_lost`.
"""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.records.digests import file_digests
from bench.records.ledger import INFLIGHT, REQUESTS, RUN, STAGES, cell, read_run, write_run
from bench.records.lost import lost_rows, stage_not_run, unclosed_stage
from bench.records.part import part_of
from bench.records.request import FIELD_NAMES
from bench.records.stage import STAGE_COLUMNS


def is_unfinished(run_dir: Path) -> bool:
    """Whether the run's master ended before it could close the folder."""
    try:
        return read_run(run_dir / RUN).finished_utc is None
    except (OSError, ValueError):
        return (run_dir / REQUESTS).exists()


def salvage(run_dir: Path, plan: Any, cause: str, *, interrupted: bool) -> int:
    """The number of rows added. Raises OSError when the folder cannot be written, ValueError without a run.json."""
    from bench.workload.schedule import build_schedule

    info = read_run(run_dir / RUN)
    _whole_lines(run_dir / REQUESTS)
    _whole_lines(run_dir / STAGES)
    _whole_lines(run_dir / INFLIGHT)
    closed = {int(row["stage"]) for row in _read(run_dir / STAGES)}
    seen: dict[int, dict[int, float]] = {}
    for row in _read(run_dir / REQUESTS):
        seen.setdefault(int(row["stage"]), {})[int(row["arrival"])] = float(row["intended_s"])
    last_s: dict[int, float] = {}
    for row in _read(run_dir / INFLIGHT):
        last_s[int(row["worker"])] = float(row["t_s"])
    marks = ["master_lost", *(["interrupted"] if interrupted else [])]
    width, part = max(1, info.workers), part_of(info.part)
    added = 0
    for stage in plan.stages:
        if stage.index in closed:
            continue
        schedule = build_schedule(plan, stage)
        there = seen.get(stage.index, {})
        start_s = _start_s(run_dir, stage.index, there, schedule)
        if start_s is None:
            _append(run_dir / STAGES, STAGE_COLUMNS, [stage_not_run(stage, marks=["not_run", *marks], workers=1)])
            continue
        mine = range(part.index, len(schedule), part.of)
        planned = len(mine)
        missing = (i for i in mine if i not in there)
        rows = lost_rows(
            plan, stage, schedule, missing, run_id=info.run_id, start_s=start_s, owners=part.stripes(width),
            last_s=last_s,
        )  # fmt: skip
        _append(run_dir / REQUESTS, FIELD_NAMES, rows)
        added += len(rows)
        row = unclosed_stage(
            stage, start_s=start_s, planned=planned, rows=planned, workers=1, schedule_hash=schedule.hash, marks=marks
        )
        _append(run_dir / STAGES, STAGE_COLUMNS, [row])
    info.finished_utc = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    info.interrupted = info.interrupted or interrupted
    info.problems.append(f"{cause}; {added} arrivals without a row were filled in (code CL-LOST)")
    info.files = file_digests(run_dir)
    write_run(run_dir / RUN, info)
    return added


def mark_interrupted(run_dir: Path) -> None:
    """Say in run.json that the user stopped the run, also when the load had ended by itself."""
    info = read_run(run_dir / RUN)
    if not info.interrupted:
        info.interrupted = True
        write_run(run_dir / RUN, info)


def _start_s(run_dir: Path, stage: int, there: dict[int, float], schedule: Any) -> float | None:
    """Run time at which the stage began: from its rows, else from the gauge; None when it did not begin."""
    if there:
        arrival, intended_s = next(iter(there.items()))
        return intended_s - float(schedule.intended_s[arrival])
    times = [float(row["t_s"]) for row in _read(run_dir / INFLIGHT) if row["stage"] == str(stage)]
    return min(times) if times else None


def _read(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as handle:
            yield from csv.DictReader(handle)
    except OSError:
        return


def _whole_lines(path: Path) -> None:
    """Cut a last line that was not written to its end: its arrival gets a row as lost."""
    with path.open("rb+") as handle:
        data = handle.read()
        end = data.rfind(b"\n") + 1
        if end != len(data):
            handle.truncate(end)


def _append(path: Path, columns: tuple[str, ...], rows: list[Any]) -> None:
    with path.open("a", encoding="utf-8", newline="") as handle:
        csv.writer(handle, lineterminator="\n").writerows(
            [[cell(getattr(row, name)) for name in columns] for row in rows]
        )
        handle.flush()
        os.fsync(handle.fileno())
