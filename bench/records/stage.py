"""The rows of `stages.csv` and `inflight.csv`, and the document `run.json`.

Input: what the sender knows about its stages and itself.
Output: dataclasses and their column tables.
Does not: compute a statistic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class StageRow:
    """One stage as it was run; times are seconds from the run's start."""

    stage: int
    repeat: int
    name: str
    offered_qps: float
    process: str
    loop: str  # "open" | "closed"
    seed: int
    planned: int
    start_s: float
    window_start_s: float
    window_end_s: float
    end_s: float  # last intended time may not lie after this
    drained_s: float | None  # nothing in flight any more; None when the drain limit passed
    workers: int
    rows: int
    schedule_hash: str
    marks: str = ""  # ";"-joined words of MARKS


def drain_time_s(done_s: float, end_s: float) -> float:
    """Seconds from the end of the arrivals to the last answer; 0 for a stage given up before its end."""
    return max(0.0, done_s - end_s)


@dataclass(slots=True)
class InflightRow:
    """One sample of one worker's gauge, about 10 a second; shares no code with the ledger."""

    t_s: float
    worker: int
    stage: int
    in_flight: int
    loop_lag_s: float  # how late this sample's timer fired
    cpu_ratio: float | None  # CPU of the worker process over the last second, 1 = one core
    rss_bytes: int | None


@dataclass
class RunInfo:
    """`run.json`: how the run was made. Holds no part of any key."""

    run_id: str
    started_utc: str
    finished_utc: str | None
    tool_version: str
    versions: dict[str, str]
    host: dict[str, Any]
    seed: int
    schedule_hash: str
    command: list[str]
    config: dict[str, Any]  # resolved and masked
    config_origin: dict[str, str]  # key -> file, environment, default, command line
    loop: str
    shape: str
    workers: int
    worker_info: list[dict[str, Any]] = field(default_factory=list)
    target: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    simulated: bool = False
    preflight: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # what went wrong while recording
    stopped_by: str = ""  # the abort gate that ended the run before its last stage
    # name -> {bytes, sha256} of what was written, once the run has ended (digests.py); run.json -> sha256 of the rest
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    transport: dict[str, int] = field(default_factory=dict)  # batches of rows on their way to the master
    # one of several masters that share a plan: {part, of, load, t0_s, lead_t0_s, stages: {stage: offset_s, bound_s}}
    part: dict[str, Any] = field(default_factory=dict)
    schema_version: int = 1


STAGE_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(StageRow))
INFLIGHT_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(InflightRow))

# The words of stages.csv; any other was written by somebody else.
LOOPS = ("open", "closed")
PROCESSES = ("constant", "poisson", "gamma", "trace", "closed")
MARKS = (
    "interrupted", "drain_limit", "worker_lost", "worker_joined", "limit", "gate_abort", "write_failed", "not_run",
    "not_prepared", "schedule_differs", "recovered", "master_lost", "part_lost", "prompts_changed", "prompts_differ",
)  # fmt: skip

# name -> (unit, meaning); `docs/ledger.md` is written from these tables.
STAGE_MEANING: dict[str, tuple[str, str]] = {
    "stage": ("", "stage number, from 0"),
    "repeat": ("", "which repetition of the same offered rate, from 0"),
    "name": ("", "name of its rows in Locust's statistics"),
    "offered_qps": ("1/s", "asked rate; of a closed loop the rate that came about"),
    "process": ("", f"law of the gaps: {', '.join(PROCESSES)}"),
    "loop": ("", "`open` or `closed`"),
    "seed": ("", "seed of the stage"),
    "planned": ("", "planned arrivals; as many rows has the ledger"),
    "start_s": ("s", "first moment an arrival could be due"),
    "window_start_s": ("s", "end of the warm-up: from here arrivals count"),
    "window_end_s": ("s", "to here"),
    "end_s": ("s", "no arrival is due after this"),
    "drained_s": ("s", "nothing in flight any more; empty when the drain limit passed first"),
    "workers": ("", "workers that the arrivals were striped over"),
    "rows": ("", "rows in the ledger"),
    "schedule_hash": ("", "sha256 over all arrays of the stage's schedule"),
    "marks": (
        "",
        f"semicolon list: {', '.join(MARKS)}",
    ),
}
INFLIGHT_MEANING: dict[str, tuple[str, str]] = {
    "t_s": ("s", "when the sample was taken"),
    "worker": ("", "index of the worker"),
    "stage": ("", "stage the worker was in"),
    "in_flight": ("", "streams open on this worker, counted by the transport"),
    "loop_lag_s": ("s", "how late the sample's timer fired: the lag of our own loop"),
    "cpu_ratio": ("1", "CPU seconds per second of the worker process, once a second"),
    "rss_bytes": ("bytes", "memory of the worker process, once a second"),
}
