"""Reads and writes the files of a run folder that hold rows: the ledger and its neighbours.

Input: rows as dataclasses. Output: CSV files whose header is the field list.
Does not: decide what a row says, or compute anything over rows.

1. A file grows by whole lines, so that a killed writer leaves a readable file.
2. Absent is an empty cell; floats keep nanoseconds; nothing is rounded to ms.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from bench.records.request import FIELD_NAMES, RequestRow
from bench.records.stage import INFLIGHT_COLUMNS, STAGE_COLUMNS, InflightRow, RunInfo, StageRow

REQUESTS = "requests.csv"
STAGES = "stages.csv"
INFLIGHT = "inflight.csv"
LOCUST_STATS = "locust_stats.csv"  # written by Locust
RUN = "run.json"
PLAN = "plan.json"  # of a part: what `bench recover --into` needs when no shard is left


def cell(value: Any) -> str | int:
    """The CSV cell of one value: empty for None, nine decimals at most for floats."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.9f}".rstrip("0").rstrip(".") if abs(value) < 1e12 else repr(value)
    return value


class RowWriter:
    """Appends dataclass rows to one CSV file, whole lines at a time.

    Raises OSError when the file cannot be made; a failing write later (a full
    disk) raises OSError too and leaves the lines written so far.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self.columns = tuple(columns)
        self.rows = 0
        self._file: IO[str] = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._csv.writerow(self.columns)
        self._file.flush()

    def write(self, rows: Iterable[Any]) -> None:
        """Append rows and hand them to the operating system."""
        lines = [[cell(getattr(row, name)) for name in self.columns] for row in rows]
        self._csv.writerows(lines)
        self._file.flush()
        self.rows += len(lines)

    def append(self, lines: bytes, rows: int) -> None:
        """Append lines that are CSV already (see csv_lines.py) and hand them to the operating system."""
        self._file.flush()
        self._file.buffer.write(lines)  # type: ignore[attr-defined]
        self._file.flush()
        self.rows += rows

    def close(self) -> None:
        """Write through to the disk and close; safe to call twice."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def find_requests(run_dir: Path) -> Path | None:
    """The ledger of a run folder: requests.csv, else requests.csv.gz; None when it has neither."""
    plain = run_dir / REQUESTS
    return next((path for path in (plain, plain.with_name(REQUESTS + ".gz")) if path.is_file()), None)


def open_rows(path: Path) -> IO[str]:
    """A CSV file of a run folder as text for `csv`, plain or gzip by its name. Raises OSError."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")  # type: ignore[return-value]
    return path.open(encoding="utf-8", newline="")


def write_requests(path: Path, rows: Iterable[RequestRow]) -> int:
    """The number of rows written to a new ledger at `path`."""
    with RowWriter(path, FIELD_NAMES) as writer:
        writer.write(rows)
        return writer.rows


def write_stages(path: Path, rows: Iterable[StageRow]) -> int:
    """The number of rows written to a new `stages.csv` at `path`."""
    with RowWriter(path, STAGE_COLUMNS) as writer:
        writer.write(rows)
        return writer.rows


def write_inflight(path: Path, rows: Iterable[InflightRow]) -> int:
    """The number of rows written to a new `inflight.csv` at `path`."""
    with RowWriter(path, INFLIGHT_COLUMNS) as writer:
        writer.write(rows)
        return writer.rows


def content_digest(data: dict[str, Any]) -> str:
    """SHA-256, as hex digits, of what a `run.json` says but for `files`, as JSON: sorted keys, no spaces, ASCII."""
    said = {name: value for name, value in data.items() if name != "files"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def write_run(path: Path, info: RunInfo) -> None:
    """Write `run.json` in one step: a reader never sees half of it.

    Of a run that lists its files it lists the digest of its own content too (`info.files`), made anew each time.
    """
    if info.files:
        as_read = json.loads(json.dumps(dataclasses.asdict(info), default=str))  # keys are text there, tuples lists
        info.files = {**info.files, RUN: {"sha256": content_digest(as_read)}}
    text = json.dumps(dataclasses.asdict(info), ensure_ascii=False, indent=1, default=str)
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def read_run(path: Path) -> RunInfo:
    """The `run.json` at `path`; unknown keys of a newer version are dropped.

    Raises ValueError with the place and the mend when it is no such document.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON at line {error.lineno}: {error.msg}; restore it or run again") from None
    known = {f.name: f for f in dataclasses.fields(RunInfo)}
    missing = [
        name
        for name, f in known.items()
        if name not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}; this is not the run.json of a run folder")
    return RunInfo(**{k: v for k, v in data.items() if k in known})
