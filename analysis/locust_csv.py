"""Locust's `locust_stats.csv`: compared with the ledger, or analysed alone.

Input: the CSV's text rows, and exact figures from the ledger. Output: the `csv_check`
object of analysis.json with every disagreement named, or a table with stated loss.
Does not: read `Aggregated` as a statistic (it mixes TTFT, TPOT and E2E unless the
locustfile keeps them apart) or percentiles beyond their bucket.

1. Counts must agree exactly: E2E row = all planned arrivals of the stage that were
   reported, failures = those not ok; TTFT and TPOT rows = the answers that have one.
2. Averages are exact in Locust: they must agree within 0.1 % (and 1 µs).
3. Percentiles are rounded to two significant digits (three with our locustfiles): the
   exact value must lie within the bucket, half a step to either side.
"""
from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

E2E_TYPES = ("POST", "chat", "completions")
SIDE_TYPES = ("TTFT", "TPOT")
AVERAGE_LIMIT = 0.001
AVERAGE_SLACK_MS = 0.001
PERCENTILE_COLUMNS = {"50%": 0.50, "90%": 0.90, "95%": 0.95, "99%": 0.99}
STAGE_NAME = re.compile(r"^(\d+)\s")
MAX_LISTED = 20


@dataclass
class CsvRow:
    """One row of the stats table; milliseconds as Locust writes them."""

    kind: str
    name: str
    requests: int
    failures: int
    average_ms: float | None
    percentiles_ms: dict[str, float]


@dataclass
class CsvTable:
    """The readable rows and what was wrong with the file."""

    rows: list[CsvRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def find(self, name: str, kinds: tuple[str, ...]) -> CsvRow | None:
        """The row of a stage."""
        return next((r for r in self.rows if r.name == name and r.kind in kinds), None)


@dataclass(frozen=True)
class LedgerFigures:
    """Exact figures of one stage from the ledger, for one kind of row; seconds."""

    name: str
    kind: str  # "E2E" | "TTFT" | "TPOT"
    requests: int
    failures: int
    mean_s: float | None
    percentiles_s: dict[str, float]  # column name -> exact value with Locust's own rank


def read_stats(path: Path) -> CsvTable:
    """The table at `path`; a missing or damaged file gives problems, not an exception."""
    table = CsvTable()
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            if not {"Type", "Name", "Request Count", "Failure Count"} <= set(reader.fieldnames or ()):
                table.problems.append(f"{path.name} is not a Locust stats table (header {reader.fieldnames})")
                return table
            for cells in reader:
                try:
                    table.rows.append(_row(cells))
                except (TypeError, ValueError, OverflowError):
                    table.problems.append(f"{path.name}: unreadable row {cells.get('Name')!r}")
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        table.problems.append(f"{path.name} cannot be read ({type(exc).__name__})")
    return table


def _row(cells: dict[str, str]) -> CsvRow:
    def number(name: str) -> float | None:
        text = (cells.get(name) or "").strip()
        value = None if text in ("", "N/A") else float(text)
        if value is not None and not math.isfinite(value):
            raise ValueError(text)
        return value

    found = {}
    for column in PERCENTILE_COLUMNS:
        value = number(column)
        if value is not None:
            found[column] = value
    return CsvRow(
        kind=(cells["Type"] or "").strip(), name=cells["Name"].strip(), requests=int(float(cells["Request Count"])),
        failures=int(float(cells["Failure Count"])), average_ms=number("Average Response Time"), percentiles_ms=found,
    )  # fmt: skip


def locust_rank(n: int, share: float) -> int:
    """0-based rank of Locust's percentile in ascending order: int(n * share), the last at most."""
    return min(int(n * share), n - 1)


def bucket_half_ms(value_ms: float, fine: bool = False) -> float:
    """Half a step of the rounding at this value, ms.

    Locust's own: steps of 1, 10, 100, 1000 ms by magnitude, and cut to whole milliseconds.
    `fine`: the three significant digits that our locustfiles install.
    """
    if value_ms <= 0 or not math.isfinite(value_ms):
        return 0.5
    magnitude = math.floor(math.log10(value_ms))
    if fine:
        return 0.5 * 10.0 ** (magnitude - 2)
    return 1.0 if value_ms < 100 else 0.5 * 10.0 ** min(magnitude - 1, 3) + 1.0


def has_fine_buckets(table: CsvTable) -> bool:
    """True when some percentile has more digits than Locust's own rounding leaves."""
    for row in table.rows:
        for value in row.percentiles_ms.values():
            step = 1.0 if value < 100 else 10.0 ** min(math.floor(math.log10(value)) - 1, 3)
            if abs(value / step - round(value / step)) > 1e-9:
                return True
    return False


def compare(table: CsvTable, figures: list[LedgerFigures]) -> dict[str, Any]:
    """The `csv_check` object: `ok`, `rows` compared, and a list of mismatches in words."""
    mismatches: list[str] = list(table.problems)
    compared, fine = 0, has_fine_buckets(table)
    for f in figures:
        kinds = E2E_TYPES if f.kind == "E2E" else (f.kind,)
        row = table.find(f.name, kinds)
        if row is None:
            if f.requests:
                mismatches.append(f"{f.name}: no {f.kind} row in the CSV, the ledger has {f.requests}")
            continue
        compared += 1
        mismatches.extend(_row_mismatches(row, f, fine))
    known = {f.name for f in figures}
    for row in table.rows:
        if row.kind in (*E2E_TYPES, *SIDE_TYPES) and row.name not in known:
            mismatches.append(f"{row.name}: the CSV has {row.requests} {row.kind} rows of a stage the ledger lacks")
    return {
        "present": True,
        "ok": not mismatches,
        "rows_compared": compared,
        "mismatches": mismatches[:MAX_LISTED],
        "mismatch_count": len(mismatches),
    }


def _row_mismatches(row: CsvRow, f: LedgerFigures, fine: bool) -> list[str]:
    where = f"{f.name} {f.kind}"
    out = []
    if row.requests != f.requests:
        out.append(f"{where}: the CSV counts {row.requests} requests, the ledger {f.requests}")
    if f.kind == "E2E" and row.failures != f.failures:
        out.append(f"{where}: the CSV counts {row.failures} failures, the ledger {f.failures}")
    if out:
        return out  # averages of different sets say nothing more
    if row.average_ms is not None and f.mean_s is not None:
        exact = f.mean_s * 1e3
        if abs(row.average_ms - exact) > max(AVERAGE_LIMIT * exact, AVERAGE_SLACK_MS):
            out.append(f"{where}: the CSV's average is {row.average_ms:.4f} ms, the ledger's {exact:.4f} ms")
    for column, value in row.percentiles_ms.items():
        exact_s = f.percentiles_s.get(column)
        if exact_s is None:
            continue
        allowed = bucket_half_ms(exact_s * 1e3, fine)
        if abs(value - exact_s * 1e3) > allowed * 1.001 + AVERAGE_SLACK_MS:
            out.append(f"{where}: the CSV's {column} is {value:g} ms, the ledger's {exact_s * 1e3:.3f} ms")
    return out


def csv_only(table: CsvTable) -> list[dict[str, Any]]:
    """What a plain `locust --csv` run can say, per row, with bounds and no more.

    Each percentile comes with the bounds of its bucket. Not available, and not guessed:
    joint attainment, in-flight, arrival times, lateness, warm-up, unfinished requests.
    """
    found, fine = [], has_fine_buckets(table)
    for row in table.rows:
        if row.name == "Aggregated":
            continue  # mixes custom events with requests
        match = STAGE_NAME.match(row.name)
        entry: dict[str, Any] = {
            "name": row.name,
            "type": row.kind,
            "stage": int(match.group(1)) if match else None,
            "requests": row.requests,
            "failures": row.failures,
            "error_ratio": row.failures / row.requests if row.requests else None,
            "mean_s": None if row.average_ms is None else row.average_ms / 1e3,
        }
        for column, value in row.percentiles_ms.items():
            half = bucket_half_ms(value, fine)
            key = "p" + column.rstrip("%")
            entry[f"{key}_low_s"], entry[f"{key}_high_s"] = max(0.0, value - half) / 1e3, (value + half) / 1e3
        found.append(entry)
    return found


def csv_loss(table: CsvTable) -> str:
    """What such a table cannot say, in words; its percentiles are as coarse as the table itself shows."""
    if has_fine_buckets(table):
        rounding = "percentiles are rounded to three significant digits (up to 0.5 %)"
    else:
        rounding = "percentiles are rounded to two significant digits (up to 5 %), TPOT to whole milliseconds"
    return (
        f"From Locust's CSV alone: {rounding}, failures are inside the percentiles, values are over the whole run of a "
        "name. Attainment, Little's law, the knee and the proof of the stimulus need requests.csv and are not computed."
    )
