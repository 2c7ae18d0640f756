"""The other files of a run folder: run.json, stages.csv, the gauge and the service's own counters.

Input: a run folder. Output: records and arrays, with `LedgerProblem`s for what cannot be used.
Does not: read the ledger, compute or judge. A missing or damaged file is a problem with an id,
not an exception; only a run.json of an unknown schema raises `LedgerError`.
"""
from __future__ import annotations

import csv
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.load import LedgerError
from bench.records.request import LedgerProblem
from bench.records.stage import RunInfo, StageRow

MAX_STAGE_VALUE = 366 * 86_400.0  # no time, rate or count of a stage is above; a window is looked at second by second


class _NotJson(ValueError):
    """A value that Python's reader takes and JSON does not know."""


def _no_constant(name: str) -> None:
    raise _NotJson(f"it holds {name}, which is no JSON")


def read_run_info(run_dir: Path) -> tuple[RunInfo | None, dict[str, Any], list[LedgerProblem]]:
    """`run.json` as a record and as it is. A missing or damaged file is LED-019, not an exception."""
    path = run_dir / "run.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
        if not isinstance(raw, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as exc:
        why = str(exc) if isinstance(exc, _NotJson) else type(exc).__name__
        text = f"run.json cannot be read ({why}); the SLO comes from the command line or the defaults"
        return None, {}, [LedgerProblem("LED-019", text)]
    version = raw.get("schema_version")
    if version != 1:
        raise LedgerError(
            f"{path}: schema_version is {version!r}, this version reads 1; "
            "analyse the folder with the tool version that wrote it, or run again"
        )
    defaults: dict[str, Any] = {
        "run_id": run_dir.name, "started_utc": "", "finished_utc": None, "tool_version": "", "versions": {},
        "host": {}, "seed": 0, "schedule_hash": "", "command": [], "config": {}, "config_origin": {},
        "loop": "open", "shape": "sweep", "workers": 1,
    }  # fmt: skip
    known = {f.name for f in fields(RunInfo)}
    return RunInfo(**(defaults | {k: v for k, v in raw.items() if k in known})), raw, []


_STAGE_TYPES: dict[str, Any] = {
    "stage": int, "repeat": int, "seed": int, "planned": int, "workers": int, "rows": int, "offered_qps": float,
    "start_s": float, "window_start_s": float, "window_end_s": float, "end_s": float, "drained_s": float,
}  # fmt: skip


def read_stages(run_dir: Path) -> tuple[list[StageRow], list[LedgerProblem]]:
    """The rows of `stages.csv`; an unusable file is LED-014 and gives an empty list."""
    path = run_dir / "stages.csv"
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = [_stage_row(cells) for cells in csv.DictReader(stream)]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as exc:
        detail = "is missing" if isinstance(exc, FileNotFoundError) else f"cannot be used ({exc})"
        return [], [LedgerProblem("LED-014", f"stages.csv {detail}; stages and windows are taken from the rows")]
    if not rows:
        return [], [LedgerProblem("LED-014", "stages.csv holds no stage; stages and windows are taken from the rows")]
    return rows, []


def _stage_row(cells: dict[str, str]) -> StageRow:
    values: dict[str, Any] = {}
    for f in fields(StageRow):
        text = cells.get(f.name)
        if f.name in _STAGE_TYPES:
            if text in (None, ""):
                if f.name != "drained_s":
                    raise ValueError(f"column {f.name} is missing or empty")
                values[f.name] = None
            else:
                if not abs(float(text)) <= MAX_STAGE_VALUE and f.name != "seed":
                    raise ValueError(f"{f.name} is {text[:30]}")
                values[f.name] = (
                    int(float(text)) if _STAGE_TYPES[f.name] is int and f.name != "seed" else _STAGE_TYPES[f.name](text)
                )
        else:
            values[f.name] = text or ""
    return StageRow(**values)


@dataclass
class Gauge:
    """Samples of `inflight.csv`; arrays of equal length, sorted by time within a worker."""

    t_s: np.ndarray
    worker: np.ndarray
    in_flight: np.ndarray
    loop_lag_s: np.ndarray
    cpu_ratio: np.ndarray
    rss_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.t_s)


def read_gauge(run_dir: Path) -> tuple[Gauge | None, list[LedgerProblem]]:
    """The samples of `inflight.csv`; an unusable file is LED-015 and gives None."""
    frame, problem = _read_small(run_dir / "inflight.csv", ("t_s", "in_flight"))
    if frame is None:
        text = f"inflight.csv {problem}; Little's law has no independent count of requests in flight"
        return None, [LedgerProblem("LED-015", text)]
    for name, default in (("worker", 0.0), ("loop_lag_s", np.nan), ("cpu_ratio", np.nan), ("rss_bytes", np.nan)):
        if name not in frame:
            frame[name] = default
    whole = np.isfinite(frame[["t_s", "in_flight", "worker"]].to_numpy(dtype=np.float64)).all(axis=1)
    frame = frame[whole].sort_values(["worker", "t_s"])
    if frame.empty:
        text = "inflight.csv holds no sample; Little's law has no independent count of requests in flight"
        return None, [LedgerProblem("LED-015", text)]
    arrays = {f.name: frame[f.name].to_numpy(dtype=np.float64) for f in fields(Gauge)}
    return Gauge(**arrays), []


@dataclass
class ServerGauge:
    """Samples of `server_metrics.csv`: requests inside the service; NaN = not scraped."""

    t_s: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    kv_usage: np.ndarray
    preemptions_total: np.ndarray
    # totals since the service started
    ttft_sum_s: np.ndarray | None = None
    ttft_count: np.ndarray | None = None
    queue_sum_s: np.ndarray | None = None
    queue_count: np.ndarray | None = None
    steps_total: np.ndarray | None = None
    decision_total_s: np.ndarray | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) is None:
                setattr(self, f.name, np.full(len(self.t_s), np.nan))


def read_server_gauge(run_dir: Path) -> ServerGauge | None:
    """The samples of `server_metrics.csv`, or None when the service was not scraped."""
    frame, _ = _read_small(run_dir / "server_metrics.csv", ("t_s", "running", "waiting"))
    if frame is None or frame.empty:
        return None
    for f in fields(ServerGauge):
        if f.name not in frame:
            frame[f.name] = np.nan
    frame = frame[np.isfinite(frame["t_s"])].sort_values("t_s")
    return ServerGauge(**{f.name: frame[f.name].to_numpy(dtype=np.float64) for f in fields(ServerGauge)})


def _read_small(path: Path, needed: tuple[str, ...]) -> tuple[pd.DataFrame | None, str]:
    if not path.is_file():
        return None, "is missing"
    try:
        frame = pd.read_csv(path, engine="c", on_bad_lines="skip", encoding="utf-8-sig")
    except (OSError, ValueError) as exc:
        return None, f"cannot be read ({type(exc).__name__})"
    missing = [c for c in needed if c not in frame.columns]
    if missing:
        return None, f"has no column {', '.join(missing)}"
    for column in frame.columns:
        if frame[column].dtype.kind not in "fiu":
            frame[column] = pd.to_numeric(frame[column], errors="coerce")
    return frame, ""
